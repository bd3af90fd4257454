"""Zero-shot CLIP: one template, or the mean over many."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from open_clip.zero_shot_metadata import OPENAI_IMAGENET_TEMPLATES

from selftpt.adaptation import zero_shot
from selftpt.classifier import Classifier
from selftpt.config import Config
from selftpt.methods.method import FittedMethod, Method


@dataclass(frozen=True)
class ClipConfig(Config):
    """Nothing to configure."""


def classify(fitted: FittedMethod, names: Sequence[str], template: str) -> Classifier:
    """The dataset's template."""
    return zero_shot(fitted.model, names, template)


def classify_ensemble(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """The mean of the L2-normalised class vectors of CLIP's 80 ImageNet templates."""
    each = [zero_shot(fitted.model, names, template("{}")) for template in OPENAI_IMAGENET_TEMPLATES]
    weights = F.normalize(torch.stack([one.weights for one in each]).mean(0), dim=-1)
    return dataclasses.replace(each[0], weights=weights, origin={"stage": "zero-shot", "templates": len(each)})


CLIP = Method("clip", ClipConfig(), classify)
ENSEMBLE = Method("clip-ensemble", ClipConfig(), classify_ensemble)
