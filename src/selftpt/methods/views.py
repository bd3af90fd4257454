"""What methods that look at many views of a picture have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from selftpt.config import PredictConfig
from selftpt.data.features import ViewSpec


def views_of(views: int, augmix: bool = False) -> list[ViewSpec]:
    """The picture, and random crops up to so many views: the crops of `predict`, so that all share their features."""
    return [ViewSpec(), ViewSpec(views - 1, PredictConfig.seed, augmix=augmix)] if views > 1 else [ViewSpec()]


def entropy(probabilities: Tensor) -> Tensor:
    """In nats: [..., C] to [...]."""
    terms: Tensor = torch.special.entr(probabilities)
    return terms.sum(-1)


def confident_views(probabilities: Tensor, share: float) -> Tensor:
    """The indices of the views of least entropy, the least first: [..., V, C] to [..., K], K = int(share * V) or 1."""
    count = max(1, int(share * probabilities.shape[-2]))
    return entropy(probabilities).argsort(dim=-1, stable=True)[..., :count]


def choose_views(values: Tensor, chosen: Tensor) -> Tensor:
    """Those of chosen views: values [..., V, X] and indices [..., K] to [..., K, X]."""
    return values.gather(-2, chosen[..., None].expand(*chosen.shape, values.shape[-1]))
