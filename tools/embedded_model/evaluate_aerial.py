"""Evaluate the aerial directions on real textures.

Run it with `python -m tools.embedded_model.evaluate_aerial --images DIR --textures DIR`.

The textures are those of the flight simulator FlightGear (Debian's package flightgear-data-base, Textures/Terrain),
labelled by their file names. The drawings were designed on them, and nothing else of them is in the model. The model
uses a ridge of 1, which is not the best of the ridges that are compared. Each line has the accuracy over crops and the
mean accuracy over kinds: by the discriminant directions of the drawings for several ridges (a very large ridge gives
the means of the kinds), and by the words of models.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from selftpt import load_model
from selftpt.adaptation import zero_shot
from selftpt.errors import SelfTPTError, exit_on_error
from selftpt.files import digest
from selftpt.models import EMBEDDED
from tools.embedded_model.aerial_scenes import LAND_COVER
from tools.embedded_model.export import DIMENSIONS
from tools.embedded_model.image_features import (
    CLASS_NAMES,
    ROOT,
    aerial_features,
    cached_features,
    imagenet_features,
    load_backbone,
)
from tools.embedded_model.targets import EmbeddingSpace, discriminant_directions

# A texture's kind is the first whose pattern its file name matches. Masks and mixtures are excluded.
EXCLUDED = "mask|relief|overlay|structure|colors|winter-|grain|transport|cropwood|cropgrass|grass_marsh|patch|dirt"
KIND_PATTERNS = {
    "permanent crops": "orchard",
    "annual crops": "crop|rice",
    "forest": "forest|deciduous|evergreen",
    "scrub": "shrub|heath|scrub|tundra|savanna|bush",
    "airport": "airport",
    "golf": "golf",
    "car park": "carpark",
    "pasture": "pasture|grass",
    "industrial": "industr",
    "residential": "town|suburb|slum",
    "city": "city",
    "open water": "water",
    "sand": "sand|dune",
    "snow": "snow|glacier|packice",
    "rock": "rock|lava",
    "marsh": "marsh",
}
Texture = tuple[Path, int]


def find_textures(folder: Path, crops_per_file: int = 4) -> list[tuple[Texture, int]]:
    """Return numbered crops of the files of a folder, each with the index of its kind in KIND_PATTERNS."""
    textures = []
    for path in sorted(folder.glob("*.png")):
        kinds = [i for i, pattern in enumerate(KIND_PATTERNS.values()) if re.search(pattern, path.name.lower())]
        if kinds and not re.search(EXCLUDED, path.name.lower()):
            textures += [((path, number), kinds[0]) for number in range(crops_per_file)]
    if not textures:
        raise SelfTPTError(
            f"{folder} has no textures of land: pass the folder Textures/Terrain of flightgear-data-base"
        )
    return textures


def crop(texture: Texture) -> Image.Image:
    """Return a random square crop of a texture; odd numbers have a low resolution."""
    path, number = texture
    rng, image = random.Random(f"{path.name} {number}"), Image.open(path).convert("RGB")
    side = int(min(image.size) * rng.choice([1, 0.7, 0.5]))
    x, y = rng.randint(0, image.width - side), rng.randint(0, image.height - side)
    size = 64 if number % 2 else 224
    return image.crop((x, y, x + side, y + side)).resize((size, size), Image.Resampling.LANCZOS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="ImageNet images, one folder per class (WordNet id)")
    parser.add_argument("--textures", type=Path, required=True, help="FlightGear's folder Textures/Terrain")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "embedded-model", help="folder of cached features"
    )
    parser.add_argument("--model", nargs="*", default=[EMBEDDED], help="models of this recipe to evaluate by words")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    crops = find_textures(options.textures)
    key = digest(Path(__file__).read_text("utf8"), [str(path.resolve()) for (path, _), _ in crops])
    features, labels = cached_features(crops, crop, options.work / f"textures-{key}.safetensors")
    count = torch.bincount(labels, minlength=len(KIND_PATTERNS))
    if not count.all():
        raise SelfTPTError(f"{options.textures} lacks some kinds of land: pass FlightGear's folder Textures/Terrain")
    print(f"{len(labels)} crops of {len(KIND_PATTERNS)} kinds; the largest kind has {count.max() / len(labels):.1%}")
    print("accuracy, mean accuracy over kinds:")

    def evaluate(images: Tensor, vectors: Tensor, method: str) -> None:
        hits = ((images @ vectors.t()).argmax(1) == labels).float()
        by_kind = torch.zeros(len(KIND_PATTERNS)).index_add(0, labels, hits) / count
        print(f"{hits.mean():.1%} {by_kind.mean():.1%} {method}", flush=True)

    head = load_backbone().get_classifier().weight.detach()
    imagenet = imagenet_features(options.images, options.work)[0]
    space = EmbeddingSpace.fit(head, imagenet, torch.arange(len(CLASS_NAMES)), DIMENSIONS)
    drawn, kinds = aerial_features(options.work)
    rows = [[*LAND_COVER].index(kind) for kind in KIND_PATTERNS]
    for ridge in (0.1, 0.3, 1.0, 3.0, 1e6):
        directions = discriminant_directions(space.project(drawn), kinds, ridge)[rows]
        evaluate(space.project(features), directions, f"drawings, ridge {ridge:g}")
    for name in options.model:
        model = load_model(name, device="cpu")
        with torch.inference_mode():
            images = F.normalize(model.image.visual.head(features), dim=-1)
        for template in ("a photo of a {}.", "a satellite photo of {}."):
            vectors = zero_shot(model, [LAND_COVER[kind][1][0] for kind in KIND_PATTERNS], template).weights
            evaluate(images, vectors, f'{name}, "{template}"')


if __name__ == "__main__":
    with exit_on_error():
        main()
