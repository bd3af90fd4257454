"""C-TPT: TPT that also keeps the class vectors apart, so that its confidence can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from selftpt.config import at_least, setting
from selftpt.methods import tpt
from selftpt.methods.method import Fitted, Job, Method


@dataclass(frozen=True)
class Settings(tpt.Settings):
    """TPT's, and the weight of the new term."""

    dispersion: float = setting(50.0, "weight of the dispersion of class vectors")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "dispersion")


def dispersion(vectors: Tensor) -> Tensor:
    """The mean distance of class vectors [C, D] from their mean."""
    distances: Tensor = (vectors - vectors.mean(0)).norm(dim=-1)
    return distances.mean()


def fit(job: Job, settings: Settings) -> Fitted:
    """TPT's loss less the weighted dispersion."""
    prompt = job.model.text.words(settings.words)

    def loss(logits: Tensor, vectors: Tensor) -> Tensor:
        return tpt.mean_entropy(logits) - settings.dispersion * dispersion(vectors)

    def predictor(names: Sequence[str], _template: str) -> tpt.Tuner:
        return tpt.Tuner(
            job.model, names, prompt, settings, lambda logits: tpt.most_confident(logits, settings.confident), loss
        )

    return predictor


C_TPT = Method(
    "c-tpt",
    "tpt that keeps class vectors apart",
    "Yoon et al., ICLR 2024",
    Settings(),
    fit,
    tpt.COST,
    tpt.NEEDS,
    tpt.looks,
)
