"""Why stage 2 helps or does not, for runs that `selftpt bench base-to-new` has recorded.

For each dataset and seed of self-tpt: the cosine of the gradients of cross-entropy and CPT in the last fifth of
stage 1; CPT on the new classes' names before stage 2 and after; how alike the views of a class are (the cosine of its
vector in the end view with the mean over the three views); how far stage 2 moves the class vectors (1 - cosine); and
accuracy on the new classes before and after.
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, help="the folder of the runs")
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    runs = Runs(options.runs)
    records = [r for r in runs.records if (r["method"], r["protocol"]) == ("self-tpt", "base-to-new")]
    if not records:
        raise SelfTPTError(
            f"{options.runs} has no run of self-tpt: make it by selftpt bench base-to-new --out {options.runs}"
        )
    model = load_model(device="cpu")
    print("dataset seed  cosine  CPT before after  alike  moved  new before after")
    for record in records:
        bench = Bench(model, Plan("base-to-new", options.data, changes=record["changes"]), runs)
        row = look_at(bench, Run("self-tpt", record["dataset"], record["seed"]))
        print(record["dataset"], record["seed"], *(f"{value:.3f}" for value in row.values()), flush=True)


def look_at(bench: Bench, run: Run) -> dict[str, float]:
    """All of it for one run, of which the prompt is kept."""
    model, settings = bench.model, bench.plan.settings(run)
    source = bench.plan.source_of(run)
    assert source is not None
    fit_context = FitContext(model, source[0], bench.recorded.folder / "learned", bench.cache)
    assert METHODS["self-tpt"].train is not None
    file = bench.recorded.folder / "learned" / fit_context.learned_name(METHODS["self-tpt"].train, settings.learn)
    if not file.is_file():
        raise SelfTPTError(f"there is no {file}: data, model or settings are not those of the run; run it again")
    prompt = prompt_of(METHODS["self-tpt"].fit(fit_context, settings))
    steps = [json.loads(line) for line in file.with_name(file.name + ".log.jsonl").read_text().splitlines()]
    test = half(bench.plan.dataset(run.dataset).test, new=True)
    features = FeatureProvider(model, [ViewSpec()], bench.cache, fixed_batch=True)(test.images)
    before = adapt(model, prompt, test.names, AdaptConfig(steps=0))
    after = adapt(model, prompt, test.names, settings.adapt)
    mean = adapt(model, prompt, test.names, AdaptConfig(steps=0, vectors="mean"))
    labels = torch.tensor(test.labels)
    return {
        "cosine": statistics.mean(step["cosine"] for step in steps[-len(steps) // 5 :]),
        "cpt_before": contrast(bench, prompt, test.names, 0),
        "cpt_after": contrast(bench, prompt, test.names, settings.adapt.steps, settings.adapt.lr),
        "alike": F.cosine_similarity(before.weights, mean.weights).mean().item(),
        "moved": 1 - F.cosine_similarity(before.weights, after.weights).mean().item(),
        "new_before": accuracy(before(features), labels),
        "new_after": accuracy(after(features), labels),
    }


def contrast(bench: Bench, prompt: Prompt, names: tuple[str, ...], steps: int, lr: float = 0.0) -> float:
    """CPT of a prompt on class names after so many steps of stage 2."""
    model, kind, context = bench.model, prompt.contrast, prompt.context.clone()
    tokens = class_tokens(model.text.tokenizer, names, len(context), kind)
    hand_crafted = encode_template(model.text, tokens, kind.template) if "hand_crafted" in kind.views else None
    task = Task(TextEncoder(model.text, tokens, len(context), kind.learned), hand_crafted, tokens.same, kind)
    for _ in range(steps):
        context -= lr * contrast_step(task, context, Head(*prompt.head))[1]
    return contrast_step(task, context, Head(*prompt.head))[0]


if __name__ == "__main__":
    with exit_on_error():
        main()
