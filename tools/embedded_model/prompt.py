"""The embedded model's prompt, learned from ImageNet: python -m tools.embedded_model.prompt --pictures DIR"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from selftpt import LearnConfig, load_model
from selftpt.images import Source, pictures_in
from selftpt.learning import learn
from selftpt.models import EMBEDDED_FILES
from tools.embedded_model.ingredients import HOME, NAMES, WNIDS

SETTINGS = LearnConfig(epochs=5, shots=None, batch=16, classes_per_step=64)


def pictures_of(folders: Sequence[Path], classes: Sequence[int]) -> Source:
    """The pictures of some of ImageNet's classes, a folder a class by its WordNet number, with open_clip's names."""
    rows = [
        (path, label)
        for folder in folders
        for label, i in enumerate(classes)
        for path in pictures_in(folder / WNIDS[i])
    ]
    names = tuple(NAMES[i] for i in classes)
    return Source(names, tuple(path for path, _ in rows), tuple(label for _, label in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, required=True, help="ImageNet pictures, a folder a class by its wnid")
    parser.add_argument("--work", type=Path, default=HOME / "build" / "embedded-model", help="where its log goes")
    options = parser.parse_args()
    source = pictures_of([options.pictures], range(len(NAMES)))
    prompt = learn(load_model(device="cpu"), source, SETTINGS, out=options.work / "prompt")
    prompt.save(EMBEDDED_FILES / "prompt.safetensors")


if __name__ == "__main__":
    main()
