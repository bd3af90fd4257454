"""Reference implementation of ProDA: every prompt passes through the complete text tower, and sums are loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum())


def name_position(k: int, prompts: int) -> str:
    """Return where prompt k has the name: the first half at the end, a quarter in the middle, a quarter in front."""
    if k < prompts - 2 * (prompts // 4):
        return "end"
    return "middle" if k < prompts - prompts // 4 else "front"


def bound(images: Tensor, labels: Tensor, classes: Sequence[Sequence[Tensor]], scale: float) -> Tensor:
    """Return the mean over images of log Σ_c exp(s z·(μ_c - μ_y) + s²/2 z·Σ_cy·z).

    Σ_cy is the diagonal covariance of the differences w_c - w_y.

    Args:
        classes: For each prompt, the L2-normalised embedding of every class.
    """
    prompts, count = len(classes), len(classes[0])
    total = torch.zeros((), dtype=images.dtype)
    for z, y in zip(images, labels.tolist(), strict=True):
        terms = []
        for c in range(count):
            differences = [classes[k][c] - classes[k][y] for k in range(prompts)]
            mean = sum(differences) / prompts
            sigma = sum((difference - mean) ** 2 for difference in differences) / (prompts + 1)
            terms.append(torch.exp(scale * (z @ mean) + scale**2 / 2 * (z * sigma * z).sum()))
        total = total + torch.log(sum(terms))
    return total / len(images)


def likeness(embeddings: Sequence[Tensor]) -> Tensor:
    """Return the mean of |cos| over all pairs of different prompts."""
    cosines = [
        torch.abs(unit(a) @ unit(b)) for i, a in enumerate(embeddings) for j, b in enumerate(embeddings) if i != j
    ]
    return sum(cosines) / len(cosines)


def step(
    small: Small,
    names: Sequence[str],
    contexts: Tensor,
    chosen: Sequence[int],
    images: Tensor,
    labels: Tensor,
    scale: float,
    orthogonality: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two losses of a step with the chosen prompts, and the gradient of their sum w.r.t. all contexts."""
    p = contexts.detach().clone().requires_grad_()
    classes = [[unit(w) for w in reference.encode(small, name_position(k, len(p)), names, p[k])] for k in chosen]
    surrogate = bound(images, labels, classes, scale)
    alike = likeness([reference.encode(small, "end", [""], context)[0] for context in p])
    (gradient,) = torch.autograd.grad(surrogate + orthogonality * alike, p)
    return surrogate.detach(), alike.detach(), gradient


def mean_embedding(small: Small, names: Sequence[str], contexts: Tensor) -> Tensor:
    """Return the mean over all prompts of the L2-normalised embedding of every class."""
    rows = []
    for name in names:
        each = [
            unit(reference.encode(small, name_position(k, len(contexts)), [name], context)[0])
            for k, context in enumerate(contexts)
        ]
        rows.append(sum(each) / len(each))
    return torch.stack(rows)
