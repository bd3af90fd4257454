"""Reference implementation of TPT, C-TPT and DiffTPT from their papers.

Every position of every sentence is computed, one view and one class at a time. Details that the papers leave open come
from the authors' code: AdamW and its hyperparameters, views that are selected once and by rank, and ratios of views
that are rounded down with `int`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference


def entropy(p: Tensor) -> Tensor:
    """Return the entropy of one distribution [C]."""
    return -sum(value * torch.log(value) for value in p)


def marginal_entropy(p: Tensor) -> Tensor:
    """Return the entropy of the mean of distributions [K, C]."""
    return entropy(sum(one for one in p) / len(p))


def lowest_entropy(p: Tensor, ratio: float) -> list[int]:
    """Return the indices of the views with the lowest entropy, given p [V, C]."""
    ranked = sorted(range(len(p)), key=lambda i: entropy(p[i]).item())
    return ranked[: max(1, int(len(p) * ratio))]


def dispersion(classes: Tensor) -> Tensor:
    """Return C-TPT's mean distance of the L2-normalised class vectors [C, D] from their mean."""
    unit = [w / w.norm() for w in classes]
    centre = sum(unit) / len(unit)
    return sum(torch.sqrt(((w - centre) ** 2).sum()) for w in unit) / len(unit)


class AdamW:
    """AdamW (Loshchilov and Hutter) with default betas, learning rate 0.005 and weight decay 0.01."""

    def __init__(self) -> None:
        self.first: Tensor | float = 0.0
        self.second: Tensor | float = 0.0
        self.count = 0

    def step(self, x: Tensor, gradient: Tensor) -> Tensor:
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        m = self.first / (1 - 0.9**self.count)
        v = self.second / (1 - 0.999**self.count)
        return x - 0.005 * 0.01 * x - 0.005 * m / (torch.sqrt(v) + 1e-8)


@dataclass(frozen=True)
class TuningResult:
    """Result of tuning a prompt for one image.

    Attributes:
        loss: Loss of the first step.
        gradient: Gradient [M, d] of the first step.
        prompt: Final prompt [M, d].
        probabilities: Probabilities [C] of the image with the final prompt.
    """

    loss: float
    gradient: Tensor
    prompt: Tensor
    probabilities: Tensor


def logits(views: Tensor, classes: Tensor, tau: float) -> Tensor:
    """Return the scaled cosines [V, C] of views [V, D] and classes [C, D]."""
    return torch.stack([torch.stack([(w @ e) / (w.norm() * e.norm()) / tau for w in classes]) for e in views])


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of each row of [V, C]."""
    return torch.stack([torch.exp(row) / torch.exp(row).sum() for row in x])


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a @ b) / math.sqrt((a @ a) * (b @ b)))


def select_views(x: Tensor, ratio: float, near_ratio: float | None) -> list[int]:
    """Return the indices of the selected views, given the logits [V, C] of all views.

    If `near_ratio` is given, select as DiffTPT does: first keep that ratio of the other views, by cosine to the image.
    """
    if near_ratio is None:
        return lowest_entropy(softmax(x), ratio)
    others = sorted(range(1, len(x)), key=lambda i: -cosine(x[0], x[i]))
    kept = [0, *others[: int((len(x) - 1) * near_ratio)]]
    return [kept[i] for i in lowest_entropy(softmax(x[kept]), ratio)]


def tune(
    small: Small,
    names: Sequence[str],
    prompt: Tensor,
    views: Tensor,
    tau: float,
    ratio: float = 0.1,
    near_ratio: float | None = None,
    dispersion_weight: float = 0.0,
    steps: int = 1,
) -> TuningResult:
    """Tune a prompt [M, d] on the views [V, D] of one image; the first view is the image itself."""
    adamw, p = AdamW(), prompt.detach()
    chosen = first_loss = first_gradient = None
    for _ in range(steps):
        p = p.clone().requires_grad_()
        classes = reference.encode(small, "end", names, p)
        x = logits(views, classes, tau)
        if chosen is None:
            chosen = select_views(x.detach(), ratio, near_ratio)
        loss = marginal_entropy(softmax(x[chosen])) - dispersion_weight * dispersion(classes)
        (gradient,) = torch.autograd.grad(loss, p)
        if first_gradient is None:
            first_loss, first_gradient = loss.item(), gradient
        p = adamw.step(p.detach(), gradient)
    with torch.no_grad():
        answer = softmax(logits(views[:1], reference.encode(small, "end", names, p), tau))[0]
    return TuningResult(first_loss, first_gradient, p, answer)
