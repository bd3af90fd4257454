"""KgCoOp by its equations: cross-entropy, and one minus the mean cosine to the hand-written class features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference


def distance(classes: Tensor, hand: Tensor) -> Tensor:
    """One minus the mean cosine, class by class."""
    total: Tensor = torch.zeros((), dtype=classes.dtype)
    for w, h in zip(classes, hand, strict=True):
        total = total + (w * h).sum() / torch.sqrt((w * w).sum() * (h * h).sum())
    return 1 - total / len(classes)


def loss(
    small: Small,
    names: Sequence[str],
    prompt: Tensor,
    images: Tensor,
    labels: Tensor,
    tau: float,
    weight: float,
    template: str,
) -> Tensor:
    """L_ce + λ L_kg."""
    classes = reference.encode(small, "end", names, prompt)
    hand = reference.encode(small, "hand_crafted", names, prompt.detach(), template).detach()
    return reference.cross_entropy(images, classes, labels, tau) + weight * distance(classes, hand)
