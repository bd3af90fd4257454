"""Measure the zero-shot accuracy and the speed of the embedded model.

The accuracies are top-1 (%) on the test images of datasets in CoOp's layout. `imagenet` has images that the recipe did
not use, and 1,000 classes. For `imagenet_64` and `imagenet_32` the same images are downsampled to 64 x 64 and 32 x 32
pixels. `imagenet_unseen` has 200 classes; their vectors come from a text tower that the same recipe trained without
these classes (`python -m tools.embedded_model --hold-out`).

The speed is that of `encode_images` on prepared tensors, relative to timm's image tower in the same run.
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
    """Return the zero-shot top-1 accuracy (%) on the test images, with the template "a photo of a {}.".

    If the folder full/ has the complete split of a reduced dataset, also return the accuracy with the classes weighted
    by their number of images in the complete test set.
    """
    provider = FeatureProvider(model, [ViewSpec()], Cache(), fixed_batch=True)
    classifier, features = zero_shot(model, dataset.test.names), provider(dataset.test.images)
    correct = (classifier(features).argmax(1) == torch.tensor(dataset.test.labels)).tolist()
    result = {dataset.name: 100 * statistics.mean(correct)}
    if (full := dataset.root / "full" / dataset.split).is_file():
        correct_by_class: dict[int, list[bool]] = {}
        for label, is_correct in zip(dataset.test.labels, correct, strict=True):
            correct_by_class.setdefault(label, []).append(is_correct)
        class_accuracy = {label: statistics.mean(values) for label, values in correct_by_class.items()}
        labels = [label for _, label, _ in json.loads(full.read_text())["test"] if label in class_accuracy]
        result[f"{dataset.name}_as_whole"] = 100 * statistics.mean(class_accuracy[label] for label in labels)
    return result


def pixel_batches(model: Model, paths: Sequence[Path], size: int | None = None, batch: int = 32) -> Iterator[Tensor]:
    """Yield batches of pixels [B, 3, S, S], uint8.

    Args:
        model: The model whose preprocessing is used.
        paths: The images.
        size: If given, images are first cropped to a square and downsampled to this size in pixels.
        batch: Number of images per batch.
    """

    def preprocess(path: Path) -> Tensor:
        image = open_image(path)
        return model.preprocess(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC) if size else image)

    images = in_threads(preprocess, paths, ahead=2 * batch)
    while some := list(itertools.islice(images, batch)):
        yield torch.stack(some)


def low_resolution_top1(model: Model, imagenet: Dataset, size: int) -> float:
    """Return the zero-shot top-1 accuracy (%) on test images that are downsampled to `size` x `size` pixels."""
    features = torch.cat([model.encode_images(pixels) for pixels in pixel_batches(model, imagenet.test.paths, size)])
    return accuracy(zero_shot(model, imagenet.test.names)(features[:, None]), torch.tensor(imagenet.test.labels))


def held_out_top1(model: Model, imagenet: Dataset) -> float:
    """Return the top-1 accuracy (%) of the model made with --hold-out on images of its held-out classes.

    That model has the same image backbone as the embedded model, but a projection of its own.
    """
    header, held_out = read_tensors(Path(__file__).with_name("embedded_held_out.safetensors"), "held_out_classes")
    row_of = {label: row for row, label in enumerate(header["labels"])}
    assert imagenet.train is not None
    images = [pair for part in (imagenet.train, imagenet.test) for pair in zip(part.paths, part.labels, strict=True)]
    images = [(path, row_of[label]) for path, label in images if label in row_of]
    backbone_features = []
    with torch.inference_mode():
        for pixels in pixel_batches(model, [path for path, _ in images]):
            normalized = model.preprocess.normalize(pixels).contiguous(memory_format=torch.channels_last)
            backbone_features.append(model.image.visual.trunk(normalized))
    projected = torch.cat(backbone_features) @ held_out["projection"].float().t() + held_out["bias"]
    logits = F.normalize(projected, dim=-1) @ held_out["vectors"].float().t()
    return accuracy(logits, torch.tensor([label for _, label in images]))


def speed_ratios(model: Model) -> dict[str, float]:
    """Return ratios of images per second, on batches of 32 prepared tensors.

    The first ratio is `encode_images` over timm's tower, in the faster of its two memory formats. The second is timm's
    tower in the channels-last memory format over channels first.
    """
    tower = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
    pixels = torch.randn(32, 3, 224, 224)

    def timm_tower(memory_format: torch.memory_format) -> Callable[[], Tensor]:
        network = copy.deepcopy(tower).to(memory_format=memory_format)
        formatted = pixels.contiguous(memory_format=memory_format)
        return torch.inference_mode()(lambda: network(formatted))

    jobs = {
        "channels first": timm_tower(torch.contiguous_format),
        "channels last": timm_tower(torch.channels_last),
        "selftpt": lambda: model.encode_images(pixels),
    }
    seconds = interleaved(jobs, rounds=5)
    fastest = [min(pair) for pair in zip(seconds["channels first"], seconds["channels last"], strict=True)]
    return {
        "rate_over_bare_tower": ratio(fastest, seconds["selftpt"]),
        "channels_last_over_first": ratio(seconds["channels first"], seconds["channels last"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the datasets, in CoOp's layout")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch")
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
            print(f"  {result[f'{name}_as_whole']:.1f} % with the class counts of the complete test set")
    for pixels in (64, 32):
        result[f"imagenet_{pixels}"] = low_resolution_top1(model, dataset, pixels)
        print(f"  {result[f'imagenet_{pixels}']:.1f} % at {pixels} x {pixels} pixels", flush=True)
    result["imagenet_unseen"] = held_out_top1(model, dataset)
    print(f"imagenet_unseen: {result['imagenet_unseen']:.1f} % of 200 held-out classes", flush=True)
    result |= speed_ratios(model)
    print(f"encode_images has {result['rate_over_bare_tower']:.2f} times the speed of timm's tower")
    print(f"timm's tower: channels last has {result['channels_last_over_first']:.2f} times the speed of channels first")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    with exit_on_error():
        main()
