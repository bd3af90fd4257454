"""C-TPT: TPT with a second loss term that maximises the dispersion of the class vectors, which improves calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from selftpt.config import setting
from selftpt.methods import tpt
from selftpt.methods.method import FittedMethod, Method


@dataclass(frozen=True)
class CTptConfig(tpt.TptConfig):
    """TPT's configuration and the weight of the dispersion term."""

    dispersion: float = setting(50.0, "weight of the dispersion of the class vectors", minimum=0)


def text_feature_dispersion(vectors: Tensor) -> Tensor:
    """Compute C-TPT's text feature dispersion: the mean Euclidean distance of the class vectors from their mean.

    Args:
        vectors: L2-normalised class vectors, [C, D].

    Returns:
        The dispersion, a scalar.
    """
    distances: Tensor = (vectors - vectors.mean(0)).norm(dim=-1)
    return distances.mean()


def predictor(fitted: FittedMethod, names: Sequence[str], _template: str) -> tpt.Tuner:
    """Make a tuner whose loss is TPT's loss minus the weighted dispersion."""
    model, config = fitted.model, fitted.config
    weight: float = config.dispersion

    def loss(logits: Tensor, vectors: Tensor) -> Tensor:
        return tpt.marginal_entropy(logits) - weight * text_feature_dispersion(vectors)

    return tpt.make_tuner(model, names, model.text.embed_words(config.words), config, loss)


C_TPT = Method(
    "c-tpt",
    CTptConfig(),
    predictor,
    views=tpt.views,
    inputs="views",
    extra_cost=tpt.cost,
)
