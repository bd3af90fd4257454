"""The objectives of stages 1 and 2, and their gradients w.r.t. prompt and head.

If all classes are encoded at once, the gradients come from autograd. If the class list is split into chunks, the graph
of all classes never exists at once: the features are computed without a graph, the losses are differentiated w.r.t. the
features, and vector-Jacobian products are computed chunk by chunk.

Gradient matching also needs H v, the Hessian-vector product of CPT w.r.t. the prompt. Let f be the features, J their
Jacobian w.r.t. the prompt, and u and H_f the gradient and the Hessian of CPT w.r.t. f. Then
H v = (Σ_i u_i ∇²f_i) v + Jᵀ H_f J v.

Equation numbers refer to the Self-TPT paper (Efficient Test-Time Prompt Tuning for Vision-Language Models).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selftpt.config import ContrastConfig, LearnConfig
from selftpt.losses import Head, cosine, cpt, cross_entropy, gradient_matching, moving_average, project
from selftpt.models.text import TextEncoder


@dataclass(frozen=True)
class Task:
    """A class list: its text encoder, hand-crafted features and CPT configuration.

    Attributes:
        encoder: Encodes the classes in the learned views; `end` is the first view if cross-entropy is computed.
        hand_crafted: Text features of the hand-crafted view, [C, D]; None if CPT does not use that view.
        name_ids: Name index of each class, [C]. Classes with equal names have equal indices.
        contrast: The configuration of CPT.
    """

    encoder: TextEncoder
    hand_crafted: Tensor | None
    name_ids: Tensor
    contrast: ContrastConfig

    def cpt_loss(self, features: Tensor, head: Head) -> Tensor:
        """Compute the CPT loss (Eq. 9).

        Args:
            features: Text features from the encoder, [V, C, D].
            head: The projection head.

        Returns:
            The loss, a scalar.
        """
        views: dict[str, Tensor] = dict(zip(self.encoder.views, features, strict=True))
        if self.hand_crafted is not None:
            views["hand_crafted"] = self.hand_crafted
        c = self.contrast
        z = torch.stack([project(views[view], head, c.normalize) for view in c.views])
        return cpt(z, None if c.duplicates_as_negatives else self.name_ids, c.temperature, c.reduction)


class Batch(NamedTuple):
    """Image features and labels of a batch of source images.

    Attributes:
        image_features: L2-normalised image features, [B, D].
        labels: Class indices, [B].
        scale: Logit scale, 1 / τ of Eq. 1.
    """

    image_features: Tensor
    labels: Tensor
    scale: float


class Step(NamedTuple):
    """The losses and gradients of one step.

    Attributes:
        losses: The losses by name; the cosine between the gradients of cross-entropy and CPT; and, as `grad_ce`,
            `grad_cpt` and `grad_gm`, the norm of each loss's weighted gradient w.r.t. the prompt.
        prompt_gradient: The gradient w.r.t. the prompt, [M, d].
        head_gradients: The gradient w.r.t. each tensor of the head.
        average_gradient: The moving average of the gradient of cross-entropy w.r.t. the prompt, [M, d].
    """

    losses: dict[str, float]
    prompt_gradient: Tensor
    head_gradients: list[Tensor]
    average_gradient: Tensor


def prompt_gradient(
    encoder: TextEncoder, prompt: Tensor, loss: Callable[[Tensor], Tensor], parameters: Sequence[Tensor] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Compute a loss of text features and its gradients.

    A class list longer than the encoder's chunk size is differentiated chunk by chunk, with bounded memory.

    Args:
        encoder: Encodes the class list.
        prompt: Prompt vectors, [M, d].
        loss: Maps text features [V, C, D] to a scalar.
        parameters: Other tensors that the loss depends on. As a side effect, their `requires_grad` becomes true.

    Returns:
        The loss, and its gradients w.r.t. the prompt and each of `parameters`.
    """
    parameters = list(parameters)
    for parameter in parameters:
        parameter.requires_grad_()
    if encoder.single_pass:
        p = prompt.detach().requires_grad_()
        value = loss(encoder(p))
        return value.detach(), list(torch.autograd.grad(value, [p, *parameters]))
    with torch.no_grad():
        features = encoder(prompt)
    features.requires_grad_()
    value = loss(features)
    u, *parameter_gradients = torch.autograd.grad(value, [features, *parameters])
    return value.detach(), [*encoder.vjp(prompt, u), *parameter_gradients]


