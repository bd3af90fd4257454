"""The embedded model's prompt, learned from ImageNet: python -m tools.embedded_model.prompt --pictures DIR"""

from __future__ import annotations

import argparse
from pathlib import Path

from selftpt import LearnConfig, load_model
from selftpt.data.sources import Source, images_in
from selftpt.errors import told_in_one_line
from selftpt.learning import learn
from selftpt.models import EMBEDDED_FILES
from tools.embedded_model.ingredients import HOME, NAMES, WNIDS

SETTINGS = LearnConfig(epochs=5, shots=None, batch=16, classes_per_step=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, required=True, help="ImageNet pictures, a folder a class by its wnid")
    parser.add_argument("--work", type=Path, default=HOME / "build" / "embedded-model", help="where its log goes")
    options = parser.parse_args()
    rows = [(path, label) for label, wnid in enumerate(WNIDS) for path in images_in(options.pictures / wnid)]
    source = Source(tuple(NAMES), tuple(path for path, _ in rows), tuple(label for _, label in rows))
    prompt = learn(load_model(device="cpu"), source, SETTINGS, out=options.work / "prompt")
    prompt.save(EMBEDDED_FILES / "prompt.safetensors")


if __name__ == "__main__":
    with told_in_one_line():
        main()
