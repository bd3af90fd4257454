"""Reference implementation of SwapPrompt as described in the docs.

It loops over images and classes, runs the complete text tower, and takes gradients from autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference


def assignments(probabilities: Sequence[Sequence[float]], shots: int) -> list[int]:
    """Return pseudo-labels: each class keeps the `shots` most probable of the images predicted as it; others get -1."""
    best = [p.index(max(p)) for p in probabilities]
    labels = [-1] * len(best)
    for c in set(best):
        own = sorted((i for i in range(len(best)) if best[i] == c), key=lambda i: -probabilities[i][c])
        for i in own[:shots]:
            labels[i] = c
    return labels


def loss(
    small: Small,
    names: Sequence[str],
    online: Tensor,
    target: Tensor,
    pairs: Tensor,
    labels: Sequence[int],
    tau: float,
    weights: tuple[float, float],
) -> Tensor:
    """Return the weighted sum of the swapped-prediction and pseudo-label losses of crop pairs [B, 2, D]."""
    student = reference.encode(small, "end", names, online)
    with torch.no_grad():
        teacher = reference.encode(small, "end", names, target)
    swapped = torch.zeros((), dtype=pairs.dtype)
    for pair in pairs:
        p = reference.probabilities(pair, student, tau)
        q = reference.probabilities(pair, teacher, tau)
        for view, other in ((0, 1), (1, 0)):
            for c in range(len(names)):
                swapped = swapped - q[other, c] * torch.log(p[view, c])
    swapped = swapped / (2 * len(pairs))
    labelled = [i for i, label in enumerate(labels) if label >= 0]
    pseudo = torch.zeros((), dtype=pairs.dtype)
    for i in labelled:
        p = reference.probabilities(pairs[i], student, tau)
        for view in (0, 1):
            pseudo = pseudo - torch.log(p[view, labels[i]])
    if labelled:
        pseudo = pseudo / (2 * len(labelled))
    return weights[0] * swapped + weights[1] * pseudo
