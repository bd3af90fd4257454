"""Self-TPT, and Self-TPT-v, which looks at 63 more views of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from selftpt.adaptation import adapt
from selftpt.classifier import merge_views
from selftpt.config import AdaptConfig, LearnConfig, PredictConfig, setting
from selftpt.methods.method import Fitted, Job, Method, Predictor
from selftpt.methods.views import views_of


@dataclass(frozen=True)
class Settings:
    """Of stages 1 and 2."""

    learn: LearnConfig = field(default_factory=LearnConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)


@dataclass(frozen=True)
class ViewSettings(Settings):
    """And of the views of stage 3, which are those of `predict`."""

    views: int = setting(64, "looks at a picture: itself and random crops")
    confident: float = setting(1.0, "share of the views that is merged, the most confident ones")

    def __post_init__(self) -> None:
        PredictConfig(views=self.views, confident=self.confident)


def fit(job: Job, settings: Settings) -> Fitted:
    """Stage 1; then, for class names, stage 2."""
    prompt = job.prompt(settings.learn)
    return lambda names, _template: adapt(job.model, prompt, names, settings.adapt)


def fit_views(job: Job, settings: ViewSettings) -> Fitted:
    """The same, and the most confident views are merged."""
    prompt = job.prompt(settings.learn)

    def predictor(names: Sequence[str], _template: str) -> Predictor:
        classifier = adapt(job.model, prompt, names, settings.adapt)
        return lambda features: merge_views(classifier.probabilities(features), settings.confident)

    return predictor


REFERENCE = "Efficient Test-Time Prompt Tuning for Vision-Language Models, 2024"
SELF_TPT = Method(
    "self-tpt",
    "CPT and gradient matching, then CPT on the names",
    REFERENCE,
    Settings(),
    fit,
    papers_epochs=lambda _settings: True,
)
SELF_TPT_V = Method(
    "self-tpt-v",
    "self-tpt, the mean of 64 views",
    REFERENCE,
    ViewSettings(),
    fit_views,
    "64 views",
    "features of views",
    lambda settings: views_of(settings.views),
    papers_epochs=lambda _settings: True,
)
