"""Base-to-new generalisation of the embedded model: zero-shot, CoOp and Self-TPT, 16 shots, three seeds.

The first half of the classes is learned from, in CoOp's order; accuracy on the pictures of the first half, among its
names, is `base`, that of the second half `new`. Stage 2 is done for each half. Also told are the cosine of the two
gradients in the last fifth of stage 1, how alike the views of a new class are (the cosine of its vector in the end view
with its mean over the views), and how far stage 2 moves the new classes (1 - cosine).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from embedded import DATASETS, read_split, see, top1
from torch import Tensor

from selftpt import AdaptConfig, LearnConfig, Prompt
from selftpt.adaptation import adapt, zero_shot
from selftpt.classifier import Classifier
from selftpt.images import Source
from selftpt.learning import learn
from selftpt.models import Model, load_model

METHODS = {
    "coop": LearnConfig(cpt=0, gm=0),
    "coop+cpt": LearnConfig(gm=0),
    "self-tpt": LearnConfig(),
}


def half(source: Source, new: bool) -> Source:
    """The pictures of the first half of the classes, or of the second, with labels from 0."""
    middle = (len(source.names) + 1) // 2
    first, last = (middle, len(source.names)) if new else (0, middle)
    rows = [(p, i - first) for p, i in zip(source.paths, source.labels, strict=True) if first <= i < last]
    return Source(source.names[first:last], tuple(p for p, _ in rows), tuple(i for _, i in rows))


def harmonic(base: float, new: float) -> float:
    return 2 * base * new / (base + new) if base + new else 0.0


class Exam:
    """A dataset's test pictures in two halves, their features seen once, and where results go."""

    def __init__(self, model: Model, data: Path, dataset: str, out: Path) -> None:
        test = read_split(data, dataset, "test")
        self.model, self.dataset, self.out = model, dataset, out
        self.halves = {"base": half(test, new=False), "new": half(test, new=True)}
        self.features = {name: see(model, part.paths) for name, part in self.halves.items()}

    def record(
        self, method: str, make: Callable[[Sequence[str]], Classifier], before: Tensor | None = None, **facts: object
    ) -> Tensor:
        """Per cent right of both halves by the classifiers that `make` makes of their names.

        Returns the class vectors of the new half; `before` are those to tell how far they moved from.
        """
        row: dict[str, object] = {"dataset": self.dataset, "method": method, **facts}
        for name, part in self.halves.items():
            weights = make(part.names).weights
            row[name] = top1(self.features[name], weights, part.labels)
        if before is not None:
            row["moved"] = 1 - F.cosine_similarity(before, weights).mean().item()
        with self.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        return weights

    def alike(self, prompt: Prompt) -> float:
        """How alike the views are: the mean cosine of a new class's vector in the end view and its mean over views."""
        names = self.halves["new"].names
        end, mean = (adapt(self.model, prompt, names, AdaptConfig(steps=0, vectors=v)).weights for v in ("end", "mean"))
        return F.cosine_similarity(end, mean).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="datasets in the folders that CoOp prescribes")
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--lr", type=float, default=LearnConfig.lr, help="learning rate of stage 1")
    parser.add_argument("--adapt-lr", default=str(AdaptConfig.lr), help="learning rates of stage 2")
    parser.add_argument("--out", type=Path, required=True, help="a JSON line a run is added to this file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists: its runs would be averaged with these")
    torch.set_num_threads(options.threads)
    model = load_model(device="cpu")
    for dataset in options.datasets.split(","):
        exam = Exam(model, options.data, dataset, options.out)
        exam.record("zero-shot", lambda names: zero_shot(model, names))
        for seed in map(int, options.seeds.split(",")):
            few = f"fewshot_16_seed{seed}.json"
            if not (options.data / DATASETS[dataset][0] / few).is_file():
                print(f"{dataset} has no {few}: the seed is left out")
                continue
            source = half(read_split(options.data, dataset, "train", few), new=False)
            for method in options.methods.split(","):
                run(exam, method, replace(METHODS[method], seed=seed, lr=options.lr), source, options.adapt_lr)
    summarise(options.out)


def run(exam: Exam, method: str, config: LearnConfig, source: Source, adapt_lr: str) -> None:
    """Learn, and look before stage 2 and after it."""
    with tempfile.TemporaryDirectory() as folder:
        begin, out = time.monotonic(), Path(folder) / "prompt"
        prompt = learn(exam.model, source, config, out=out)
        seconds = time.monotonic() - begin
        steps = [json.loads(line) for line in Path(f"{out}.log.jsonl").read_text().splitlines()]
    facts: dict[str, object] = {"seed": config.seed, "lr": config.lr}
    if not config.contrasts:
        exam.record(method, lambda names: adapt(exam.model, prompt, names, AdaptConfig(steps=0)), **facts)
        return
    cosine = statistics.mean(step["cosine"] for step in steps[-len(steps) // 5 :])
    told = {"seconds": seconds, "cosine": cosine, "alike": exam.alike(prompt)}
    before = exam.record(method, lambda names: adapt(exam.model, prompt, names, AdaptConfig(steps=0)), **facts, **told)
    for rate in map(float, adapt_lr.split(",")):
        config2 = AdaptConfig(lr=rate)
        exam.record(
            f"{method}, stage 2",
            lambda names, config2=config2: adapt(exam.model, prompt, names, config2),  # type: ignore[misc]
            before,
            adapt_lr=rate,
            **facts,
        )


def summarise(out: Path) -> None:
    """Mean and standard deviation over seeds, for each dataset and on average."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]

    def setting(row: dict[str, Any]) -> tuple[object, ...]:
        return row["method"], row.get("lr"), row.get("adapt_lr")

    for key in dict.fromkeys(map(setting, rows)):
        of = [row for row in rows if setting(row) == key]
        cells, means = [], []
        for dataset in dict.fromkeys(r["dataset"] for r in of):
            base, new = ([r[part] for r in of if r["dataset"] == dataset] for part in ("base", "new"))
            spread = statistics.stdev(new) if len(new) > 1 else 0.0
            means.append((statistics.mean(base), statistics.mean(new)))
            cells.append(f"{dataset} {means[-1][0]:.1f}/{means[-1][1]:.1f}±{spread:.1f}")
        base, new = (statistics.mean(m[i] for m in means) for i in (0, 1))
        print(f"{key}: mean {base:.1f}/{new:.1f} H {harmonic(base, new):.1f}; {', '.join(cells)}")


if __name__ == "__main__":
    main()
