"""An ablation of Self-TPT: three prompts, one per learned view, trained with cross-entropy alone.

Their class vectors are averaged with those of a hand-crafted template.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import VIEWS, Config, ContrastConfig, TrainConfig, check_template, setting
from selftpt.losses import cross_entropy
from selftpt.methods.contexts import class_vectors, context_training
from selftpt.methods.method import FitContext, FittedMethod, Method, always
from selftpt.models.text import encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import Batch
from selftpt.training import Training


@dataclass(frozen=True)
class FourPromptsConfig(Config):
    """Configuration of the ablation. The defaults are those of the Self-TPT paper."""

    learn: TrainConfig = field(default_factory=TrainConfig)
    template: str = setting(ContrastConfig.template, "hand-crafted template, the fourth of the averaged prompts")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template)


def loss(class_features: Tensor, batch: Batch) -> Tensor:
    """Compute the cross-entropy (Eq. 3) of the class features [C, D] of one view."""
    return cross_entropy(batch.image_features, class_features, batch.labels, batch.scale)


def train(fit_context: FitContext, config: FourPromptsConfig) -> Training:
    """Prepare the training of one context for each of the three learned views."""
    contrast = ContrastConfig(template=config.template)
    tokens = class_tokens(fit_context.model.text.tokenizer, fit_context.source.names, config.learn.length, contrast)
    return context_training(fit_context, tokens, {view: view for view in VIEWS}, config.learn, loss)


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Make a classifier from the mean of the L2-normalised class vectors of the four prompts."""
    model, config, learn = fitted.model, fitted.config, fitted.config.learn
    tokens = class_tokens(model.text.tokenizer, names, learn.length, ContrastConfig(template=config.template))
    learned = [class_vectors(model, tokens, fitted.tensors[view], view, learn.chunk) for view in VIEWS]
    hand_crafted = F.normalize(encode_template(model.text, tokens, config.template, learn.chunk), dim=-1)
    weights = F.normalize(torch.stack([*learned, hand_crafted]).mean(0), dim=-1)
    return Classifier.of(model, tokens.names, weights, stage="four-prompts", settings=dataclasses.asdict(config))


FOUR_PROMPTS = Method(
    "four-prompts",
    FourPromptsConfig(),
    classify,
    train,
    tensors=dict.fromkeys(VIEWS, "M d"),
    uses_protocol_epochs=always,
)
