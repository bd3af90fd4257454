"""Settings of stages 1 and 2, compared: python -m tools.embedded_model.exam --pictures TRAIN VAL

By the held-out model (`--hold-out`), on lists of the classes that it has not learned: a prompt is learned from the
TRAIN pictures of half of a list, adapted to the names of the other half, and examined on all pictures of that, and on
the VAL pictures of its own half. Pictures are seen once, in the middle. Each line has means over lists, and the
mean and standard error of what is more right of the other half than CoOp has.

--factor: of a tower that is rescaled (`export.rescaled`), which makes a prompt move farther.
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
from selftpt.errors import SelfTPTError, told_in_one_line
from selftpt.evaluation.measures import top
from selftpt.learning import learn_from_features
from selftpt.models.tokenizer import class_tokens
from tools.embedded_model.export import rescaled, write_model
from tools.embedded_model.ingredients import HOME, NAMES, UNSEEN, see

DEFAULT = LearnConfig(epochs=20, crops=1, shots=None)  # three pictures a class: 300 steps
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
    parser.add_argument("--pictures", type=Path, nargs=2, required=True, help="ImageNet, a folder a class by its wnid")
    parser.add_argument("--work", type=Path, default=HOME / "build" / "embedded-model", help="has the held-out model")
    parser.add_argument("--size", type=int, default=40, help="classes in a list")
    parser.add_argument(
        "--factor", type=float, default=1.0, help="of all that runs through the text tower (a power of 2)"
    )
    parser.add_argument("--stage-1", nargs="*", default=[*STAGE_1], choices=[*STAGE_1])
    options = parser.parse_args()
    folder = options.work / "held-out"
    if not folder.is_dir():
        raise SelfTPTError(f"there is no {folder}: make it by python -m tools.embedded_model --hold-out")
    if options.factor != 1:
        clip = open_clip.create_model(f"local-dir:{folder}")
        clip.load_state_dict(rescaled(clip.state_dict(), options.factor))
        write_model(clip, folder := options.work / f"held-out-{options.factor:g}")
    model = load_model(str(folder), device="cpu")
    saw = [see(folder, options.work) for folder in options.pictures]
    with torch.inference_mode():
        seen = [F.normalize(model.image.visual.head(features), dim=-1) for features, _ in saw]
    train, val = (features.clone() for features in seen)  # outside, so that autograd may use them
    both, (of_train, of_val) = torch.cat([train, val]), (labels for _, labels in saw)

    def learn(classes: Tensor, config: LearnConfig) -> Prompt:
        tokens = class_tokens(model.text.tokenizer, named(classes), config.length, config.contrast)
        some = torch.isin(of_train, classes)
        return learn_from_features(
            model, tokens, train[some, None], torch.searchsorted(classes, of_train[some]), config
        )

    def right(classifier: Classifier, classes: Tensor, features: Tensor, labels: Tensor) -> float:
        some = torch.isin(labels, classes)
        return top(classifier(features[some, None]), torch.searchsorted(classes, labels[some]), 1)

    def new(classifier: Classifier, classes: Tensor) -> float:
        return right(classifier, classes, both, torch.cat([of_train, of_val]))

    order = torch.tensor(random.Random(0).sample(UNSEEN, len(UNSEEN)))
    halves = [[half.sort().values for half in one.chunk(2)] for one in order.split(options.size)]
    tasks = [(learned, other) for pair in halves for learned, other in (pair, pair[::-1])]
    base = [right(zero_shot(model, named(learned)), learned, val, of_val) for learned, _ in tasks]
    tell("none", base, {"zero-shot": [new(zero_shot(model, named(other)), other) for _, other in tasks]})

    def examine(config: LearnConfig, stage_2: dict[str, AdaptConfig]) -> tuple[list[float], dict[str, list[float]]]:
        prompts = [(learn(learned, config), learned, other) for learned, other in tasks]
        base = [
            right(adapt(model, prompt, named(learned), STAGE_2["none"]), learned, val, of_val)
            for prompt, learned, _ in prompts
        ]
        scores = {
            key: [new(adapt(model, prompt, named(other), settings), other) for prompt, _, other in prompts]
            for key, settings in stage_2.items()
        }
        return base, scores

    base, coop = examine(COOP, {"none": STAGE_2["none"]})
    tell("coop", base, coop)
    for name in options.stage_1:
        tell(name, *examine(STAGE_1[name], STAGE_2), coop["none"])


def named(classes: Tensor) -> list[str]:
    """The names of some classes."""
    return [NAMES[label] for label in classes]


def tell(stage_1: str, base: list[float], scores: dict[str, list[float]], than: list[float] | None = None) -> None:
    """Print a line: means over tasks, and how much better the scores are than others of the same tasks."""
    line: dict[str, object] = {"stage 1": stage_1, "its own half": round(statistics.mean(base), 2)}
    for key, some in scores.items():
        more = [a - b for a, b in zip(some, than, strict=True)] if than else []
        error = [statistics.mean(more), statistics.stdev(more) / len(more) ** 0.5] if than else []
        line[key] = [round(value, 2) for value in (statistics.mean(some), *error)]
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with told_in_one_line():
        main()
