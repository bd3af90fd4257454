"""SwapPrompt as docs tell it: loops over images and classes, the whole walk of the text tower, torch's gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference


def assignments(probabilities: Sequence[Sequence[float]], shots: int) -> list[int]:
    """Pseudo-labels: of the images whose best class it is, the `shots` with the highest probability; else -1."""
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
    """Of a batch of crop pairs [B, 2, D]: swapped prediction and pseudo-labels, with their weights."""
    student = reference.encode(small, "end", names, online)
    with torch.no_grad():
        teacher = reference.encode(small, "end", names, target)
    swapped = torch.zeros((), dtype=pairs.dtype)
    for pair in pairs:
        p = reference.probabilities(pair, student, tau)
        q = reference.probabilities(pair, teacher, tau)
        for mine, other in ((0, 1), (1, 0)):
            for c in range(len(names)):
                swapped = swapped - q[other, c] * torch.log(p[mine, c])
    swapped = swapped / (2 * len(pairs))
    known = [i for i, label in enumerate(labels) if label >= 0]
    pseudo = torch.zeros((), dtype=pairs.dtype)
    for i in known:
        p = reference.probabilities(pairs[i], student, tau)
        for mine in (0, 1):
            pseudo = pseudo - torch.log(p[mine, labels[i]])
    if known:
        pseudo = pseudo / (2 * len(known))
    return weights[0] * swapped + weights[1] * pseudo
