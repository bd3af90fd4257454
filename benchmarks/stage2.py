"""Analyse what stage 2 does in the runs of self-tpt that `selftpt bench base-to-new` has recorded.

For each dataset and seed, the script prints:

- the cosine of the gradients of cross-entropy and CPT, mean over the last fifth of stage 1;
- the CPT loss on the names of the new classes, before and after stage 2;
- the similarity of the views of a class: the cosine of its vector in the end view and the mean over the three views;
- how far stage 2 moves the class vectors: 1 - cosine;
- the accuracy (%) on the new classes, before and after stage 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from selftpt import AdaptConfig
from selftpt.adaptation import adapt
from selftpt.data.datasets import half
from selftpt.data.features import FeatureProvider
from selftpt.data.views import ViewSpec
from selftpt.errors import SelfTPTError, exit_on_error
from selftpt.evaluation.bench import Bench
from selftpt.evaluation.metrics import accuracy
from selftpt.evaluation.planning import Plan, Run
from selftpt.evaluation.runs import Runs
from selftpt.losses import Head
from selftpt.methods import METHODS, FitContext
from selftpt.methods.self_tpt import prompt_of
from selftpt.models import load_model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import Task, contrast_step
from selftpt.prompt import Prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--data", type=Path, required=True, help="folder of the datasets, in CoOp's layout")
    options = parser.parse_args()
    runs = Runs(options.runs)
    records = [r for r in runs.records if (r["method"], r["protocol"]) == ("self-tpt", "base-to-new")]
    if not records:
        raise SelfTPTError(
            f"{options.runs} has no run of self-tpt: create it with selftpt bench base-to-new --out {options.runs}"
        )
    model = load_model(device="cpu")
    print("dataset, seed, cosine, CPT before, CPT after, similarity, moved, new before, new after")
    for record in records:
        bench = Bench(model, Plan("base-to-new", options.data, changes=record["changes"]), runs)
        row = analyse(bench, Run("self-tpt", record["dataset"], record["seed"]))
        print(record["dataset"], record["seed"], *(f"{value:.3f}" for value in row.values()), flush=True)


def analyse(bench: Bench, run: Run) -> dict[str, float]:
    """Return the printed quantities of a run whose learned prompt is in the folder of the runs."""
    model, settings = bench.model, bench.plan.settings(run)
    source = bench.plan.source_of(run)
    assert source is not None
    fit_context = FitContext(model, source[0], bench.recorded.folder / "learned", bench.cache)
    assert METHODS["self-tpt"].train is not None
    file = bench.recorded.folder / "learned" / fit_context.learned_name(METHODS["self-tpt"].train, settings.learn)
    if not file.is_file():
        raise SelfTPTError(f"{file} does not exist: the data, model or settings differ from the run's; run it again")
    prompt = prompt_of(METHODS["self-tpt"].fit(fit_context, settings))
    log = [json.loads(line) for line in file.with_name(file.name + ".log.jsonl").read_text().splitlines()]
    test = half(bench.plan.dataset(run.dataset).test, new=True)
    features = FeatureProvider(model, [ViewSpec()], bench.cache, fixed_batch=True)(test.images)
    before = adapt(model, prompt, test.names, AdaptConfig(steps=0))
    after = adapt(model, prompt, test.names, settings.adapt)
    mean = adapt(model, prompt, test.names, AdaptConfig(steps=0, vectors="mean"))
    labels = torch.tensor(test.labels)
    return {
        "cosine": statistics.mean(step["cosine"] for step in log[-len(log) // 5 :]),
        "cpt_before": cpt_after(bench, prompt, test.names, 0),
        "cpt_after": cpt_after(bench, prompt, test.names, settings.adapt.steps, settings.adapt.lr),
        "similarity": F.cosine_similarity(before.weights, mean.weights).mean().item(),
        "moved": 1 - F.cosine_similarity(before.weights, after.weights).mean().item(),
        "new_before": accuracy(before(features), labels),
        "new_after": accuracy(after(features), labels),
    }


def cpt_after(bench: Bench, prompt: Prompt, names: tuple[str, ...], steps: int, lr: float = 0.0) -> float:
    """Return the CPT loss of a prompt on class names after a number of steps of stage 2."""
    model, config, context = bench.model, prompt.contrast, prompt.context.clone()
    tokens = class_tokens(model.text.tokenizer, names, len(context), config)
    hand_crafted = encode_template(model.text, tokens, config.template) if "hand_crafted" in config.views else None
    task = Task(TextEncoder(model.text, tokens, len(context), config.learned), hand_crafted, tokens.name_ids, config)
    for _ in range(steps):
        context -= lr * contrast_step(task, context, Head(*prompt.head))[1]
    return contrast_step(task, context, Head(*prompt.head))[0]


if __name__ == "__main__":
    with exit_on_error():
        main()
