"""Self-TPT, and Self-TPT-v, which looks at 63 more views of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from selftpt.adaptation import adapt
from selftpt.classifier import merge_views
from selftpt.features import Look
from selftpt.methods.method import Fitted, Job, Method, Predictor
from selftpt.settings import AdaptConfig, LearnConfig, PredictConfig


@dataclass(frozen=True)
class Settings:
    """Of the three stages."""

    learn: LearnConfig = field(default_factory=LearnConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)


def fit(job: Job, settings: Settings) -> Fitted:
    """Stage 1; then, for class names, stages 2 and 3."""
    prompt = job.prompt(settings.learn)

    def predictor(names: Sequence[str], _template: str) -> Predictor:
        classifier = adapt(job.model, prompt, names, settings.adapt)
        return lambda features: merge_views(classifier.probabilities(features), settings.predict.confident)

    return predictor


def looks(settings: Settings) -> list[Look]:
    """The picture, and its crops where there are more views, as `predict` makes them."""
    crops = settings.predict.views - 1
    return [Look(), Look(crops, settings.predict.seed)] if crops else [Look()]


REFERENCE = "Efficient Test-Time Prompt Tuning for Vision-Language Models, 2024"
SELF_TPT = Method("self-tpt", "CPT and gradient matching, then CPT on the names", REFERENCE, Settings(), fit, looks)
SELF_TPT_V = Method(
    "self-tpt-v", "self-tpt, mean of 64 views", REFERENCE, Settings(predict=PredictConfig(views=64)), fit, looks
)
