"""Cross-entropy, contrastive prompt tuning and gradient matching: pure functions of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from selftpt.settings import Matching, Reduction


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

    flat = z.flatten(0, 1)
    index = torch.arange(len(flat), device=z.device)

    def denominator(chosen: Tensor) -> Tensor:
        similarity = flat[chosen] @ flat.t() / temperature
        left_out = chosen[:, None] == index
        if same is not None:
            kind, own = same.repeat(views), index % classes
            left_out = left_out | ((kind[chosen][:, None] == kind) & (own[chosen][:, None] != own))
        return similarity.masked_fill(left_out, float("-inf")).logsumexp(-1)

    blocks = index.split(max(64, held // len(flat)))
    if len(blocks) == 1:
        total = denominator(index)
    else:
        total = torch.cat([checkpoint(denominator, block, use_reentrant=False) for block in blocks])
    terms = total - positive
    return terms.mean() if reduction == "mean" else terms.sum()


def moving_average(average: Tensor | None, gradient: Tensor, decay: float) -> Tensor:
    """Eq. 11 by its recursion: the first gradient as it is, then α · average + (1 - α) · gradient."""
    return gradient if average is None else decay * average + (1 - decay) * gradient


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Eq. 10: the cosine between two gradients of one shape."""
    return F.cosine_similarity(a.flatten(), b.flatten(), dim=0)


def gradient_matching(target: Tensor, gradient: Tensor, kind: Matching = "cosine") -> Tensor:
    """Eq. 12: 1 - cos(target, gradient); or the mean squared difference of the paper's ablation.

    target: the (averaged) gradient of the cross-entropy, a constant; gradient: of CPT, with a graph. Both [M, d].
    """
    return 1 - cosine(target, gradient) if kind == "cosine" else F.mse_loss(gradient, target)
