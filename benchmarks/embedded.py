"""How good and how fast the embedded model is: zero-shot top-1 on datasets in CoOp's layout, and pictures a second.

`imagenet`: held-out pictures, 1,000-way. `imagenet_unseen`: 200 classes, 200-way, by class vectors of a text tower
that the same recipe made without them (`python -m tools.embedded_model --hold-out`). The rate is of `encode_images` on
ready tensors over that of the bare timm tower, both in the same run.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from measure import interleaved, ratio
from torch import Tensor

from selftpt.adaptation import zero_shot
from selftpt.files import read_tensors
from selftpt.images import Source, in_threads, open_picture, pictures_in
from selftpt.models import Model, load_model

DATASETS = {  # CoOp's folders, and its split file with the pictures' folder below
    "caltech101": ("caltech-101", "101_ObjectCategories", "split_zhou_Caltech101.json"),
    "oxford_pets": ("oxford_pets", "images", "split_zhou_OxfordPets.json"),
    "eurosat": ("eurosat", "2750", "split_zhou_EuroSAT.json"),
    "dtd": ("dtd", "images", "split_zhou_DescribableTextures.json"),
    "food101": ("food-101", "images", "split_zhou_Food101.json"),
}


def read_split(data: Path, dataset: str, part: str, file: str | None = None) -> Source:
    """A part of a dataset by its split file, or by another file of the same form."""
    folder, pictures, split = DATASETS[dataset]
    rows = json.loads((data / folder / (file or split)).read_text())[part]
    names = {label: name for _, label, name in rows}
    assert sorted(names) == list(range(len(names)))
    paths = tuple(data / folder / pictures / path for path, _, _ in rows)
    return Source(tuple(names[i] for i in range(len(names))), paths, tuple(label for _, label, _ in rows))


def read_imagenet(data: Path, part: str) -> Source:
    """The pictures of ImageNet's folder `part`, a folder a class by its WordNet number."""
    lines = (data / "imagenet" / "classnames.txt").read_text().splitlines()
    wnids, names = zip(*(line.split(" ", 1) for line in lines), strict=True)
    rows = [
        (path, i) for i, wnid in enumerate(wnids) for path in pictures_in(data / "imagenet" / "images" / part / wnid)
    ]
    return Source(names, tuple(path for path, _ in rows), tuple(label for _, label in rows))


def see(model: Model, paths: Sequence[Path], batch: int = 32) -> Tensor:
    """Unit features [n, D] of pictures."""
    shown = in_threads(lambda path: model.preprocess(open_picture(path)), paths, ahead=2 * batch)
    batches = iter(lambda: list(itertools.islice(shown, batch)), [])
    return torch.cat([model.encode_images(torch.stack(some)) for some in batches])


def top1(features: Tensor, weights: Tensor, labels: Sequence[int]) -> float:
    """Per cent of features [n, D] nearest to the weights [C, D] of their own class."""
    return 100 * ((features @ weights.t()).argmax(1) == torch.tensor(labels)).float().mean().item()


def unseen(model: Model, data: Path) -> float:
    """Per cent right of pictures of the held-out classes, by the model that has not learned them.

    It has the image tower of the embedded one, but a projection of its own: on top of the tower's own features.
    """
    header, exam = read_tensors(Path(__file__).with_name("embedded_unseen.safetensors"), "exam")
    place = {label: i for i, label in enumerate(header["labels"])}
    parts = [read_imagenet(data, part) for part in ("train", "val")]
    pictures = [pair for part in parts for pair in zip(part.paths, part.labels, strict=True)]
    rows = [(path, place[label]) for path, label in pictures if label in place]
    seen: list[Tensor] = []
    hook = model.image.encode.trunk.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    see(model, [path for path, _ in rows])
    hook.remove()
    features = F.normalize(torch.cat(seen) @ exam["projection"].float().t() + exam["bias"], dim=-1)
    return top1(features, exam["vectors"].float(), [label for _, label in rows])


def rates(model: Model) -> dict[str, float]:
    """Pictures a second, batches of 32 ready tensors: of `encode_images` over timm's own tower in the better of the two
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
    sources = {name: read_split(options.data, name, "test") for name in DATASETS}
    for name, source in (sources | {"imagenet": read_imagenet(options.data, "val")}).items():
        weights = zero_shot(model, source.names).weights
        result[name] = top1(see(model, source.paths), weights, source.labels)
        print(f"{name}: {result[name]:.1f} % of {len(source.paths)} pictures, {len(source.names)} classes", flush=True)
    result["imagenet_unseen"] = unseen(model, options.data)
    print(f"imagenet_unseen: {result['imagenet_unseen']:.1f} %, 200 classes", flush=True)
    result |= rates(model)
    print(f"encode_images: {result['rate_over_bare_tower']:.2f} of the bare tower's rate")
    print(f"the bare tower with channels last: {result['channels_last_over_first']:.2f} of channels first")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
