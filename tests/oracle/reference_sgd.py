"""CoOp's optimisation written out: SGD with momentum and weight decay, warm-up epoch, cosine schedule, full batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Gradients = Callable[[Sequence[Tensor], Tensor, Tensor], Sequence[Tensor]]


def minimise(
    start: Sequence[Tensor],
    gradients: Gradients,
    features: Tensor,
    labels: Tensor,
    epochs: int,
    batch: int,
    lr: float,
    warmup: float,
    seed: int = 1,
) -> list[Tensor]:
    """Return the parameters after training on features [N, crops, D] and labels [N], in float64.

    The order of the images is drawn anew for each epoch.

    Args:
        gradients: Function of the parameters, images [B, D] and labels [B] that returns the gradients.
    """
    parameters = [p.double().clone() for p in start]
    momentum = [torch.zeros_like(p) for p in parameters]
    for epoch in range(epochs):
        rate = warmup if epoch == 0 else lr * (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed * 100_003 + epoch)).tolist()
        size = min(batch, len(order))
        for first in range(0, len(order) - size + 1, size):
            chosen = order[first : first + size]
            images = torch.stack([features[i, epoch % features.shape[1]] for i in chosen]).double()
            found = gradients(parameters, images, labels[chosen])
            for p, v, g in zip(parameters, momentum, found, strict=True):
                v.copy_(0.9 * v + g + 5e-4 * p)
                p.sub_(rate * v)
    return parameters
