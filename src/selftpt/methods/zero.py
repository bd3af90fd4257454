"""ZERO: a majority vote of the confident views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.adaptation import zero_shot
from selftpt.config import PredictConfig, setting
from selftpt.methods.method import Fitted, Job, Method, Predictor
from selftpt.methods.views import confident_views, views_of


@dataclass(frozen=True)
class Settings:
    """Of the vote."""

    views: int = setting(64, "looks at a picture: itself and random crops")
    confident: float = setting(0.3, "share of the views that votes, the most confident ones")

    def __post_init__(self) -> None:
        PredictConfig(views=self.views, confident=self.confident)


def vote(probabilities: Tensor, confident: float) -> Tensor:
    """Shares of the votes of the confident views: [N, V, C] to [N, C].

    At a temperature of zero a view is a vote for its best class. Where K views vote, a tie is broken by the views from
    the (K+1)-th on, as they come: the first that is for a tied class decides, or else what the (K+1)-th itself (the
    last, if all vote) says of the tied ones. Who wins a tie gets one more vote, so that it comes first.
    """
    views, classes = probabilities.shape[-2:]
    chosen = confident_views(probabilities, confident)
    count = chosen.shape[-1]
    each = probabilities.argmax(-1)
    votes = F.one_hot(each.gather(-1, chosen), classes).sum(-2)
    tied = votes == votes.amax(-1, keepdim=True)

    at = min(count, views - 1)
    deciders = each[:, at:]
    decides = tied.gather(-1, deciders)
    first = deciders.gather(-1, decides.int().argmax(-1, keepdim=True))
    last_resort = probabilities[:, at].masked_fill(~tied, -1).argmax(-1, keepdim=True)
    winner = torch.where(decides.any(-1, keepdim=True), first, last_resort)
    votes = votes.scatter_add(-1, winner, (tied.sum(-1, keepdim=True) > 1).to(votes.dtype))
    return votes / votes.sum(-1, keepdim=True)


def fit(job: Job, settings: Settings) -> Fitted:
    """Zero-shot class vectors, and the vote."""

    def predictor(names: Sequence[str], template: str) -> Predictor:
        classifier = zero_shot(job.model, names, template)
        return lambda shown: vote(classifier.probabilities(shown), settings.confident)

    return predictor


ZERO = Method(
    "zero",
    "a majority vote of the confident views",
    "Farina et al., NeurIPS 2024",
    Settings(),
    fit,
    "64 views",
    "features of views",
    lambda settings: views_of(settings.views),
)
