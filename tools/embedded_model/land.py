"""What drawings of land are worth, by real pictures: python -m tools.embedded_model.land --pictures DIR --textures DIR

The textures are those of the flight simulator FlightGear (Debian's flightgear-data-base, Textures/Terrain), sorted by
their names. The drawings and the ridge were settled by a look at them; nothing else of them is in the model. Prints the
share told right by drawings alone, by ridge (a large one: by means), and by the words of models.
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
from selftpt.errors import SelfTPTError, told_in_one_line
from selftpt.files import digest
from selftpt.models import EMBEDDED
from tools.embedded_model.above import LAND
from tools.embedded_model.export import DIMENSIONS
from tools.embedded_model.ingredients import HOME, NAMES, look, see, see_land, trunk
from tools.embedded_model.teacher import Space, by_drawings

# What a file shows, by its name: the first that fits. Masks and mixtures are left out.
LEFT_OUT = "mask|relief|overlay|structure|colors|winter-|grain|transport|cropwood|cropgrass|grass_marsh|patch|dirt"
SHOWN = {
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


def textures(folder: Path, each: int = 4) -> list[tuple[Texture, int]]:
    """Crops of files, by numbers, with the place of what they show in SHOWN."""
    found = []
    for path in sorted(folder.glob("*.png")):
        kinds = [i for i, names in enumerate(SHOWN.values()) if re.search(names, path.name.lower())]
        if kinds and not re.search(LEFT_OUT, path.name.lower()):
            found += [((path, number), kinds[0]) for number in range(each)]
    if not found:
        raise SelfTPTError(f"{folder} has no textures of land: name Textures/Terrain of flightgear-data-base")
    return found


def crop(texture: Texture) -> Image.Image:
    """A square of a texture: all, or a part; half of them coarse."""
    path, number = texture
    rng, picture = random.Random(f"{path.name} {number}"), Image.open(path).convert("RGB")
    side = int(min(picture.size) * rng.choice([1, 0.7, 0.5]))
    x, y = rng.randint(0, picture.width - side), rng.randint(0, picture.height - side)
    size = 64 if number % 2 else 224
    return picture.crop((x, y, x + side, y + side)).resize((size, size), Image.Resampling.LANCZOS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, required=True, help="ImageNet pictures, a folder a class by its wnid")
    parser.add_argument("--textures", type=Path, required=True, help="FlightGear's folder Textures/Terrain")
    parser.add_argument("--work", type=Path, default=HOME / "build" / "embedded-model", help="kept between runs")
    parser.add_argument("--model", nargs="*", default=[EMBEDDED], help="models of this recipe, to be judged by words")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    crops = textures(options.textures)
    key = digest(Path(__file__).read_text("utf8"), [str(path.resolve()) for (path, _), _ in crops])
    seen, labels = look(crops, crop, options.work / f"textures-{key}.safetensors")
    count = torch.bincount(labels, minlength=len(SHOWN))
    if not count.all():
        raise SelfTPTError(f"{options.textures} has not all kinds of land: name FlightGear's Textures/Terrain")
    print(f"{len(labels)} crops of {len(SHOWN)} kinds, the most of one kind {count.max() / len(labels):.1%}")
    print("told right, and mean over kinds:")

    def tell(pictures: Tensor, vectors: Tensor, how: str) -> None:
        hits = ((pictures @ vectors.t()).argmax(1) == labels).float()
        by_kind = torch.zeros(len(SHOWN)).index_add(0, labels, hits) / count
        print(f"{hits.mean():.1%} {by_kind.mean():.1%} {how}", flush=True)

    head = trunk().get_classifier().weight.detach()
    space = Space.of(head, see(options.pictures, options.work)[0], torch.arange(len(NAMES)), DIMENSIONS)
    drawn, kinds = see_land(options.work)
    rows = [[*LAND].index(kind) for kind in SHOWN]
    for ridge in (0.1, 0.3, 1.0, 3.0, 1e6):
        tell(space.see(seen), by_drawings(space.see(drawn), kinds, ridge)[rows], f"by drawings, ridge {ridge:g}")
    for name in options.model:
        model = load_model(name, device="cpu")
        with torch.inference_mode():
            features = F.normalize(model.image.visual.head(seen), dim=-1)
        for view in ("a photo of a {}.", "a satellite photo of {}."):
            vectors = zero_shot(model, [LAND[kind][1][0] for kind in SHOWN], view).weights
            tell(features, vectors, f'by {name}, "{view}"')


if __name__ == "__main__":
    with told_in_one_line():
        main()
