"""Settings of stages 1 and 2, compared: python -m tools.embedded_model.exam --pictures DIR [DIR ...]

By the held-out model (`--hold-out`), on lists of the classes that it has not learned: a prompt is learned from the
pictures of half of a list, adapted to the names of the other half, and examined on the pictures of that. Each line
has the mean over lists, and the mean and standard error of what it is more than CoOp's. A setting of stage 1 takes
more than a quarter of an hour with one thread; `--stage-1` names those to compare.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from selftpt import AdaptConfig, LearnConfig, load_model
from selftpt.adaptation import adapt, zero_shot
from selftpt.classifier import Classifier
from selftpt.evaluation.measures import top
from selftpt.features import FeatureStore, Look
from selftpt.images import Source
from selftpt.learning import learn
from tools.embedded_model.ingredients import HOME, UNSEEN
from tools.embedded_model.prompt import pictures_of

PAPER = LearnConfig(epochs=40, crops=10, shots=None)  # four pictures a class make the steps of 16 in ten epochs
COOP = replace(PAPER, cpt=0, gm=0)
STAGE_1 = {
    "without GM": replace(PAPER, gm=0),
    "paper": PAPER,
    "gm 0.3": replace(PAPER, gm=0.3),
    "gm 3": replace(PAPER, gm=3),
    "cpt 3": replace(PAPER, cpt=3),
    "decay 0": replace(PAPER, decay=0),
    "decay 0.99": replace(PAPER, decay=0.99),
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
        "--pictures", type=Path, nargs="+", required=True, help="ImageNet, a folder a class by its wnid"
    )
    parser.add_argument("--work", type=Path, default=HOME / "build" / "embedded-model", help="has the held-out model")
    parser.add_argument("--size", type=int, default=40, help="classes in a list")
    parser.add_argument("--stage-1", nargs="*", default=[*STAGE_1], choices=[*STAGE_1])
    options = parser.parse_args()
    model = load_model(str(options.work / "held-out"), device="cpu")

    def right(classifier: Classifier, source: Source) -> float:
        features = FeatureStore(model, Look())(source.paths)
        return top(classifier(features), torch.tensor(source.labels), 1)

    order = random.Random(0).sample(UNSEEN, len(UNSEEN))
    lists = [order[start : start + options.size] for start in range(0, len(order), options.size)]
    halves = [(one[: len(one) // 2], one[len(one) // 2 :]) for one in lists]
    tasks = [
        (pictures_of(options.pictures, learned), pictures_of(options.pictures, new))
        for pair in halves
        for learned, new in (pair, pair[::-1])
    ]
    coop = [right(adapt(model, learn(model, source, COOP), new.names, STAGE_2["none"]), new) for source, new in tasks]

    def tell(stage_1: str, scores: dict[str, list[float]]) -> None:
        told = {key: [statistics.mean(some), *gain(some, coop)] for key, some in scores.items()}
        print(json.dumps({"stage 1": stage_1} | {k: [round(x, 2) for x in v] for k, v in told.items()}), flush=True)

    tell("none", {"zero-shot": [right(zero_shot(model, new.names), new) for _, new in tasks]})
    tell("coop", {"none": coop})
    for name in options.stage_1:
        learned = [(learn(model, source, STAGE_1[name]), new) for source, new in tasks]
        scores = {
            key: [right(adapt(model, prompt, new.names, stage_2), new) for prompt, new in learned]
            for key, stage_2 in STAGE_2.items()
        }
        tell(name, scores)


def gain(scores: list[float], than: list[float]) -> tuple[float, float]:
    """How much better scores are than others of the same tasks: the mean and its standard error."""
    more = [a - b for a, b in zip(scores, than, strict=True)]
    return statistics.mean(more), statistics.stdev(more) / len(more) ** 0.5


if __name__ == "__main__":
    main()
