"""MTA: classifies the mode of the views, found by a mean shift that weights each view by an inlierness score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.adaptation import zero_shot
from selftpt.config import Config, setting
from selftpt.data.views import ViewSpec, image_and_crops
from selftpt.methods.method import FittedMethod, Method, PredictFunction

ITERATIONS = 5  # outer iterations, and inner updates of the scores and of the mode
NEIGHBOUR_RATIO = 0.3  # fraction of the other views that are a view's nearest neighbours
MIN_SQUARED_BANDWIDTH = 1e-6  # used if the neighbours of a view are identical to it


@dataclass(frozen=True)
class MtaConfig(Config):
    """Settings of the mean shift."""

    views: int = setting(64, "views of an image: itself and random crops", above=0)
    affinity: float = setting(4.0, "weight of the similarity of the views' predictions, λ", minimum=0)
    spread: float = setting(
        0.2, "weight of the entropy of the scores, λ_y; a larger value makes the scores more uniform", above=0
    )


def squared_bandwidth(features: Tensor) -> Tensor:
    """Compute h² of each view: half the mean squared distance to its nearest neighbours.

    Args:
        features: L2-normalised features of views, [N, V, D].

    Returns:
        Squared bandwidths, [N, V].
    """
    squares = (2 - 2 * features @ features.mT).clamp(min=0)
    count = max(1, int(NEIGHBOUR_RATIO * (features.shape[-2] - 1)))
    nearest = squares.sort(-1).values[..., 1 : count + 1]
    return (nearest.mean(-1) / 2).clamp(min=MIN_SQUARED_BANDWIDTH)


def mode(features: Tensor, probabilities: Tensor, affinity: float, spread: float) -> Tensor:
    """Find the mode of the features of each image's views.

    The scores y and the mode m are updated in turn; K is a Gaussian kernel with the bandwidth of each view.

    - Scores: y = softmax_p((K(f_p - m) + λ Σ_q w_pq y_q) / λ_y), where w_pq = s_p · s_q is the dot product of the
      class probabilities of two views.
    - Mode, by mean shift: m = Σ_p y_p K(f_p - m) f_p, L2-normalised. m is initialised with the feature of the image
      itself.

    Args:
        features: L2-normalised features f of views, [N, V, D]; the first view is the image itself.
        probabilities: Class probabilities s of the views, [N, V, C].
        affinity: λ.
        spread: λ_y.

    Returns:
        Modes, [N, D].
    """
    if features.shape[-2] == 1:
        return features[:, 0]
    bandwidth = squared_bandwidth(features)
    similarity = probabilities @ probabilities.mT
    scores = torch.full_like(bandwidth, 1 / bandwidth.shape[-1])
    m = features[:, 0]

    def log_kernel(m: Tensor) -> Tensor:
        return -(2 - 2 * (features @ m[..., None])[..., 0]).clamp(min=0) / (2 * bandwidth)

    for _ in range(ITERATIONS):
        density = log_kernel(m).exp()
        for _ in range(ITERATIONS):
            agreement = (similarity @ scores[..., None])[..., 0]
            scores = ((density + affinity * agreement) / spread).softmax(-1)
        for _ in range(ITERATIONS):
            weights = (log_kernel(m) + scores.log()).softmax(-1)
            m = F.normalize((weights[:, None] @ features)[:, 0], dim=-1)
    return m


def predictor(fitted: FittedMethod, names: Sequence[str], template: str) -> PredictFunction:
    """Make a function that classifies the mode of the views with zero-shot class vectors."""
    classifier, config = zero_shot(fitted.model, names, template), fitted.config

    def probabilities(views: Tensor) -> Tensor:
        return classifier.probabilities(mode(views, classifier.probabilities(views), config.affinity, config.spread))

    return probabilities


def views(config: MtaConfig) -> list[ViewSpec]:
    """Return the image and its crops."""
    return image_and_crops(config.views)


MTA = Method(
    "mta",
    MtaConfig(),
    predictor,
    views=views,
    inputs="views",
)
