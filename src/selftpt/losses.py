"""Cross-entropy, contrastive prompt tuning and gradient matching: pure functions of tensors.

Equation numbers refer to the Self-TPT paper (Efficient Test-Time Prompt Tuning for Vision-Language Models).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import Matching, Reduction


class Head(NamedTuple):
    """Parameters of a two-layer perceptron with a ReLU: Self-TPT's projection head h or CoCoOp's meta-network.

    D is the input width, E the hidden width and F the output width.

    Attributes:
        w1: Weights of the first layer, [E, D].
        b1: Bias of the first layer, [E].
        w2: Weights of the second layer, [F, E].
        b2: Bias of the second layer, [F].
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor


def project(features: Tensor, head: Head, normalize: bool = True) -> Tensor:
    """Apply the two-layer perceptron.

    Args:
        features: Text features, or image features for CoCoOp, [..., D].
        head: The parameters of the perceptron.
        normalize: Whether the result is L2-normalised.

    Returns:
        Projected features, [..., F].
    """
    z = F.linear(F.relu(F.linear(features, head.w1, head.b1)), head.w2, head.b2)
    return F.normalize(z, dim=-1) if normalize else z


def cross_entropy(image_features: Tensor, class_features: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Compute the cross-entropy of Eq. 3 with the probabilities of Eq. 1.

    Args:
        image_features: L2-normalised image features, [B, D].
        class_features: Text features of the classes, [C, D]; they need not be normalised.
        labels: Class indices, [B].
        scale: Logit scale, 1 / τ.

    Returns:
        The mean over the batch, a scalar.
    """
    return F.cross_entropy(scale * image_features @ F.normalize(class_features, dim=-1).t(), labels)


def cpt(
    z: Tensor,
    name_ids: Tensor | None = None,
    temperature: float = 0.07,
    reduction: Reduction = "mean",
    max_similarities: int = 1 << 20,
) -> Tensor:
    """Compute the contrastive prompt tuning loss of Eq. 9 over V views of C classes.

    The sum over positives is inside the logarithm. Memory is linear in C, also for first and second derivatives; third
    derivatives are not supported.

    Args:
        z: Projected text features, [V, C, F].
        name_ids: Name index of each class, [C]. Classes with equal indices are not negatives of each other. None makes
            all other classes negatives.
        temperature: τ.
        reduction: Mean or sum over the V·C terms.
        max_similarities: Approximate number of entries of the [VC, VC] similarity matrix in memory at once; a block has
            at least 64 rows. A larger matrix is computed in blocks of rows, which are recomputed in the backward
            passes.

    Returns:
        The loss, a scalar.
    """
    views, classes, _ = z.shape
    same_view = torch.eye(views, dtype=torch.bool, device=z.device)
    positive = torch.einsum("vcf,wcf->vcw", z, z) / temperature
    positive = positive.masked_fill(same_view[:, None], float("-inf")).logsumexp(-1).flatten()

    if name_ids is not None and len(name_ids.unique()) == classes:
        name_ids = None
    similarity = _Similarity(views, classes, name_ids, temperature, max_similarities)
    total: Tensor = _Denominator.apply(z.flatten(0, 1), similarity)
    terms = total - positive
    return terms.mean() if reduction == "mean" else terms.sum()


@dataclass(frozen=True)
class _Similarity:
    """S_ij = z_i · z_j / τ for all pairs of rows of z [VC, F]; -∞ if j = i or j is another class of equal name."""

    views: int
    classes: int
    name_ids: Tensor | None
    temperature: float
    max_similarities: int

    def blocks(self, z: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the row indices and the values of each block of rows of S, in order.

        Each block reuses the buffer of the previous one. The caller may modify a block in place.
        """
        count = len(z)
        size = min(max(64, self.max_similarities // count), count)
        memory = z.new_empty(size, count)
        index = torch.arange(self.classes, device=z.device).repeat(self.views)
        name_ids = None if self.name_ids is None else self.name_ids.repeat(self.views)
        for first in range(0, count, size):
            rows = slice(first, min(first + size, count))
            block = memory[: rows.stop - first]
            torch.mm(z[rows], z.t(), out=block).div_(self.temperature)
            if name_ids is not None:
                equal = name_ids[rows, None] == name_ids
                block.masked_fill_(equal.logical_and_(index[rows, None] != index), float("-inf"))
            block.diagonal(first).fill_(float("-inf"))
            yield rows, block


class _Denominator(torch.autograd.Function):
    """The logarithm of the denominator of Eq. 9 for every row: t_i = log Σ_j exp S_ij. Maps z [VC, F] to t [VC]."""

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

    P_ij = exp(S_ij - t_i) and a_ij = P_ij g_i / τ. The backward pass with cotangent w needs
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
        if torch.is_grad_enabled():  # `once_differentiable` would silently omit terms
            raise RuntimeError("CPT has no third derivatives: compute its second derivatives without create_graph")
        z, total, gradient = ctx.saved_tensors
        temperature = ctx.similarity.temperature
        grad_z, grad_total, grad_gradient = torch.zeros_like(z), torch.empty_like(total), torch.empty_like(gradient)
        left, right = torch.cat([w, z], 1), torch.cat([z, w], 1)
        memory = None
        for rows, block in ctx.similarity.blocks(z):
            memory = torch.empty_like(block) if memory is None else memory
            weight = _softmax(block, total[rows]).div_(temperature)
            q = torch.mm(left[rows], right.t(), out=memory[: len(block)])
            torch.linalg.vecdot(weight, q, out=grad_gradient[rows])
            weight.mul_(gradient[rows, None])  # a
            grad_z[rows].addmm_(weight, w)
            grad_z.addmm_(weight.t(), w[rows])
            q.mul_(weight)
            torch.sum(q, -1, out=grad_total[rows]).neg_()
            q.div_(temperature)
            grad_z[rows].addmm_(q, z)
            grad_z.addmm_(q.t(), z[rows])
        return grad_z, grad_total, grad_gradient, None


def _softmax(block: Tensor, total: Tensor) -> Tensor:
    """Compute P in place from a block of S [n, VC] and the logarithms t [n] of its denominators."""
    return block.sub_(total[:, None]).exp_()


def moving_average(average: Tensor | None, gradient: Tensor, decay: float) -> Tensor:
    """Update the exponential moving average of gradients (Eq. 11).

    Args:
        average: The average of the previous step; None in the first step.
        gradient: The gradient of this step, of the same shape.
        decay: α.

    Returns:
        The gradient itself in the first step, then α · average + (1 - α) · gradient.
    """
    return gradient if average is None else decay * average + (1 - decay) * gradient


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Compute the cosine between two gradients of the same shape (Eq. 10).

    Args:
        a: A gradient.
        b: Another gradient.

    Returns:
        The cosine, a scalar; 0 if either gradient is zero.
    """
    norms = a.norm() * b.norm()
    product = (a * b).sum()
    return product / norms if norms > 0 else product  # `product` is 0 here and keeps the graph


def gradient_matching(target: Tensor, gradient: Tensor, kind: Matching = "cosine", floor: float = 0.0) -> Tensor:
    """Compute the gradient matching loss: 1 - cosine (Eq. 12), or the mean squared error of the paper's ablation.

    Args:
        target: The averaged gradient of the cross-entropy, [M, d]; a constant.
        gradient: The gradient of CPT, [M, d], with an autograd graph.
        kind: "cosine" or "mse".
        floor: If the norm of `gradient` is below `floor` times that of `target`, the cosine is divided by the latter
            instead. The derivative w.r.t. `gradient` is then at most 1 / (floor · norm of `target`); with 0, as in the
            paper, it is unbounded.

    Returns:
        The loss, a scalar.
    """
    if kind == "mse":
        return F.mse_loss(gradient, target)
    smallest = floor * target.norm()
    if gradient.norm() < smallest:
        return 1 - (target * gradient).sum().div(target.norm() * smallest)
    return 1 - cosine(target, gradient)
