"""C-TPT: TPT with a second term that keeps the class vectors apart, which improves calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from selftpt.config import setting
from selftpt.methods import tpt
from selftpt.methods.method import FittedMethod, Method


@dataclass(frozen=True)
class CTptConfig(tpt.TptConfig):
    """TPT's configuration, and the weight of the second term."""

    dispersion: float = setting(50.0, "weight of the dispersion of the class vectors", minimum=0)


def dispersion(vectors: Tensor) -> Tensor:
    """Compute the mean distance of class vectors [C, D] from their mean."""
    distances: Tensor = (vectors - vectors.mean(0)).norm(dim=-1)
    return distances.mean()


def predictor(fitted: FittedMethod, names: Sequence[str], _template: str) -> tpt.Tuner:
    """Make a tuner whose loss is TPT's loss minus the weighted dispersion."""
    model, config = fitted.model, fitted.config

    def select(logits: Tensor) -> Tensor:
        return tpt.most_confident(logits, config.confidence_ratio)

    def loss(logits: Tensor, vectors: Tensor) -> Tensor:
        weight: float = config.dispersion
        return tpt.mean_entropy(logits) - weight * dispersion(vectors)

    return tpt.Tuner(model, names, model.text.embed_words(config.words), config, select, loss)


C_TPT = Method(
    "c-tpt",
    CTptConfig(),
    predictor,
    views=tpt.views,
    inputs="views",
    more_cost=tpt.cost,
)
