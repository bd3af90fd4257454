"""MTA: the mode of an image's views, by a mean shift that weights each view by how well it fits in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.adaptation import zero_shot
from selftpt.config import Config, setting
from selftpt.data.views import ViewSpec, image_and_crops
from selftpt.methods.method import FittedMethod, Method, Probabilities

ROUNDS = 5  # of the whole, and of each of its two steps
NEIGHBOURS = 0.3  # of the other views, those that a view's bandwidth is measured by
NARROWEST = 1e-6  # squared bandwidth: views that are all the same have none


@dataclass(frozen=True)
class MtaConfig(Config):
    """The mean shift."""

    views: int = setting(64, "views of an image: itself and random crops", above=0)
    affinity: float = setting(4.0, "weight of views with similar predictions, λ", minimum=0)
    spread: float = setting(0.2, "weight of the scores' entropy, λ_y: the larger, the more equal they are", above=0)


def squared_bandwidth(features: Tensor) -> Tensor:
    """h² of each view: half the mean squared distance to its nearest other views. [N, V, D] to [N, V]."""
    squares = (2 - 2 * features @ features.mT).clamp(min=0)
    count = max(1, int(NEIGHBOURS * (features.shape[-2] - 1)))
    nearest = squares.sort(-1).values[..., 1 : count + 1]
    return (nearest.mean(-1) / 2).clamp(min=NARROWEST)


def mode(features: Tensor, probabilities: Tensor, affinity: float, spread: float) -> Tensor:
    """The mode [N, D] of L2-normalised features of views [N, V, D]. It starts at the image itself, the first view.

    Two steps take turns. The scores of the views, how well they fit in, by a fixed point:
    y_p = softmax((K(f_p - m) + λ Σ_q w_pq y_q) / λ_y), where w_pq = s_p · s_q is how alike two views predict.
    And the mode by mean shift: m = Σ y_p K(f_p - m) f_p, L2-normalised.
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


def predictor(fitted: FittedMethod, names: Sequence[str], template: str) -> Probabilities:
    """Zero-shot class vectors, compared with the mode."""
    classifier, config = zero_shot(fitted.model, names, template), fitted.config

    def probabilities(views: Tensor) -> Tensor:
        return classifier.probabilities(mode(views, classifier.probabilities(views), config.affinity, config.spread))

    return probabilities


def views(config: MtaConfig) -> list[ViewSpec]:
    return image_and_crops(config.views)


MTA = Method(
    "mta",
    MtaConfig(),
    predictor,
    views=views,
    inputs="views",
)
