"""Learn the embedded model's prompt from ImageNet: python -m tools.embedded_model.learn_prompt --images DIR"""

from __future__ import annotations

import argparse
from pathlib import Path

from selftpt import LearnConfig, load_model
from selftpt.data.sources import Source, images_in
from selftpt.errors import exit_on_error
from selftpt.learning import learn
from selftpt.models import EMBEDDED_FILES
from tools.embedded_model.image_features import CLASS_NAMES, ROOT, WNIDS

SETTINGS = LearnConfig(epochs=5, shots=None, batch=16, classes_per_step=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True, help="ImageNet images, one folder per class (WordNet id)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embedded-model", help="folder for the log")
    options = parser.parse_args()
    rows = [(path, label) for label, wnid in enumerate(WNIDS) for path in images_in(options.images / wnid)]
    source = Source(tuple(CLASS_NAMES), tuple(path for path, _ in rows), tuple(label for _, label in rows))
    prompt = learn(load_model(device="cpu"), source, SETTINGS, out=options.work / "prompt")
    prompt.save(EMBEDDED_FILES / "prompt.safetensors")


if __name__ == "__main__":
    with exit_on_error():
        main()
