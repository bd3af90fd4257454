"""CoOp: a prompt learned with cross-entropy alone, without adaptation to the class names."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from selftpt.adaptation import adapt
from selftpt.classifier import Classifier
from selftpt.config import AdaptConfig, Config, LearnConfig, setting
from selftpt.methods.method import FitContext, FittedMethod, Method
from selftpt.methods.self_tpt import PROMPT_TENSORS, prompt_of, train

Recipe = Literal["paper", "coop"]
MANY = 500  # classes of ImageNet's base half; with this many or more, CoOp trains for 50 epochs


@dataclass(frozen=True)
class CoopTrainConfig(LearnConfig):
    """Stage 1 with cross-entropy alone. Batch size and epochs come from the recipe unless they are set."""

    batch: int | None = setting(None, "images per step; none takes the value of the recipe")  # type: ignore[assignment]
    epochs: int | None = setting(None, "epochs; none takes the value of the recipe")  # type: ignore[assignment]
    cpt: float = setting(0.0, "weight of contrastive prompt tuning")
    gm: float = setting(0.0, "weight of gradient matching")


@dataclass(frozen=True)
class CoopConfig(Config):
    """CoOp in the setting of the Self-TPT paper, or with the few-shot recipe of CoOp's authors."""

    learn: CoopTrainConfig = field(default_factory=CoopTrainConfig)
    recipe: Recipe = setting("paper", "source of the batch size and the epochs: paper or coop")


def train_config(context: FitContext, config: CoopConfig) -> LearnConfig:
    """Fill in the batch size and the epochs of the recipe where `config.learn` has none.

    Everything else in CoOp's few-shot recipe, including the learning rate, equals the defaults.
    """
    batch, epochs = LearnConfig.batch, LearnConfig.epochs
    if config.recipe == "coop":
        few = context.source.few(config.learn.shots, config.learn.seed)
        shots = max(Counter(few.labels).values())
        batch, epochs = 32, 50 if shots == 1 or len(few.names) >= MANY else 100 if shots <= 4 else 200
    values = {field.name: getattr(config.learn, field.name) for field in dataclasses.fields(LearnConfig)}
    return LearnConfig(**values | {"batch": config.learn.batch or batch, "epochs": config.learn.epochs or epochs})


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Make the classifier of the learned prompt, without stage 2."""
    return adapt(fitted.model, prompt_of(fitted), names, AdaptConfig(steps=0))


def by_paper_recipe(config: CoopConfig) -> bool:
    return config.recipe == "paper"


COOP = Method(
    "coop",
    CoopConfig(),
    classify,
    train,
    train_config,
    tensors=PROMPT_TENSORS,
    uses_protocol_epochs=by_paper_recipe,
)
