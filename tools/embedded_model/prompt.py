"""The embedded model's prompt, learned by selftpt from ImageNet: python -m tools.embedded_model.prompt --pictures DIR

With --exam DIR it is learned on every other class alone, and examined on the held-out pictures in DIR of the classes in
between, before stage 2 and after it: to compare settings by.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from selftpt import AdaptConfig, LearnConfig, load_model
from selftpt.adaptation import adapt, zero_shot
from selftpt.classifier import Classifier
from selftpt.images import Source, pictures_in
from selftpt.learning import learn
from selftpt.models import EMBEDDED_FILES
from tools.embedded_model.ingredients import NAMES, WNIDS

HOME = Path(__file__).resolve().parents[2]
SETTINGS = LearnConfig(epochs=5, shots=None, batch=16, classes_per_step=64)


def pictures_of(folder: Path, classes: range) -> Source:
    """The pictures of some of ImageNet's classes, a folder a class by its WordNet number, with open_clip's names."""
    rows = [(path, label) for label, i in enumerate(classes) for path in pictures_in(folder / WNIDS[i])]
    names = tuple(NAMES[i] for i in classes)
    return Source(names, tuple(path for path, _ in rows), tuple(label for _, label in rows))


def right(classifier: Classifier, source: Source) -> float:
    """The share of pictures whose class is named first."""
    named = [p.labels[0] for p in classifier.predict(source.paths, top=1)]
    return (torch.tensor(named) == torch.tensor(source.labels)).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, required=True, help="ImageNet pictures, a folder a class by its wnid")
    parser.add_argument("--exam", type=Path, help="other pictures, in the same folders")
    parser.add_argument("--work", type=Path, default=HOME / "build" / "embedded-model", help="where its log goes")
    parser.add_argument("--lr", type=float, default=SETTINGS.lr)
    parser.add_argument("--adapt-lr", type=float, nargs="*", default=[AdaptConfig.lr])
    options = parser.parse_args()
    model, config = load_model(device="cpu"), replace(SETTINGS, lr=options.lr)
    if options.exam is None:
        source = pictures_of(options.pictures, range(len(NAMES)))
        learn(model, source, config, out=options.work / "prompt").save(EMBEDDED_FILES / "prompt.safetensors")
        return
    prompt = learn(model, pictures_of(options.pictures, range(0, len(NAMES), 2)), config)
    for half in (range(0, len(NAMES), 2), range(1, len(NAMES), 2)):
        exam = pictures_of(options.exam, half)
        scores = {"zero-shot": right(zero_shot(model, exam.names), exam)}
        scores["learned"] = right(adapt(model, prompt, exam.names, AdaptConfig(steps=0)), exam)
        for rate in options.adapt_lr:
            scores[f"adapted {rate}"] = right(adapt(model, prompt, exam.names, AdaptConfig(lr=rate)), exam)
        print(
            json.dumps({"classes": "learned" if half.start == 0 else "others", "lr": options.lr, **scores}), flush=True
        )


if __name__ == "__main__":
    main()
