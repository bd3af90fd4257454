"""What drawings of land are worth, by real pictures: python -m tools.embedded_model.land --pictures DIR --textures DIR

The textures are those of the flight simulator FlightGear (Debian's flightgear-data-base, Textures/Terrain), sorted by
their names. They are looked at here and nowhere else: nothing of them is in the model. Prints the share told right by
drawings alone, for each way to make directions of them, and by the words of a model.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image

from selftpt import load_model
from selftpt.adaptation import zero_shot
from selftpt.errors import SelfTPTError, told_in_one_line
from selftpt.models import EMBEDDED
from tools.embedded_model.above import LAND
from tools.embedded_model.export import DIMENSIONS
from tools.embedded_model.ingredients import HOME, NAMES, look, see, see_land, trunk
from tools.embedded_model.teacher import Space, by_drawings, right

# What a file shows, by its name: the first that fits. Masks, mixtures and what was not drawn are left out.
LEFT_OUT = (
    "mask|relief|overlay|structure|colors|winter-|unknown|void|grain|transition|airport|golf|cemetery|carpark|gravel|asphalt|"
    "mud|transport|cropwood|cropgrass|countryside|commercial|greenspace|generic|pantanal|wash|tidal|cliffs|dirt|patch"
)
SHOWN = {
    "permanent crops": "orchard",
    "annual crops": "crop|rice",
    "forest": "forest|deciduous|evergreen",
    "scrub": "shrub|heath|scrub|tundra|savanna|bush",
    "pasture": "pasture|grass",
    "industrial": "industr|port",
    "residential": "town|suburb|slum",
    "city": "city",
    "open water": "water",
    "sand": "sand|dune",
    "snow": "snow|glacier|packice",
    "rock": "rock|lava",
    "marsh": "marsh",
}
VIEWS = ("a photo of a {}.", "a satellite photo of {}.")
Texture = tuple[Path, int]


def textures(folder: Path, each: int = 4) -> list[tuple[Texture, int]]:
    """Crops of files, by numbers, with the kind of land they show."""
    found = []
    for path in sorted(folder.glob("*.png")):
        kinds = [kind for kind, names in SHOWN.items() if re.search(names, path.name.lower())]
        if kinds and not re.search(LEFT_OUT, path.name):
            found += [((path, number), [*SHOWN].index(kinds[0])) for number in range(each)]
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
    seen, labels = look(textures(options.textures), crop, options.work / "textures.safetensors")
    print(f"{len(labels)} crops of {len(SHOWN)} kinds")

    known = torch.arange(len(NAMES))
    head = trunk().get_classifier().weight.detach()
    space = Space.of(head, see(options.pictures, options.work)[0], known, DIMENSIONS)
    drawn, kinds = see_land(options.work)
    rows = [[*LAND].index(kind) for kind in SHOWN]
    for ridge in (0.1, 0.3, 1.0, 3.0, 1e6):
        vectors = by_drawings(space.see(drawn), kinds, ridge)[rows]
        print(f"{right(space.see(seen), vectors, labels):.1%} by drawings, ridge {ridge:g}", flush=True)
    names = [LAND[kind][1][0] for kind in SHOWN]
    for name, view in itertools.product(options.model, VIEWS):
        model = load_model(name, device="cpu")
        with torch.inference_mode():
            features = F.normalize(model.image.encode.head(seen), dim=-1)
        vectors = zero_shot(model, names, template=view).weights
        print(f'{right(features, vectors, labels):.1%} by {name}, "{view}"', flush=True)


if __name__ == "__main__":
    with told_in_one_line():
        main()
