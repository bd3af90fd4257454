"""Measure the entropy of predictions, and the accuracy with a general template and with a template of the domain.

`selftpt classify` suggests a template if the mean normalised entropy of the predictions over at least eight images is
above a threshold. The threshold was chosen from the output of this script. For each dataset it prints the mean
normalised entropy with the general template, and the top-1 accuracy (%) with the general template and with the template
of the dataset, for zero-shot and for the embedded prompt, adapted to the class names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from selftpt import AdaptConfig, Classifier, Prompt, adapt, zero_shot
from selftpt.cli.classify import UNSURE, normalised_entropy
from selftpt.data.datasets import DATASETS, read_dataset
from selftpt.data.datasets.sampling import limit
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError, exit_on_error
from selftpt.models import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the entropy of predictions, and the accuracy of templates.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the datasets of `selftpt datasets`")
    parser.add_argument("--limit", type=int, default=300, help="test images per dataset")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args()
    model, prompt = load_model(device="cpu"), Prompt.embedded()
    if not options.json:
        print(f"threshold {UNSURE}\n{'dataset':16} {'classifier':10} entropy  general  domain")
    for name in DATASETS:
        try:
            data = read_dataset(name, options.data)
        except SelfTPTError as error:
            print(f"skipped {name}: {error}", file=sys.stderr)
            continue
        test = limit(data.test, options.limit)
        classifiers = {
            "zero-shot": (zero_shot(model, test.names), zero_shot(model, test.names, data.template)),
            "self-tpt": (
                adapt(model, prompt, test.names),
                adapt(model, prompt, test.names, AdaptConfig(template=data.template)),
            ),
        }
        for kind, (general, domain) in classifiers.items():
            entropy, accuracy = evaluate(general, test)
            row = {"entropy": entropy, "general": accuracy, "domain": evaluate(domain, test)[1]}
            if options.json:
                print(json.dumps({"dataset": name, "classifier": kind, "template": data.template, **row}), flush=True)
            else:
                print(f"{name:16} {kind:10} {entropy:7.2f} {accuracy:8.1f} {row['domain']:7.1f}", flush=True)


def evaluate(classifier: Classifier, test: Source) -> tuple[float, float]:
    """Return the mean normalised entropy of the predictions and the top-1 accuracy (%) of the readable images."""
    probabilities = torch.from_numpy(classifier.predict_proba(test.paths))
    readable = ~probabilities.isnan().any(1)
    if not readable.any():
        raise SelfTPTError(f"none of the {len(test.paths)} test images, such as {test.paths[0]}, could be read")
    correct = (probabilities.argmax(1) == torch.tensor(test.labels))[readable]
    entropies = map(normalised_entropy, probabilities[readable].tolist())
    return statistics.fmean(entropies), 100 * correct.double().mean().item()


if __name__ == "__main__":
    with exit_on_error():
        main()
