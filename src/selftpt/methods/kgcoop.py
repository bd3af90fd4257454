"""KgCoOp: CoOp with a term that keeps the class vectors near those of a hand-crafted template."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import PROMPT_ALONE, Config, ContrastConfig, TrainConfig, check_template, setting
from selftpt.losses import cross_entropy
from selftpt.methods.contexts import class_vectors, context_training
from selftpt.methods.method import FitContext, FittedMethod, Method
from selftpt.models.text import encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import Batch
from selftpt.training import Training


@dataclass(frozen=True)
class KgcoopConfig(Config):
    """KgCoOp's configuration. The defaults are those of the authors' scripts."""

    learn: TrainConfig = field(default_factory=lambda: TrainConfig(batch=128, epochs=100))
    weight: float = setting(8.0, "weight of the distance to the template, λ", minimum=0)
    template: str = setting(ContrastConfig.template, "hand-crafted template")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template)


def distance(class_features: Tensor, hand_crafted: Tensor) -> Tensor:
    """Compute L_kg as in the authors' code: 1 - the mean cosine of learned and hand-crafted class features [C, D]."""
    return 1 - F.cosine_similarity(class_features, hand_crafted, dim=-1).mean()


def loss(class_features: Tensor, batch: Batch, hand_crafted: Tensor, weight: float) -> Tensor:
    """Compute L_ce + λ L_kg.

    Args:
        class_features: Learned class features, [C, D].
        batch: The images of the step.
        hand_crafted: Class features of the template, [C, D].
        weight: λ.

    Returns:
        The loss, a scalar.
    """
    ce = cross_entropy(batch.image_features, class_features, batch.labels, batch.scale)
    return ce + weight * distance(class_features, hand_crafted)


def train(fit_context: FitContext, config: KgcoopConfig) -> Training:
    """Prepare the training of one context."""
    text, learn, names = fit_context.model.text, config.learn, fit_context.source.names
    tokens = class_tokens(text.tokenizer, names, learn.length, ContrastConfig(template=config.template))
    hand_crafted = encode_template(text, tokens, config.template, learn.chunk)
    class_loss = functools.partial(loss, hand_crafted=hand_crafted, weight=config.weight)
    return context_training(fit_context, tokens, {"context": "end"}, learn, class_loss)


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Make the classifier of the learned context. The template is used in training only."""
    model, learn = fitted.model, fitted.config.learn
    tokens = class_tokens(model.text.tokenizer, names, learn.length, PROMPT_ALONE)
    weights = class_vectors(model, tokens, fitted.tensors["context"], "end", learn.chunk)
    return Classifier.of(model, tokens.names, weights, stage="kgcoop", settings=dataclasses.asdict(fitted.config))


KGCOOP = Method(
    "kgcoop",
    KgcoopConfig(),
    classify,
    train,
    tensors={"context": "M d"},
)
