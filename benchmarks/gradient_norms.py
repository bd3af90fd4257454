"""Measure how the gradients of the three losses of stage 1 change while a prompt is learned.

For random class lists of several lengths, a prompt is learned from images of these classes with each guard of gradient
matching. For the first and the last epoch after the warm-up, the script prints the means over steps and lists of the
losses, of the norms of the three weighted gradients w.r.t. the prompt, and of the share of gradient matching: its norm
divided by the sum of the three norms.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, get_args

from selftpt import LearnConfig, Source, learn, load_model
from selftpt.config import Guard
from selftpt.errors import exit_on_error

COLUMNS = ("ce", "cpt", "gm", "grad_ce", "grad_cpt", "grad_gm", "share")


def means(lines: list[dict[str, Any]], epoch: int) -> dict[str, float]:
    """Return the means over the steps of an epoch of a training log."""
    chosen = [line for line in lines if line["epoch"] == epoch]
    for line in chosen:
        line["share"] = line["grad_gm"] / (line["grad_ce"] + line["grad_cpt"] + line["grad_gm"])
    return {column: statistics.mean(line[column] for line in chosen) for column in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="labelled images, as for `selftpt learn`")
    parser.add_argument("--model", default="selftpt-tiny", help="model of open_clip")
    parser.add_argument("--pretrained", help="its weights; random for random weights")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 10, 20, 50], help="lengths of the class lists")
    parser.add_argument("--lists", type=int, default=3, help="class lists of each length")
    parser.add_argument("--steps", type=int, default=160, help="steps of stage 1, about")
    parser.add_argument("--guards", nargs="+", default=["none"], choices=get_args(Guard))
    parser.add_argument("--ratio", type=float, default=LearnConfig.guard_ratio, help="ratio of the guard")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object on the last line")
    options = parser.parse_args()
    model = load_model(options.model, options.pretrained)
    source = Source.read(options.images)
    members: dict[int, list[int]] = {}
    for i, label in enumerate(source.labels):
        members.setdefault(label, []).append(i)
    results = []
    print(f"{'classes':>8} {'guard':>10} {'epoch':>6}" + "".join(f"{column:>10}" for column in COLUMNS))
    for length in options.lengths:
        for guard in options.guards:
            logs = []
            for seed in range(options.lists):
                labels = sorted(random.Random(f"{seed} {length}").sample(sorted(members), length))
                chosen = [(source.images[i], source.names[label]) for label in labels for i in members[label]]
                few = Source.from_images(*map(list, zip(*chosen, strict=True)))
                epochs = max(3, round(options.steps * LearnConfig.batch / len(few)))
                config = LearnConfig(epochs=epochs, crops=5, seed=seed + 1, guard=guard, guard_ratio=options.ratio)
                with tempfile.TemporaryDirectory() as folder:
                    learn(model, few, config, out=Path(folder) / "p")
                    log = (Path(folder) / "p.log.jsonl").read_text().splitlines()
                logs.append((epochs, [json.loads(line) for line in log]))
            for name, number in (("second", lambda _: 1), ("last", lambda epochs: epochs - 1)):
                each = [means(lines, number(epochs)) for epochs, lines in logs]
                row = {column: statistics.mean(one[column] for one in each) for column in COLUMNS}
                results.append({"classes": length, "guard": guard, "epoch": name, **row})
                numbers = "".join(f"{row[column]:10.4f}" for column in COLUMNS)
                print(f"{length:8} {guard:>10} {name:>6}{numbers}", flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    with exit_on_error():
        main()
