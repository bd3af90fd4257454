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
        losses: The losses by name, and the cosine between the gradients of cross-entropy and CPT.
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
    """Compute the sum of the three losses of stage 1 and its gradient w.r.t. prompt and head (Algorithm 1).

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
        return Step({"ce": ce.item()}, config.ce * grad_ce, [torch.zeros_like(t) for t in head], average)
    contrast = task.cpt_loss(features, head)
    (grad_cpt,) = torch.autograd.grad(contrast, p, retain_graph=True, create_graph=config.gm > 0)
    matching = gradient_matching(average, grad_cpt, config.matching)
    total = config.ce * ce + config.cpt * contrast
    if config.gm > 0:
        total = total + config.gm * matching
    grad_prompt, *grad_head = torch.autograd.grad(total, [p, *head])
    return Step(_losses(ce, contrast, matching, grad_ce, grad_cpt), grad_prompt, grad_head, average)


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
        return Step({"ce": ce.item()}, config.ce * grad_ce, [torch.zeros_like(t) for t in head], average)
    contrast = task.cpt_loss(features, head)
    u, *u_head = torch.autograd.grad(contrast, [features, *head], create_graph=config.gm > 0)
    grad_ce, grad_cpt = task.encoder.vjp(prompt, u_ce, u.detach())
    average = moving_average(average, grad_ce, config.decay)
    grad_prompt = config.ce * grad_ce + config.cpt * grad_cpt
    grad_head = [config.cpt * t.detach() for t in u_head]
    matching = gradient_matching(average, grad_cpt.requires_grad_(), config.matching)
    if config.gm > 0:
        (v,) = torch.autograd.grad(matching, grad_cpt)
        product, jvp = task.encoder.hvp(prompt, u, v)
        w, *w_head = torch.autograd.grad((u * jvp).sum(), [features, *head])
        grad_prompt = grad_prompt + config.gm * (product + task.encoder.vjp(prompt, w)[0])
        grad_head = [t + config.gm * s for t, s in zip(grad_head, w_head, strict=True)]
    return Step(_losses(ce, contrast, matching, grad_ce, grad_cpt), grad_prompt.detach(), grad_head, average)


def _losses(ce: Tensor, contrast: Tensor, matching: Tensor, grad_ce: Tensor, grad_cpt: Tensor) -> dict[str, float]:
    values = {"ce": ce, "cpt": contrast, "gm": matching, "cosine": cosine(grad_ce, grad_cpt)}
    return {name: value.item() for name, value in values.items()}
