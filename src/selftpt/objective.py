"""What the two stages minimise: the losses through the text tower, and their gradients w.r.t. prompt and head.

A class list that runs at once is plain autograd. A chunked one never holds the whole graph: features are computed
without one, the losses are differentiated w.r.t. the features, and vector-Jacobian products are taken chunk by chunk.
Gradient matching then needs H v, the second derivative of CPT along v: Σ u·∂²f·v + Jᵀ(H_loss J v).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selftpt.config import ContrastConfig, LearnConfig
from selftpt.losses import Head, cosine, cpt, cross_entropy, gradient_matching, moving_average, project
from selftpt.models.text import TextEncoder


@dataclass(frozen=True)
class Task:
    """A class list ready for the losses.

    encoder: its features in the learned views, of which `end` is the first if cross-entropy is asked for.
    hand_crafted: [C, D], its features in the hand-written sentence, or None if CPT does without.
    same: [C], equal for classes of equal names.
    """

    encoder: TextEncoder
    hand_crafted: Tensor | None
    same: Tensor
    contrast: ContrastConfig

    def cpt(self, features: Tensor, head: Head) -> Tensor:
        """Eq. 9 of the encoder's features [V, C, D]."""
        views: dict[str, Tensor] = dict(zip(self.encoder.views, features, strict=True))
        if self.hand_crafted is not None:
            views["hand_crafted"] = self.hand_crafted
        c = self.contrast
        z = torch.stack([project(views[view], head, c.normalize) for view in c.views])
        return cpt(z, None if c.duplicates_as_negatives else self.same, c.temperature, c.reduction)


class Batch(NamedTuple):
    """Source images: unit features [B, D], labels [B], and 1 / τ of Eq. 1."""

    images: Tensor
    labels: Tensor
    scale: float


class Step(NamedTuple):
    """One step's losses and gradients. `average` is the moving average of the gradient of cross-entropy, [M, d]."""

    losses: dict[str, float]
    prompt: Tensor
    head: list[Tensor]
    average: Tensor


def prompt_gradient(
    encoder: TextEncoder, prompt: Tensor, loss: Callable[[Tensor], Tensor], others: Sequence[Tensor] = ()
) -> tuple[Tensor, list[Tensor]]:
    """A loss of text features [V, C, D], and its gradient w.r.t. the prompt [M, d] and others that it depends on.

    A long class list runs in chunks, so that memory does not grow with it.
    """
    others = list(others)
    for other in others:
        other.requires_grad_()
    if encoder.unchunked:
        p = prompt.detach().requires_grad_()
        value = loss(encoder(p))
        return value.detach(), list(torch.autograd.grad(value, [p, *others]))
    with torch.no_grad():
        features = encoder(prompt)
    features.requires_grad_()
    value = loss(features)
    u, *by_others = torch.autograd.grad(value, [features, *others])
    return value.detach(), [*encoder.vjp(prompt, u), *by_others]


def contrast_step(task: Task, prompt: Tensor, head: Head) -> tuple[float, Tensor]:
    """Stage 2: CPT and its gradient w.r.t. the prompt, [M, d]."""
    loss, (gradient,) = prompt_gradient(task.encoder, prompt, lambda features: task.cpt(features, head))
    return loss.item(), gradient


def joint_step(
    task: Task, prompt: Tensor, head: Head, batch: Batch, average: Tensor | None, config: LearnConfig
) -> Step:
    """Stage 1: the three losses added, and their gradient w.r.t. prompt and head (Algorithm 1).

    The moving average is a constant target: gradient matching is differentiated through CPT alone.
    """
    step = _unchunked_step if task.encoder.unchunked else _chunked_step
    return step(task, prompt.detach(), Head(*(t.detach().requires_grad_() for t in head)), batch, average, config)


def _unchunked_step(
    task: Task, prompt: Tensor, head: Head, batch: Batch, average: Tensor | None, config: LearnConfig
) -> Step:
    p = prompt.requires_grad_()
    features = task.encoder(p)
    ce = cross_entropy(batch.images, features[0], batch.labels, batch.scale)
    (by_ce,) = torch.autograd.grad(ce, p, retain_graph=True)
    average = moving_average(average, by_ce, config.decay)
    if not config.contrasts:
        return Step({"ce": ce.item()}, config.ce * by_ce, [torch.zeros_like(t) for t in head], average)
    contrast = task.cpt(features, head)
    (by_cpt,) = torch.autograd.grad(contrast, p, retain_graph=True, create_graph=config.gm > 0)
    matching = gradient_matching(average, by_cpt, config.matching)
    total = config.ce * ce + config.cpt * contrast
    if config.gm > 0:
        total = total + config.gm * matching
    by_prompt, *by_head = torch.autograd.grad(total, [p, *head])
    return Step(_losses(ce, contrast, matching, by_ce, by_cpt), by_prompt, by_head, average)


def _chunked_step(
    task: Task, prompt: Tensor, head: Head, batch: Batch, average: Tensor | None, config: LearnConfig
) -> Step:
    with torch.no_grad():
        features = task.encoder(prompt)
    features.requires_grad_()
    ce = cross_entropy(batch.images, features[0], batch.labels, batch.scale)
    (u_ce,) = torch.autograd.grad(ce, features)
    if not config.contrasts:
        (by_ce,) = task.encoder.vjp(prompt, u_ce)
        average = moving_average(average, by_ce, config.decay)
        return Step({"ce": ce.item()}, config.ce * by_ce, [torch.zeros_like(t) for t in head], average)
    contrast = task.cpt(features, head)
    u, *u_head = torch.autograd.grad(contrast, [features, *head], create_graph=config.gm > 0)
    by_ce, by_cpt = task.encoder.vjp(prompt, u_ce, u.detach())
    average = moving_average(average, by_ce, config.decay)
    by_prompt = config.ce * by_ce + config.cpt * by_cpt
    by_head = [config.cpt * t.detach() for t in u_head]
    matching = gradient_matching(average, by_cpt.requires_grad_(), config.matching)
    if config.gm > 0:
        (v,) = torch.autograd.grad(matching, by_cpt)
        product, moved = task.encoder.hvp(prompt, u, v)
        w, *w_head = torch.autograd.grad((u * moved).sum(), [features, *head])
        by_prompt = by_prompt + config.gm * (product + task.encoder.vjp(prompt, w)[0])
        by_head = [t + config.gm * s for t, s in zip(by_head, w_head, strict=True)]
    return Step(_losses(ce, contrast, matching, by_ce, by_cpt), by_prompt.detach(), by_head, average)


def _losses(ce: Tensor, contrast: Tensor, matching: Tensor, by_ce: Tensor, by_cpt: Tensor) -> dict[str, float]:
    values = {"ce": ce, "cpt": contrast, "gm": matching, "cosine": cosine(by_ce, by_cpt)}
    return {name: value.item() for name, value in values.items()}
