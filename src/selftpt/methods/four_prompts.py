"""A control: prompts at the four places of CPT's views, by cross-entropy alone, ensembled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import VIEWS, ContrastConfig, TrainConfig, setting
from selftpt.losses import cross_entropy
from selftpt.methods.contexts import class_vectors, learn_contexts
from selftpt.methods.method import Fitted, Job, Method
from selftpt.models.text import encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import Batch
from selftpt.training import RunFiles


@dataclass(frozen=True)
class Settings:
    """The Self-TPT paper's set-up."""

    learn: TrainConfig = field(default_factory=TrainConfig)
    template: str = setting(ContrastConfig.template, "the hand-written sentence, which is the fourth")

    def __post_init__(self) -> None:
        ContrastConfig(template=self.template)


def loss(classes: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy (Eq. 3) of one place alone."""
    return cross_entropy(batch.images, classes, batch.labels, batch.scale)


def fit(job: Job, settings: Settings) -> Fitted:
    """Learn a context for each place that has one; then, for class names, the mean of the unit class vectors."""
    model, config, contrast = job.model, settings.learn, ContrastConfig(template=settings.template)

    def make(features: Tensor, labels: Tensor, files: RunFiles) -> dict[str, Tensor]:
        tokens = class_tokens(model.text.tokenizer, job.teacher.names, config.length, contrast)
        contexts = learn_contexts(model, tokens, VIEWS, features, labels, config, files, loss)
        return dict(zip(VIEWS, contexts, strict=True))

    contexts = job.learned("four-prompts", settings, make)

    def classify(names: Sequence[str], _template: str) -> Classifier:
        tokens = class_tokens(model.text.tokenizer, names, config.length, contrast)
        each = [class_vectors(model, tokens, contexts[view], view, config.chunk) for view in VIEWS]
        hand = encode_template(model.text, tokens, settings.template, config.chunk)
        weights = F.normalize(torch.stack([*each, F.normalize(hand, dim=-1)]).mean(0), dim=-1)
        return Classifier.of(model, tokens.names, weights, stage="four-prompts", settings=dataclasses.asdict(settings))

    return classify


FOUR_PROMPTS = Method(
    "four-prompts",
    "prompts at the places of self-tpt's views, each by cross-entropy, ensembled",
    "a control",
    Settings(),
    fit,
    papers_epochs=lambda _settings: True,
)
