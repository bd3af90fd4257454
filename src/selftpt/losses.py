"""Cross-entropy, contrastive prompt tuning and gradient matching: pure functions of tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import Matching, Reduction


class Head(NamedTuple):
    """The projection h: two layers with a ReLU between. w1 [E, D], b1 [E], w2 [F, E], b2 [F]."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor


def project(features: Tensor, head: Head, normalize: bool = True) -> Tensor:
    """z = h(g(t)): text features [..., D] to [..., F], of unit length unless `normalize` is off."""
    z = F.linear(F.relu(F.linear(features, head.w1, head.b1)), head.w2, head.b2)
    return F.normalize(z, dim=-1) if normalize else z


def cross_entropy(images: Tensor, classes: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Eq. 3 with the probabilities of Eq. 1.

    images: [B, D], unit features; classes: [C, D], text features of any length; labels: [B]; scale: 1 / τ.
    """
    return F.cross_entropy(scale * images @ F.normalize(classes, dim=-1).t(), labels)


def cpt(
    z: Tensor,
    same: Tensor | None = None,
    temperature: float = 0.07,
    reduction: Reduction = "mean",
    held: int = 1 << 20,
) -> Tensor:
    """Eq. 9: contrastive prompt tuning over V views of C classes, the sum over positives inside the logarithm.

    z: [V, C, F], projected text features.
    same: [C], equal numbers for classes of equal names, which are then no negatives of each other.
    held: about how many of the [VC, VC] similarities are held at once; more are computed in blocks of rows, and
    again in the backward pass.
    """
    views, classes, _ = z.shape
    others = ~torch.eye(views, dtype=torch.bool, device=z.device)
    positive = torch.einsum("vcf,wcf->vcw", z, z) / temperature
    positive = positive.masked_fill(~others[:, None], float("-inf")).logsumexp(-1).flatten()

    kind = torch.arange(classes, device=z.device) if same is None else same
    total: Tensor = _Denominator.apply(z.flatten(0, 1), kind.repeat(views), classes, temperature, held)
    terms = total - positive
    return terms.mean() if reduction == "mean" else terms.sum()


class _Denominator(torch.autograd.Function):
    """The logarithm of Eq. 9's denominator for every row of z [VC, F], in blocks of rows that are never kept.

    Its backward pass computes the blocks again, out of differentiable pieces, so that it has one of its own.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, kind: Tensor, classes: int, temperature: float, held: int) -> Tensor:
        ctx.kind, ctx.classes, ctx.temperature = kind, classes, temperature
        ctx.blocks = torch.arange(len(z), device=z.device).split(max(64, held // len(z)))
        total = torch.cat([_similarity(z, block, kind, classes, temperature).logsumexp(-1) for block in ctx.blocks])
        ctx.save_for_backward(z, total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        z, total = ctx.saved_tensors
        by_row, by_column = [], torch.zeros_like(z)
        for block in ctx.blocks:
            similarity = _similarity(z, block, ctx.kind, ctx.classes, ctx.temperature)
            weight = (similarity - total[block, None]).exp() * (gradient[block, None] / ctx.temperature)
            by_row.append(weight @ z)
            by_column = by_column + weight.t() @ z[block]
        return torch.cat(by_row) + by_column, None, None, None, None


def _similarity(z: Tensor, rows: Tensor, kind: Tensor, classes: int, temperature: float) -> Tensor:
    """z_i · z_j / τ of some rows i with all j, -∞ where j is i itself or another class of an equal name."""
    index = torch.arange(len(z), device=z.device)
    equal = (kind[rows][:, None] == kind) & (rows[:, None] % classes != index % classes)
    return (z[rows] @ z.t() / temperature).masked_fill(equal | (rows[:, None] == index), float("-inf"))


def moving_average(average: Tensor | None, gradient: Tensor, decay: float) -> Tensor:
    """Eq. 11 by its recursion: the first gradient as it is, then α · average + (1 - α) · gradient."""
    return gradient if average is None else decay * average + (1 - decay) * gradient


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Eq. 10: the cosine between two gradients of one shape; 0 if one of them is."""
    norms = a.norm() * b.norm()
    product = (a * b).sum()
    return product / norms if norms > 0 else product


def gradient_matching(target: Tensor, gradient: Tensor, kind: Matching = "cosine") -> Tensor:
    """Eq. 12: 1 - cos(target, gradient); or the mean squared difference of the paper's ablation.

    target: the (averaged) gradient of the cross-entropy, a constant; gradient: of CPT, with a graph. Both [M, d].
    """
    return 1 - cosine(target, gradient) if kind == "cosine" else F.mse_loss(gradient, target)
