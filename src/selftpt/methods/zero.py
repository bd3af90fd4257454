"""ZERO: a majority vote of the confident views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.adaptation import zero_shot
from selftpt.classifier import confident_views
from selftpt.config import Config, setting
from selftpt.data.views import ViewSpec, image_and_crops
from selftpt.methods.method import FittedMethod, Method, PredictFunction


@dataclass(frozen=True)
class ZeroConfig(Config):
    """Settings of the vote."""

    views: int = setting(64, "views of an image: itself and random crops", above=0)
    confidence_ratio: float = setting(0.3, "share of the views that votes, the most confident ones", above=0, maximum=1)


def vote(probabilities: Tensor, confidence_ratio: float) -> Tensor:
    """Compute the share of votes of each class.

    Each confident view votes for its most probable class, as a softmax with temperature zero does. A tie is broken by
    the views that did not vote, in order of increasing entropy. The first one whose most probable class is tied
    decides. If there is none, the first of these views (or the last voter, if all views vote) decides by its
    probabilities of the tied classes. The winner of a tie gets one more vote, so that it comes first.

    Args:
        probabilities: Class probabilities of the views, [N, V, C].
        confidence_ratio: The share of the views that vote.

    Returns:
        Shares, [N, C].
    """
    views, classes = probabilities.shape[-2:]
    order = confident_views(probabilities, 1.0)
    count = max(1, int(confidence_ratio * views))
    best = probabilities.argmax(-1).gather(-1, order)
    votes = F.one_hot(best[:, :count], classes).sum(-2)
    tied = votes == votes.amax(-1, keepdim=True)

    start = min(count, views - 1)
    deciders = best[:, start:]
    decides = tied.gather(-1, deciders)
    first = deciders.gather(-1, decides.int().argmax(-1, keepdim=True))
    next_view = order[:, start, None, None].expand(-1, 1, classes)
    last_resort = probabilities.gather(-2, next_view)[:, 0].masked_fill(~tied, -1).argmax(-1, keepdim=True)
    winner = torch.where(decides.any(-1, keepdim=True), first, last_resort)
    votes = votes.scatter_add(-1, winner, (tied.sum(-1, keepdim=True) > 1).to(votes.dtype))
    return votes / votes.sum(-1, keepdim=True)


def predictor(fitted: FittedMethod, names: Sequence[str], template: str) -> PredictFunction:
    """Make a function that lets the confident views vote with zero-shot class vectors."""
    classifier = zero_shot(fitted.model, names, template)

    def probabilities(views: Tensor) -> Tensor:
        return vote(classifier.probabilities(views), fitted.config.confidence_ratio)

    return probabilities


def views(config: ZeroConfig) -> list[ViewSpec]:
    return image_and_crops(config.views)


ZERO = Method(
    "zero",
    ZeroConfig(),
    predictor,
    views=views,
    inputs="views",
)
