"""MTA: the mode of a picture's views, by a mean shift in which each view counts by how well it fits in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.adaptation import zero_shot
from selftpt.config import PredictConfig, above, at_least, setting
from selftpt.methods.method import Fitted, Job, Method, Predictor
from selftpt.methods.views import views_of

ROUNDS = 5  # of the whole, and of each of its two steps
NEIGHBOURS = 0.3  # of the other views, those that a view's bandwidth is measured by
NARROWEST = 1e-6  # squared bandwidth: views that are all the same have none


@dataclass(frozen=True)
class Settings:
    """Of the mean shift."""

    views: int = setting(64, "looks at a picture: itself and random crops")
    affinity: float = setting(4.0, "weight of views that predict alike, λ")
    spread: float = setting(0.2, "weight of the scores' entropy, λ_y: the larger, the more equal they are")

    def __post_init__(self) -> None:
        PredictConfig(views=self.views)
        at_least(0, self, "affinity")
        above(0, self, "spread")


def squared_bandwidth(features: Tensor) -> Tensor:
    """h² of each view: half the mean squared distance to its nearest other views. [N, V, D] to [N, V]."""
    squares = (2 - 2 * features @ features.mT).clamp(min=0)
    count = max(1, int(NEIGHBOURS * (features.shape[-2] - 1)))
    nearest = squares.sort(-1).values[..., 1 : count + 1]
    return (nearest.mean(-1) / 2).clamp(min=NARROWEST)


def mode(features: Tensor, probabilities: Tensor, affinity: float, spread: float) -> Tensor:
    """The mode [N, D] of unit features of views [N, V, D], which starts at the picture itself, the first of them.

    Two steps take turns. The scores of the views, how well they fit in, by a fixed point:
    y_p = softmax((K(f_p - m) + λ Σ_q w_pq y_q) / λ_y), where w_pq = s_p · s_q is how alike two views predict.
    And the mode by mean shift: m = Σ y_p K(f_p - m) f_p, brought to unit length.
    K is a Gaussian kernel with each view's own bandwidth.
    """
    if features.shape[-2] == 1:
        return features[:, 0]
    wide = squared_bandwidth(features)
    alike = probabilities @ probabilities.mT
    scores = torch.full_like(wide, 1 / wide.shape[-1])
    m = features[:, 0]

    def log_kernel(m: Tensor) -> Tensor:
        return -(2 - 2 * (features @ m[..., None])[..., 0]).clamp(min=0) / (2 * wide)

    for _ in range(ROUNDS):
        density = log_kernel(m).exp()
        for _ in range(ROUNDS):
            agreed = (alike @ scores[..., None])[..., 0]
            scores = ((density + affinity * agreed) / spread).softmax(-1)
        for _ in range(ROUNDS):
            weights = (log_kernel(m) + scores.log()).softmax(-1)
            m = F.normalize((weights[:, None] @ features)[:, 0], dim=-1)
    return m


def fit(job: Job, settings: Settings) -> Fitted:
    """Zero-shot class vectors, compared with the mode."""

    def predictor(names: Sequence[str], template: str) -> Predictor:
        classifier = zero_shot(job.model, names, template)

        def predict(shown: Tensor) -> Tensor:
            centre = mode(shown, classifier.probabilities(shown), settings.affinity, settings.spread)
            return classifier.probabilities(centre)

        return predict

    return predictor


MTA = Method(
    "mta",
    "the mode of the views, by mean shift",
    "Zanella and Ben Ayed, CVPR 2024",
    Settings(),
    fit,
    "64 views",
    "features of views",
    lambda settings: views_of(settings.views),
)
