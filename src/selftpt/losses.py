"""Cross-entropy, contrastive prompt tuning and gradient matching: pure functions of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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

    Memory is linear in C, also for first and second derivatives; third derivatives are not available.

    Args:
        z: Projected text features, [V, C, F].
        same: Equal numbers for classes of equal names, which are then no negatives of each other, [C].
        temperature: τ.
        reduction: Mean or sum over the V·C terms.
        held: About how many of the [VC, VC] similarities are held at once. Longer lists are computed in blocks of
            rows, which are computed again in the backward passes.
    """
    views, classes, _ = z.shape
    others = ~torch.eye(views, dtype=torch.bool, device=z.device)
    positive = torch.einsum("vcf,wcf->vcw", z, z) / temperature
    positive = positive.masked_fill(~others[:, None], float("-inf")).logsumexp(-1).flatten()

    if same is not None and len(same.unique()) == classes:
        same = None
    total: Tensor = _Denominator.apply(z.flatten(0, 1), _Similarity(views, classes, same, temperature, held))
    terms = total - positive
    return terms.mean() if reduction == "mean" else terms.sum()


@dataclass(frozen=True)
class _Similarity:
    """S_ij = z_i · z_j / τ for all pairs of rows of z [VC, F], -∞ if j is i or another class of an equal name."""

    views: int
    classes: int
    same: Tensor | None
    temperature: float
    held: int

    def blocks(self, z: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of rows of S, in order. All are written to the same memory, which the caller may change."""
        count = len(z)
        size = min(max(64, self.held // count), count)
        memory = z.new_empty(size, count)
        own = torch.arange(self.classes, device=z.device).repeat(self.views)
        kind = None if self.same is None else self.same.repeat(self.views)
        for first in range(0, count, size):
            rows = slice(first, min(first + size, count))
            block = memory[: rows.stop - first]
            torch.mm(z[rows], z.t(), out=block).div_(self.temperature)
            if kind is not None:
                equal = kind[rows, None] == kind
                block.masked_fill_(equal.logical_and_(own[rows, None] != own), float("-inf"))
            block.diagonal(first).fill_(float("-inf"))
            yield rows, block


class _Denominator(torch.autograd.Function):
    """The logarithm of Eq. 9's denominator for every row: t_i = log Σ_j exp S_ij, [VC, F] to [VC]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, similarity: _Similarity) -> Tensor:
        ctx.similarity = similarity
        total = z.new_empty(len(z))
        for rows, block in similarity.blocks(z):
            torch.logsumexp(block, -1, out=total[rows])
        ctx.save_for_backward(z, total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        z, total = ctx.saved_tensors
        return _DenominatorGradient.apply(z, total, gradient, ctx.similarity), None


class _DenominatorGradient(torch.autograd.Function):
    """The gradient of Σ_i g_i t_i w.r.t. z: y_k = Σ_j a_kj z_j + Σ_i a_ik z_i, [VC, F].

    P_ij = exp(S_ij - t_i) and a_ij = P_ij g_i / τ. Its own derivative for a cotangent w follows from
    Q_ij = w_i · z_j + w_j · z_i.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, total: Tensor, gradient: Tensor, similarity: _Similarity) -> Tensor:
        ctx.similarity = similarity
        ctx.save_for_backward(z, total, gradient)
        by_row, by_column, product = torch.empty_like(z), torch.zeros_like(z), torch.empty_like(z)
        for rows, block in similarity.blocks(z):
            weight = _softmax(block, total[rows]).mul_(gradient[rows, None] / similarity.temperature)
            torch.mm(weight, z, out=by_row[rows])
            by_column += torch.mm(weight.t(), z[rows], out=product)
        return by_row.add_(by_column)

    @staticmethod
    def backward(ctx: Any, w: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        if torch.is_grad_enabled():  # `once_differentiable` would silently leave out terms
            raise RuntimeError("CPT has no third derivatives: take its second derivatives without create_graph")
        z, total, gradient = ctx.saved_tensors
        temperature = ctx.similarity.temperature
        by_z, by_total, by_gradient = torch.zeros_like(z), torch.empty_like(total), torch.empty_like(gradient)
        left, right = torch.cat([w, z], 1), torch.cat([z, w], 1)
        memory = None
        for rows, block in ctx.similarity.blocks(z):
            memory = torch.empty_like(block) if memory is None else memory
            weight = _softmax(block, total[rows]).div_(temperature)
            q = torch.mm(left[rows], right.t(), out=memory[: len(block)])
            torch.linalg.vecdot(weight, q, out=by_gradient[rows])
            weight.mul_(gradient[rows, None])  # a
            by_z[rows].addmm_(weight, w)
            by_z.addmm_(weight.t(), w[rows])
            q.mul_(weight)
            torch.sum(q, -1, out=by_total[rows]).neg_()
            q.div_(temperature)
            by_z[rows].addmm_(q, z)
            by_z.addmm_(q.t(), z[rows])
        return by_z, by_total, by_gradient, None


def _softmax(block: Tensor, total: Tensor) -> Tensor:
    """P of a block of S [n, VC] with the logarithms of its rows' denominators [n], in place."""
    return block.sub_(total[:, None]).exp_()


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
