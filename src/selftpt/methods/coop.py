"""CoOp: the prompt is learned with cross-entropy alone, and used as it is."""

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
MANY = 500  # classes of ImageNet's base half, from which on CoOp takes 50 epochs


@dataclass(frozen=True)
class CoopTrainConfig(LearnConfig):
    """Cross-entropy alone. Batch size and epochs are the recipe's unless they are given."""

    batch: int | None = setting(None, "images per step; none takes the recipe's")  # type: ignore[assignment]
    epochs: int | None = setting(None, "epochs; none takes the recipe's")  # type: ignore[assignment]
    cpt: float = setting(0.0, "weight of contrastive prompt tuning")
    gm: float = setting(0.0, "weight of gradient matching")


@dataclass(frozen=True)
class CoopConfig(Config):
    """CoOp in the setting of the Self-TPT paper, or by its authors' few-shot recipe."""

    learn: CoopTrainConfig = field(default_factory=CoopTrainConfig)
    recipe: Recipe = setting("paper", "whose batch size and epochs: paper or coop")


def train_config(context: FitContext, config: CoopConfig) -> LearnConfig:
    """`config.learn` with the recipe's batch size and epochs where it has none.

    All else in CoOp's few-shot recipe, its learning rate too, is the default already.
    """
    batch, epochs = LearnConfig.batch, LearnConfig.epochs
    if config.recipe == "coop":
        few = context.source.few(config.learn.shots, config.learn.seed)
        shots = max(Counter(few.labels).values())
        batch, epochs = 32, 50 if shots == 1 or len(few.names) >= MANY else 100 if shots <= 4 else 200
    values = {field.name: getattr(config.learn, field.name) for field in dataclasses.fields(LearnConfig)}
    return LearnConfig(**values | {"batch": config.learn.batch or batch, "epochs": config.learn.epochs or epochs})


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """The learned prompt without stage 2."""
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
