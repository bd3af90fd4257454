"""TPT, C-TPT and DiffTPT by their papers: every position of every sentence, one view, one class at a time.

What the papers leave open is taken from their authors' programs: AdamW and its rates, that the views are chosen once
and by rank, and that `int` cuts a share.
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
    """Of one distribution [C]."""
    return -sum(value * torch.log(value) for value in p)


def mean_entropy(p: Tensor) -> Tensor:
    """The entropy of the mean of distributions [K, C]."""
    return entropy(sum(one for one in p) / len(p))


def confident(p: Tensor, share: float) -> list[int]:
    """The views of p [V, C] with the least entropy."""
    ranked = sorted(range(len(p)), key=lambda i: entropy(p[i]).item())
    return ranked[: max(1, int(len(p) * share))]


def dispersion(classes: Tensor) -> Tensor:
    """C-TPT: the mean distance of unit class vectors from their centre; classes [C, D] of any length."""
    unit = [w / w.norm() for w in classes]
    centre = sum(unit) / len(unit)
    return sum(torch.sqrt(((w - centre) ** 2).sum()) for w in unit) / len(unit)


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter) with the usual constants, written out."""

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
class Tuned:
    """Loss and gradient of the first step, the prompt after the last, and the image's probabilities [C] with it."""

    loss: float
    gradient: Tensor
    prompt: Tensor
    probabilities: Tensor


def logits(views: Tensor, classes: Tensor, tau: float) -> Tensor:
    """Scaled cosines [V, C] of views [V, D] and classes [C, D]."""
    return torch.stack([torch.stack([(w @ e) / (w.norm() * e.norm()) / tau for w in classes]) for e in views])


def softmax(x: Tensor) -> Tensor:
    """Of rows [V, C]."""
    return torch.stack([torch.exp(row) / torch.exp(row).sum() for row in x])


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a @ b) / math.sqrt((a @ a) * (b @ b)))


def choose(x: Tensor, share: float, near: float | None) -> list[int]:
    """The views that are tuned on, by their logits [V, C]; DiffTPT's if `near` is a share."""
    if near is None:
        return confident(softmax(x), share)
    others = sorted(range(1, len(x)), key=lambda i: -cosine(x[0], x[i]))
    kept = [0, *others[: int((len(x) - 1) * near)]]
    return [kept[i] for i in confident(softmax(x[kept]), share)]


def tune(
    small: Small,
    names: Sequence[str],
    prompt: Tensor,
    views: Tensor,
    tau: float,
    share: float = 0.1,
    near: float | None = None,
    spread: float = 0.0,
    steps: int = 1,
) -> Tuned:
    """A prompt [M, d] tuned to the views [V, D] of one image, which is the first of them."""
    adamw, p, chosen, losses, gradients = AdamW(), prompt.detach(), None, [], []
    for _ in range(steps):
        p = p.clone().requires_grad_()
        classes = reference.encode(small, "end", names, p)
        x = logits(views, classes, tau)
        if chosen is None:
            chosen = choose(x.detach(), share, near)
        loss = mean_entropy(softmax(x[chosen])) - spread * dispersion(classes)
        (gradient,) = torch.autograd.grad(loss, p)
        losses.append(loss.item())
        gradients.append(gradient)
        p = adamw.step(p.detach(), gradient)
    with torch.no_grad():
        answer = softmax(logits(views[:1], reference.encode(small, "end", names, p), tau))[0]
    return Tuned(losses[0], gradients[0], p, answer)
