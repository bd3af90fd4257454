"""Reference implementation of CoCoOp from its equations: one prompt per image, which encodes all classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference


def prompt_of(image: Tensor, context: Tensor, network: Sequence[Tensor]) -> Tensor:
    """Add the meta-network's output for an image [D] to each context vector [M, d]."""
    w1, b1, w2, b2 = network
    hidden = []
    for row, bias in zip(w1, b1, strict=True):
        value = sum(a * x for a, x in zip(row, image, strict=True)) + bias
        hidden.append(value if value > 0 else value * 0)
    shift = w2 @ torch.stack(hidden) + b2
    return torch.stack([vector + shift for vector in context])


def probabilities(
    small: Small, names: Sequence[str], parameters: Sequence[Tensor], images: Tensor, tau: float
) -> Tensor:
    """Return the probabilities [B, C] of images [B, D]."""
    context, *network = parameters
    rows = []
    for image in images:
        classes = reference.encode(small, "end", names, prompt_of(image, context, network))
        rows.append(reference.probabilities(image[None], classes, tau)[0])
    return torch.stack(rows)


def loss(
    small: Small, names: Sequence[str], parameters: Sequence[Tensor], images: Tensor, labels: Tensor, tau: float
) -> Tensor:
    """Return the mean of -log p of the correct class."""
    p = probabilities(small, names, parameters, images, tau)
    return -sum(torch.log(p[i, label]) for i, label in enumerate(labels.tolist())) / len(labels)


def gradients(
    small: Small, names: Sequence[str], parameters: Sequence[Tensor], images: Tensor, labels: Tensor, tau: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and its gradients w.r.t. context and network, by a single backward pass."""
    parameters = [p.detach().clone().requires_grad_() for p in parameters]
    value = loss(small, names, parameters, images, labels, tau)
    return value.detach(), list(torch.autograd.grad(value, parameters))