def contrast_step(task: Task, prompt: Tensor, head: Head) -> tuple[float, Tensor]:
    """Compute CPT, the objective of stage 2, and its gradient w.r.t. the prompt.

    Args:
        task: The class list.
        prompt: Prompt vectors, [M, d].
        head: The projection head, which is not tuned.

    Returns:
        The loss, and its gradient w.r.t. the prompt, [M, d].
    """
    loss, (gradient,) = prompt_gradient(task.encoder, prompt, lambda features: task.cpt_loss(features, head))
    return loss.item(), gradient


def joint_step(
    task: Task, prompt: Tensor, head: Head, batch: Batch, average: Tensor | None, config: LearnConfig
) -> Step:
    """Compute the three losses of stage 1, and the gradient of their weighted sum w.r.t. prompt and head (Algorithm 1).

    The moving average is a constant target: gradient matching is differentiated only through the gradient of CPT.

    Args:
        task: The class list.
        prompt: Prompt vectors, [M, d].
        head: The projection head.
        batch: The images of the step.
        average: The moving average of the previous step; None in the first step.
        config: The weights of the losses and the options of gradient matching.

    Returns:
        The losses, the gradients w.r.t. prompt and head, and the new moving average.
    """
    step = _single_pass_step if task.encoder.single_pass else _chunked_step
    return step(task, prompt.detach(), Head(*(t.detach().requires_grad_() for t in head)), batch, average, config)


def _single_pass_step(
    task: Task, prompt: Tensor, head: Head, batch: Batch, average: Tensor | None, config: LearnConfig
) -> Step:
    p = prompt.requires_grad_()
    features = task.encoder(p)
    ce = cross_entropy(batch.image_features, features[0], batch.labels, batch.scale)
    (grad_ce,) = torch.autograd.grad(ce, p, retain_graph=True)
    average = moving_average(average, grad_ce, config.decay)
    if not config.contrasts:
        return _cross_entropy_step(ce, grad_ce, head, average, config)
    contrast = task.cpt_loss(features, head)
    by_cpt = torch.autograd.grad(contrast, [p, *head], retain_graph=True, create_graph=config.gm > 0)
    matching = _matching(average, by_cpt[0], config)
    by_gm = torch.autograd.grad(matching, [p, *head]) if config.gm > 0 else None
    losses = {"ce": ce, "cpt": contrast, "gm": matching, "cosine": cosine(grad_ce, by_cpt[0])}
    return _weighted_step(losses, grad_ce, [t.detach() for t in by_cpt], by_gm, average, config)


def _chunked_step(
    task: Task, prompt: Tensor, head: Head, batch: Batch, average: Tensor | None, config: LearnConfig
) -> Step:
    with torch.no_grad():
        features = task.encoder(prompt)
    features.requires_grad_()
    ce = cross_entropy(batch.image_features, features[0], batch.labels, batch.scale)
    (u_ce,) = torch.autograd.grad(ce, features)
    if not config.contrasts:
        (grad_ce,) = task.encoder.vjp(prompt, u_ce)
        average = moving_average(average, grad_ce, config.decay)
        return _cross_entropy_step(ce, grad_ce, head, average, config)
    contrast = task.cpt_loss(features, head)
    u, *u_head = torch.autograd.grad(contrast, [features, *head], create_graph=config.gm > 0)
    grad_ce, grad_cpt = task.encoder.vjp(prompt, u_ce, u.detach())
    average = moving_average(average, grad_ce, config.decay)
    matching = _matching(average, grad_cpt.requires_grad_(), config)
    by_gm = None
    if config.gm > 0:
        (v,) = torch.autograd.grad(matching, grad_cpt)
        product, jvp = task.encoder.hvp(prompt, u, v)
        w, *w_head = torch.autograd.grad((u * jvp).sum(), [features, *head])
        by_gm = [product + task.encoder.vjp(prompt, w)[0], *w_head]
    losses = {"ce": ce, "cpt": contrast, "gm": matching, "cosine": cosine(grad_ce, grad_cpt)}
    return _weighted_step(losses, grad_ce, [t.detach() for t in (grad_cpt, *u_head)], by_gm, average, config)


