"""Zero-shot CLIP, with one template or an ensemble of templates."""

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
    """Zero-shot CLIP has no settings."""


def classify(fitted: FittedMethod, names: Sequence[str], template: str) -> Classifier:
    """Make a zero-shot classifier with the dataset's template."""
    return zero_shot(fitted.model, names, template)


def classify_ensemble(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Average the L2-normalised class vectors of CLIP's 80 ImageNet templates."""
    classifiers = [zero_shot(fitted.model, names, template("{}")) for template in OPENAI_IMAGENET_TEMPLATES]
    weights = F.normalize(torch.stack([classifier.weights for classifier in classifiers]).mean(0), dim=-1)
    origin = {"stage": "zero-shot", "templates": len(classifiers)}
    return dataclasses.replace(classifiers[0], weights=weights, origin=origin)


CLIP = Method("clip", ClipConfig(), classify)
ENSEMBLE = Method("clip-ensemble", ClipConfig(), classify_ensemble)
