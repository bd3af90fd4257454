"""Reference implementation of KgCoOp from its equations.

The loss is the cross-entropy plus one minus the mean cosine to the class features of the hand_crafted-crafted template.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference


def distance(classes: Tensor, hand_crafted: Tensor) -> Tensor:
    """Return one minus the mean over classes of the cosine."""
    total: Tensor = torch.zeros((), dtype=classes.dtype)
    for w, h in zip(classes, hand_crafted, strict=True):
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
    """Return L_ce + λ L_kg."""
    classes = reference.encode(small, "end", names, prompt)
    hand_crafted = reference.encode(small, "hand_crafted", names, prompt.detach(), template).detach()
    return reference.cross_entropy(images, classes, labels, tau) + weight * distance(classes, hand_crafted)
