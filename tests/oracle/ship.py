"""Reference implementation of SHIP: images and sentences are processed one by one, and AdamW is written out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum())


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.stack([(row * x).sum() + b for row, b in zip(weight, bias, strict=True)])


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def make(small: Small, parameters: Sequence[Tensor], z: Tensor, name: str) -> Tensor:
    """Return the L2-normalised feature [D] that the generator makes from z [D] for a class name."""
    context, inner, inner_bias, shift, shift_bias = parameters[0], *parameters[7:]
    bias = layer(relu(layer(z, inner, inner_bias)), shift, shift_bias)
    prompt = torch.stack([vector + bias for vector in context])
    return unit(reference.encode(small, "end", [name], prompt)[0])


def loss(
    small: Small, parameters: Sequence[Tensor], images: Tensor, noise: Tensor, names: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return squared error and KL divergence: sums over D, averaged over images [B, D]."""
    hidden, hidden_bias, mean, mean_bias, variance, variance_bias = parameters[1:7]
    error, divergence = torch.zeros(()), torch.zeros(())
    for x, e, name in zip(images, noise, names, strict=True):
        h = relu(layer(x, hidden, hidden_bias))
        mu, sigma = layer(h, mean, mean_bias), torch.exp(layer(h, variance, variance_bias) / 2)
        error = error + ((make(small, parameters, mu + sigma * e, name) - x) ** 2).sum()
        q, p = torch.distributions.Normal(mu, sigma), torch.distributions.Normal(torch.zeros_like(mu), 1.0)
        divergence = divergence + torch.distributions.kl_divergence(q, p).sum()
    return error / len(images), divergence / len(images)


def gradients(
    small: Small, parameters: Sequence[Tensor], images: Tensor, noise: Tensor, names: Sequence[str]
) -> list[Tensor]:
    """Return the gradients of the sum of both losses w.r.t. every tensor."""
    free = [tensor.clone().requires_grad_() for tensor in parameters]
    return list(torch.autograd.grad(sum(loss(small, free, images, noise, names)), free))


def adamw(
    parameters: list[Tensor], moments: list[tuple[Tensor, Tensor]], gradients: Sequence[Tensor], step: int, lr: float
) -> None:
    """Update the parameters in place with the default betas and weight decay 0.01; `step` counts from 1."""
    for p, (m, v), g in zip(parameters, moments, gradients, strict=True):
        m.mul_(0.9).add_(0.1 * g)
        v.mul_(0.999).add_(0.001 * g * g)
        p.sub_(lr * 0.01 * p)
        p.sub_(lr * (m / (1 - 0.9**step)) / (torch.sqrt(v / (1 - 0.999**step)) + 1e-8))
