"""Zero-shot: one hand-written sentence, or the mean over many."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from open_clip.zero_shot_metadata import OPENAI_IMAGENET_TEMPLATES

from selftpt.adaptation import zero_shot
from selftpt.classifier import Classifier
from selftpt.methods.method import Fitted, Job, Method


@dataclass(frozen=True)
class Settings:
    """Nothing to set."""


def fit(job: Job, _: Settings) -> Fitted:
    """The dataset's sentence."""
    return lambda names, template: zero_shot(job.model, names, template)


def fit_ensemble(job: Job, _: Settings) -> Fitted:
    """The mean over CLIP's 80 sentences for ImageNet, of unit vectors."""

    def classify(names: Sequence[str], _template: str) -> Classifier:
        each = [zero_shot(job.model, names, template("{}")) for template in OPENAI_IMAGENET_TEMPLATES]
        weights = F.normalize(torch.stack([one.weights for one in each]).mean(0), dim=-1)
        return dataclasses.replace(each[0], weights=weights, origin={"stage": "zero-shot", "templates": len(each)})

    return classify


CLIP = Method("clip", "zero-shot with one sentence", "Radford et al., ICML 2021", Settings(), fit)
ENSEMBLE = Method(
    "clip-ensemble", "zero-shot, mean of 80 sentences", "Radford et al., ICML 2021", Settings(), fit_ensemble
)
