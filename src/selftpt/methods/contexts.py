"""Training of context vectors with a loss on class features, shared by CoOp-like methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import TrainConfig, View
from selftpt.methods.method import FitContext
from selftpt.models import Model
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import ClassTokens
from selftpt.objective import Batch, prompt_gradient
from selftpt.prompt import initial_context
from selftpt.training import Losses, State, Training

ClassLoss = Callable[[Tensor, Batch], Tensor]  # (class features [C, D], not normalised; a batch of images) -> loss


def context_training(
    fit_context: FitContext,
    tokens: ClassTokens,
    views: dict[str, View],
    config: TrainConfig,
    loss: ClassLoss,
) -> Training:
    """Prepare a training run that learns one context [M, d] for each view.

    Args:
        fit_context: The model and the training images.
        tokens: The tokenised class names.
        views: Maps the name of each learned context to its view.
        config: The configuration.
        loss: Maps the class features [C, D] of one view and a batch to the loss that is minimised w.r.t. the context of
            that view.

    Returns:
        The training run. Its log has the loss as "loss", or as "loss_NAME" for each of several contexts.
    """
    model = fit_context.model
    features, labels = fit_context.features(config)
    generator = torch.Generator().manual_seed(config.seed)
    contexts = [initial_context(model, config.length, config.words, generator).to(model.device) for _ in views]
    encoders = [TextEncoder(model.text, tokens, config.length, [view], chunk=config.chunk) for view in views.values()]

    def step(chosen: Tensor, epoch: int, _number: int) -> tuple[Losses, Sequence[Tensor]]:
        crops = features[chosen, epoch % features.shape[1]]
        batch = Batch(crops.to(model.device), labels[chosen].to(model.device), model.scale)
        losses: dict[str, float] = {}
        gradients = []
        for name, encoder, prompt in zip(views, encoders, contexts, strict=True):
            value, (gradient,) = prompt_gradient(encoder, prompt, lambda features: loss(features[0], batch))
            losses["loss" if len(views) == 1 else f"loss_{name}"] = value.item()
            gradients.append(gradient)
        return losses, gradients

    return Training(list(views), State.sgd(contexts, config), step, len(labels), config)


@torch.no_grad()
def class_vectors(model: Model, tokens: ClassTokens, context: Tensor, view: View, chunk: int | None) -> Tensor:
    """Compute the class vectors of a context in one view.

    Args:
        model: The frozen model.
        tokens: The tokenised class names, C of them.
        context: The context, [M, d].
        view: The view.
        chunk: Number of classes encoded at once; None encodes all at once.

    Returns:
        L2-normalised class vectors, [C, D].
    """
    encoder = TextEncoder(model.text, tokens, len(context), [view], chunk=chunk)
    return F.normalize(encoder(context.to(model.device))[0], dim=-1)
