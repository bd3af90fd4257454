"""Compare settings of stages 1 and 2: python -m tools.embedded_model.compare_prompts --images TRAIN VAL

The comparison uses the model that `python -m tools.embedded_model --hold-out` made, on lists of classes that were held
out from it. Each list is split into a base half and a new half. A prompt is learned from the TRAIN images of the base
half, and adapted to the names of the new half. It is evaluated on the VAL images of the base half and on all images of
the new half, with one centre crop per image.

Each line has mean accuracies over lists. For the new half, the second and third numbers are the mean difference to CoOp
and its standard error.

With --factor, the residual stream of the text tower is first scaled (`export.scale_residual_stream`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt import AdaptConfig, LearnConfig, Prompt, load_model
from selftpt.adaptation import adapt, zero_shot
from selftpt.classifier import Classifier
from selftpt.errors import SelfTPTError, exit_on_error
from selftpt.evaluation.metrics import accuracy as top1_accuracy
from selftpt.learning import learn_from_features
from selftpt.models.tokenizer import class_tokens
from tools.embedded_model.export import scale_residual_stream, write_model
from tools.embedded_model.image_features import CLASS_NAMES, HELD_OUT, ROOT, imagenet_features

DEFAULT = LearnConfig(epochs=20, crops=1, shots=None)  # 300 steps with three images per class
COOP = replace(DEFAULT, cpt=0, gm=0)
STAGE_1 = {
    "without GM": replace(DEFAULT, gm=0),
    "default": DEFAULT,
    "gm 0.3": replace(DEFAULT, gm=0.3),
    "gm 3": replace(DEFAULT, gm=3),
    "cpt 3": replace(DEFAULT, cpt=3),
    "decay 0": replace(DEFAULT, decay=0),
    "decay 0.99": replace(DEFAULT, decay=0.99),
}
STAGE_2 = {
    "none": AdaptConfig(steps=0),
    "0.1": AdaptConfig(),
    "1": AdaptConfig(lr=1.0),
    "none, mean": AdaptConfig(steps=0, vectors="mean"),
    "0.1, mean": AdaptConfig(vectors="mean"),
    "1, mean": AdaptConfig(lr=1.0, vectors="mean"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--images",
        type=Path,
        nargs=2,
        required=True,
        metavar=("TRAIN", "VAL"),
        help="ImageNet images, one folder per class (WordNet id)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "embedded-model",
        help="folder of cached features and of the model made with --hold-out",
    )
    parser.add_argument("--size", type=int, default=40, help="classes per list")
    parser.add_argument("--factor", type=float, default=1.0, help="scale of the residual stream (a power of 2)")
    parser.add_argument("--stage-1", nargs="*", default=[*STAGE_1], choices=[*STAGE_1])
    options = parser.parse_args()
    folder = options.work / "held-out"
    if not folder.is_dir():
        raise SelfTPTError(f"{folder} does not exist: create it with python -m tools.embedded_model --hold-out")
    if options.factor != 1:
        clip = open_clip.create_model(f"local-dir:{folder}")
        clip.load_state_dict(scale_residual_stream(clip.state_dict(), options.factor))
        write_model(clip, folder := options.work / f"held-out-{options.factor:g}")
    model = load_model(str(folder), device="cpu")
    parts = [imagenet_features(folder, options.work) for folder in options.images]
    with torch.inference_mode():
        projected = [F.normalize(model.image.visual.head(features), dim=-1) for features, _ in parts]
    train, val = (features.clone() for features in projected)  # normal tensors, which autograd may use
    both, (train_labels, val_labels) = torch.cat([train, val]), (labels for _, labels in parts)

    def learn(classes: Tensor, config: LearnConfig) -> Prompt:
        tokens = class_tokens(model.text.tokenizer, names_of(classes), config.length, config.contrast)
        some = torch.isin(train_labels, classes)
        return learn_from_features(
            model, tokens, train[some, None], torch.searchsorted(classes, train_labels[some]), config
        )

    def accuracy(classifier: Classifier, classes: Tensor, features: Tensor, labels: Tensor) -> float:
        some = torch.isin(labels, classes)
        return top1_accuracy(classifier(features[some, None]), torch.searchsorted(classes, labels[some]))

    def new_accuracy(classifier: Classifier, classes: Tensor) -> float:
        return accuracy(classifier, classes, both, torch.cat([train_labels, val_labels]))

    order = torch.tensor(random.Random(0).sample(HELD_OUT, len(HELD_OUT)))
    halves = [[half.sort().values for half in classes.chunk(2)] for classes in order.split(options.size)]
    tasks = [(base, new) for pair in halves for base, new in (pair, pair[::-1])]
    base_scores = [accuracy(zero_shot(model, names_of(base)), base, val, val_labels) for base, _ in tasks]
    new_scores = [new_accuracy(zero_shot(model, names_of(new)), new) for _, new in tasks]
    print_result("none", base_scores, {"zero-shot": new_scores})

    def evaluate(config: LearnConfig, stage_2: dict[str, AdaptConfig]) -> tuple[list[float], dict[str, list[float]]]:
        prompts = [(learn(base, config), base, new) for base, new in tasks]
        base_scores = [
            accuracy(adapt(model, prompt, names_of(base), STAGE_2["none"]), base, val, val_labels)
            for prompt, base, _ in prompts
        ]
        new_scores = {
            key: [new_accuracy(adapt(model, prompt, names_of(new), settings), new) for prompt, _, new in prompts]
            for key, settings in stage_2.items()
        }
        return base_scores, new_scores

    base_scores, coop = evaluate(COOP, {"none": STAGE_2["none"]})
    print_result("coop", base_scores, coop)
    for name in options.stage_1:
        print_result(name, *evaluate(STAGE_1[name], STAGE_2), coop["none"])


def names_of(classes: Tensor) -> list[str]:
    """Return the names of classes."""
    return [CLASS_NAMES[label] for label in classes]


def print_result(
    stage_1: str, base: list[float], new: dict[str, list[float]], baseline: list[float] | None = None
) -> None:
    """Print one line: mean accuracies over tasks, and the differences to a baseline with their standard errors."""
    line: dict[str, object] = {"stage_1": stage_1, "base": round(statistics.mean(base), 2)}
    for key, scores in new.items():
        difference = [a - b for a, b in zip(scores, baseline, strict=True)] if baseline else []
        error = [statistics.mean(difference), statistics.stdev(difference) / len(difference) ** 0.5] if baseline else []
        line[key] = [round(value, 2) for value in (statistics.mean(scores), *error)]
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with exit_on_error():
        main()
