"""KgCoOp: CoOp whose class vectors are held near those of a hand-written sentence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import PROMPT_ALONE, ContrastConfig, TrainConfig, at_least, setting
from selftpt.losses import cross_entropy
from selftpt.methods.contexts import class_vectors, learn_contexts
from selftpt.methods.method import Fitted, Job, Method
from selftpt.models.text import encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import Batch
from selftpt.training import RunFiles


@dataclass(frozen=True)
class Settings:
    """As in the authors' scripts."""

    learn: TrainConfig = field(default_factory=lambda: TrainConfig(batch=128, epochs=100))
    weight: float = setting(8.0, "weight of the distance to the hand-written sentence, λ")
    template: str = setting(ContrastConfig.template, "the hand-written sentence")

    def __post_init__(self) -> None:
        ContrastConfig(template=self.template)
        at_least(0, self, "weight")


def distance(classes: Tensor, hand: Tensor) -> Tensor:
    """1 - the mean cosine of learned [C, D] and hand-written [C, D] class features: the L_kg of the authors' code."""
    return 1 - F.cosine_similarity(classes, hand, dim=-1).mean()


def loss(classes: Tensor, batch: Batch, hand: Tensor, weight: float) -> Tensor:
    """L_ce + λ L_kg of class features [C, D] and hand-written ones; weight: λ."""
    return cross_entropy(batch.images, classes, batch.labels, batch.scale) + weight * distance(classes, hand)


def fit(job: Job, settings: Settings) -> Fitted:
    """Learn on the source; the hand-written sentence is not needed any more."""
    model, config, contrast = job.model, settings.learn, ContrastConfig(template=settings.template)

    def make(features: Tensor, labels: Tensor, files: RunFiles) -> dict[str, Tensor]:
        tokens = class_tokens(model.text.tokenizer, job.teacher.names, config.length, contrast)
        hand = encode_template(model.text, tokens, settings.template, config.chunk)
        guided = functools.partial(loss, hand=hand, weight=settings.weight)
        (context,) = learn_contexts(model, tokens, ["end"], features, labels, config, files, guided)
        return {"context": context}

    context = job.learned("kgcoop", settings, make)["context"]

    def classify(names: Sequence[str], _template: str) -> Classifier:
        tokens = class_tokens(model.text.tokenizer, names, config.length, PROMPT_ALONE)
        weights = class_vectors(model, tokens, context, "end", config.chunk)
        return Classifier.of(model, tokens.names, weights, stage="kgcoop", settings=dataclasses.asdict(settings))

    return classify


KGCOOP = Method("kgcoop", "coop, held near a hand-written sentence", "Yao et al., CVPR 2023", Settings(), fit)
