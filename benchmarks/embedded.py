"""How good and how fast the embedded model is: zero-shot top-1 on datasets in CoOp's layout, and images a second.

`imagenet`: held-out images, 1,000-way; `imagenet_64` and `imagenet_32`: the same, made so small first.
`imagenet_unseen`: 200 classes, 200-way, by class vectors of a text tower that the same recipe made without them
(`python -m tools.embedded_model --hold-out`). The rate is of `encode_images` on ready tensors over that of the bare
timm tower, both in the same run.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from measure import interleaved, ratio
from PIL import Image, ImageOps
from torch import Tensor

from selftpt.adaptation import zero_shot
from selftpt.data.cache import Cache
from selftpt.data.datasets import Dataset, read_dataset
from selftpt.data.decoding import open_image
from selftpt.data.features import FeatureProvider
from selftpt.data.threads import in_threads
from selftpt.data.views import ViewSpec
from selftpt.errors import exit_on_error
from selftpt.evaluation.metrics import accuracy
from selftpt.files import read_tensors
from selftpt.models import Model, load_model

DATASETS = ("caltech101", "oxford_pets", "eurosat", "dtd", "food101", "imagenet")


def zero_shot_top1(model: Model, dataset: Dataset) -> dict[str, float]:
    """Per cent of test images told right by "a photo of a ...".

    Where the folder full/ has the whole of a split that was cut, also with each class weighed by its share of that.
    """
    provider = FeatureProvider(model, [ViewSpec()], Cache(), fixed_batch=True)
    classifier, features = zero_shot(model, dataset.test.names), provider(dataset.test.images)
    right = (classifier(features).argmax(1) == torch.tensor(dataset.test.labels)).tolist()
    result = {dataset.name: 100 * statistics.mean(right)}
    if (full := dataset.root / "full" / dataset.split).is_file():
        of_class: dict[int, list[bool]] = {}
        for label, was in zip(dataset.test.labels, right, strict=True):
            of_class.setdefault(label, []).append(was)
        labels = [label for _, label, _ in json.loads(full.read_text())["test"] if label in of_class]
        result[f"{dataset.name}_as_whole"] = 100 * statistics.mean(statistics.mean(of_class[i]) for i in labels)
    return result


def show(model: Model, paths: Sequence[Path], side: int | None = None, batch: int = 32) -> Iterator[Tensor]:
    """Batches of pixels [B, 3, S, S], uint8; `side`: of images that are first cut to squares of so many pixels."""

    def pixels(path: Path) -> Tensor:
        image = open_image(path)
        return model.preprocess(ImageOps.fit(image, (side, side), Image.Resampling.BICUBIC) if side else image)

    shown = in_threads(pixels, paths, ahead=2 * batch)
    while some := list(itertools.islice(shown, batch)):
        yield torch.stack(some)


def small(model: Model, imagenet: Dataset, side: int) -> float:
    """Per cent right of test images that are cut to squares of so many pixels a side."""
    seen = torch.cat([model.encode_images(pixels) for pixels in show(model, imagenet.test.paths, side)])
    return accuracy(zero_shot(model, imagenet.test.names)(seen[:, None]), torch.tensor(imagenet.test.labels))


def unseen(model: Model, imagenet: Dataset) -> float:
    """Per cent right of images of the held-out classes, by the model that has not learned them.

    It has the image tower of the embedded one, but a projection of its own: on top of the tower's own features.
    """
    header, exam = read_tensors(Path(__file__).with_name("embedded_unseen.safetensors"), "exam")
    place = {label: i for i, label in enumerate(header["labels"])}
    assert imagenet.train is not None
    images = [pair for part in (imagenet.train, imagenet.test) for pair in zip(part.paths, part.labels, strict=True)]
    rows = [(path, place[label]) for path, label in images if label in place]
    seen = []
    with torch.inference_mode():
        for pixels in show(model, [path for path, _ in rows]):
            laid = model.preprocess.normalize(pixels).contiguous(memory_format=torch.channels_last)
            seen.append(model.image.visual.trunk(laid))
    features = F.normalize(torch.cat(seen) @ exam["projection"].float().t() + exam["bias"], dim=-1)
    return accuracy(features @ exam["vectors"].float().t(), torch.tensor([label for _, label in rows]))


def rates(model: Model) -> dict[str, float]:
    """Images a second, batches of 32 ready tensors: of `encode_images` over timm's own tower in the better of the two
    layouts of memory, and of timm's with channels last over channels first.
    """
    tower = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
    pixels = torch.randn(32, 3, 224, 224)

    def bare(layout: torch.memory_format) -> Callable[[], Tensor]:
        theirs, laid = copy.deepcopy(tower).to(memory_format=layout), pixels.contiguous(memory_format=layout)
        return torch.inference_mode()(lambda: theirs(laid))

    layouts = {"first": bare(torch.contiguous_format), "last": bare(torch.channels_last)}
    seconds = interleaved({**layouts, "ours": lambda: model.encode_images(pixels)}, rounds=5)
    best = [min(pair) for pair in zip(seconds["first"], seconds["last"], strict=True)]
    return {
        "rate_over_bare_tower": ratio(best, seconds["ours"]),
        "channels_last_over_first": ratio(seconds["first"], seconds["last"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="datasets in the folders that CoOp prescribes")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(device="cpu")
    result: dict[str, float] = {}
    for name in DATASETS:
        dataset = read_dataset(name, options.data)
        result |= zero_shot_top1(model, dataset)
        size = f"{len(dataset.test.paths)} images, {len(dataset.test.names)} classes"
        print(f"{name}: {result[name]:.1f} % of {size}", flush=True)
        if f"{name}_as_whole" in result:
            print(f"  {result[f'{name}_as_whole']:.1f} % by the whole test set's counts")
    for side in (64, 32):
        result[f"imagenet_{side}"] = small(model, dataset, side)
        print(f"  {result[f'imagenet_{side}']:.1f} % at {side} pixels a side", flush=True)
    result["imagenet_unseen"] = unseen(model, dataset)
    print(f"imagenet_unseen: {result['imagenet_unseen']:.1f} %, 200 classes", flush=True)
    result |= rates(model)
    print(f"encode_images: {result['rate_over_bare_tower']:.2f} of the bare tower's rate")
    print(f"the bare tower with channels last: {result['channels_last_over_first']:.2f} of channels first")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    with exit_on_error():
        main()