def _matching(average: Tensor, grad_cpt: Tensor, config: LearnConfig) -> Tensor:
    floor = config.guard_ratio if config.guard == "floor" else 0.0
    return gradient_matching(average, grad_cpt, config.matching, floor)


def _cross_entropy_step(ce: Tensor, grad_ce: Tensor, head: Head, average: Tensor, config: LearnConfig) -> Step:
    gradient = config.ce * grad_ce
    losses = {"ce": ce.item(), "grad_ce": gradient.norm().item()}
    return Step(losses, gradient, [torch.zeros_like(t) for t in head], average)


def _weighted_step(
    losses: Mapping[str, Tensor],
    grad_ce: Tensor,
    by_cpt: Sequence[Tensor],
    by_gm: Sequence[Tensor] | None,
    average: Tensor,
    config: LearnConfig,
) -> Step:
    """Add the weighted gradients of the three losses, under the guard of the configuration.

    Args:
        losses: The losses, for the log.
        grad_ce: The gradient of cross-entropy w.r.t. the prompt, [M, d]; it does not depend on the head.
        by_cpt: The gradients of CPT w.r.t. the prompt and each tensor of the head.
        by_gm: The same of gradient matching; None if its weight is 0.
        average: The moving average of `grad_ce`, [M, d].
        config: The weights and the guard.
    """
    scale_cpt, scale_gm = _guard(grad_ce, by_cpt[0], None if by_gm is None else by_gm[0], average, config)
    parts = {"grad_ce": config.ce * grad_ce, "grad_cpt": scale_cpt * by_cpt[0]}
    head = [scale_cpt * t for t in by_cpt[1:]]
    if by_gm is not None:
        parts["grad_gm"] = scale_gm * by_gm[0]
        head = [t + scale_gm * s for t, s in zip(head, by_gm[1:], strict=True)]
    values = {**losses, **{name: part.norm() for name, part in parts.items()}}
    gradient = torch.stack(list(parts.values())).sum(0)
    return Step({name: value.item() for name, value in values.items()}, gradient, head, average)


def _guard(
    grad_ce: Tensor, grad_cpt: Tensor, grad_gm: Tensor | None, average: Tensor, config: LearnConfig
) -> tuple[float, float]:
    """Return the factors of the gradients of CPT and gradient matching: their weights, changed by the guard.

    `floor` is part of the loss and changes nothing here. `limit` scales the gradient of gradient matching down so that
    its norm is at most `guard_ratio` times the norm of the sum of the other two weighted gradients. `normalize` scales
    the gradients of CPT and gradient matching to the norm of the cross-entropy gradient, before they are weighted.
    `gate` leaves gradient matching out while the norm of the CPT gradient is below `guard_ratio` times that of the
    moving average.
    """
    cpt, gm = config.cpt, config.gm
    if config.guard == "normalize":
        norm = grad_ce.norm()
        cpt = cpt * _ratio(norm, grad_cpt.norm())
        gm = gm if grad_gm is None else gm * _ratio(norm, grad_gm.norm())
    elif grad_gm is not None and config.guard == "limit":
        others = (config.ce * grad_ce + cpt * grad_cpt).norm()
        gm = min(gm, _ratio(config.guard_ratio * others, grad_gm.norm()))
    elif config.guard == "gate" and grad_cpt.norm() < config.guard_ratio * average.norm():
        gm = 0.0
    return cpt, gm


def _ratio(norm: Tensor, other: Tensor) -> float:
    return (norm / other).item() if other > 0 else 0.0
