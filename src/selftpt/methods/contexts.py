"""Context vectors that descend a loss of the class features: what methods of CoOp's family share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import TrainConfig, View
from selftpt.models import Model
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import ClassTokens
from selftpt.objective import Batch, prompt_gradient
from selftpt.prompt import initial_context
from selftpt.training import Losses, RunFiles, State, train

ClassLoss = Callable[[Tensor, Batch], Tensor]  # class features [C, D], of any length, and pictures


def learn_contexts(
    model: Model,
    tokens: ClassTokens,
    views: Sequence[View],
    features: Tensor,
    labels: Tensor,
    config: TrainConfig,
    files: RunFiles,
    loss: ClassLoss,
) -> list[Tensor]:
    """For each view a context [M, d] of its own, which descends `loss` of that view's class features alone.

    features: [N, crops, D], unit features of crops of each picture, which the epochs take in turn; labels: [N].
    """
    generator = torch.Generator().manual_seed(config.seed)
    contexts = [initial_context(model, config.length, config.words, generator).to(model.device) for _ in views]
    encoders = [TextEncoder(model.text, tokens, config.length, [view], chunk=config.chunk) for view in views]
    state = State.sgd(contexts, config)

    def step(chosen: Tensor, epoch: int, _number: int) -> tuple[Losses, Sequence[Tensor]]:
        crops = features[chosen, epoch % features.shape[1]]
        batch = Batch(crops.to(model.device), labels[chosen].to(model.device), model.scale)
        losses: dict[str, float] = {}
        gradients = []
        for view, encoder, context in zip(views, encoders, contexts, strict=True):
            value, (gradient,) = prompt_gradient(encoder, context, lambda classes: loss(classes[0], batch))
            losses[view] = value.item()
            gradients.append(gradient)
        return losses, gradients

    train(state, step, len(labels), config, files)
    return contexts


@torch.no_grad()
def class_vectors(model: Model, tokens: ClassTokens, context: Tensor, view: View, chunk: int | None) -> Tensor:
    """The unit class vectors [C, D] under a context [M, d] in one view."""
    encoder = TextEncoder(model.text, tokens, len(context), [view], chunk=chunk)
    return F.normalize(encoder(context.to(model.device))[0], dim=-1)
