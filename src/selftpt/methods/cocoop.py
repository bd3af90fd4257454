"""CoCoOp: a small network shifts the prompt depending on the image, so each image has its own class vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import PROMPT_ALONE, Config, TrainConfig
from selftpt.losses import Head, cross_entropy, project
from selftpt.methods.method import FitContext, FittedMethod, Method, Probabilities
from selftpt.models import Model
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.progress import Bar
from selftpt.prompt import initial_context
from selftpt.training import Losses, State, Training

NARROWING = 16  # the feature dimension divided by the width of the hidden layer


@dataclass(frozen=True)
class CocoopConfig(Config):
    """CoCoOp's settings, as in the authors' scripts."""

    learn: TrainConfig = field(default_factory=lambda: TrainConfig(batch=1))


def initial_network(dimension: int, width: int, generator: torch.Generator) -> Head:
    """Initialise the network D -> D / 16 -> d as PyTorch initialises linear layers.

    Weights and biases are uniform within ± 1 / √(inputs of the layer).

    Args:
        dimension: Dimension of the image features, D.
        width: Width of the text tower, d.
        generator: The random generator.
    """
    hidden = max(1, dimension // NARROWING)
    shapes = ((hidden, dimension), (hidden,), (width, hidden), (width,))
    bounds = (dimension**-0.5, dimension**-0.5, hidden**-0.5, hidden**-0.5)
    drawn = (
        torch.empty(shape).uniform_(-bound, bound, generator=generator)
        for shape, bound in zip(shapes, bounds, strict=True)
    )
    return Head(*drawn)


def prompts_of(images: Tensor, context: Tensor, network: Head) -> Tensor:
    """Compute the prompt of each image, v_m(x) = v_m + h(x).

    Args:
        images: L2-normalised image features x, [B, D].
        context: The context v, [M, d].
        network: The network h.

    Returns:
        Prompts, [B, M, d].
    """
    return context + project(images, network, normalize=False)[:, None]


def gradients(
    encoder: TextEncoder, parameters: Sequence[Tensor], images: Tensor, labels: Tensor, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Compute the cross-entropy of images, each with its own prompt, and its gradients.

    All classes are encoded once per image, one image at a time.

    Args:
        encoder: The encoder of the class names.
        parameters: The context [M, d] and the tensors of the network.
        images: L2-normalised image features, [B, D].
        labels: [B].
        scale: 1 / τ.

    Returns:
        The mean loss, and its gradient w.r.t. each of `parameters`.
    """
    context, *network = (parameter.detach().requires_grad_() for parameter in parameters)
    prompts = prompts_of(images, context, Head(*network))

    def image_gradient(prompt: Tensor, image: Tensor, label: Tensor) -> tuple[Tensor, list[Tensor]]:
        return prompt_gradient(
            encoder, prompt, lambda classes: cross_entropy(image[None], classes[0], label[None], scale)
        )

    results = [image_gradient(*inputs) for inputs in zip(prompts.detach(), images, labels, strict=True)]
    prompt_gradients = torch.stack([gradient for _, (gradient,) in results]) / len(images)
    loss = torch.stack([value for value, _ in results]).mean()
    return loss, list(torch.autograd.grad(prompts, [context, *network], prompt_gradients))


def encoder_of(model: Model, names: Sequence[str], config: TrainConfig) -> TextEncoder:
    """Make the encoder of class names."""
    tokens = class_tokens(model.text.tokenizer, names, config.length, PROMPT_ALONE)
    return TextEncoder(model.text, tokens, config.length, ["end"], chunk=config.chunk)


def train(context: FitContext, config: CocoopConfig) -> Training:
    """Prepare the training of the context and the network."""
    model, learn = context.model, config.learn
    features, labels = context.features(learn)
    generator = torch.Generator().manual_seed(learn.seed)
    initial = initial_context(model, learn.length, learn.words, generator)
    network = initial_network(model.dimension, model.text.width, generator)
    state = State.sgd([tensor.to(model.device) for tensor in (initial, *network)], learn)
    encoder = encoder_of(model, context.source.names, learn)

    def step(chosen: Tensor, epoch: int, _number: int) -> tuple[Losses, Sequence[Tensor]]:
        crops = features[chosen, epoch % features.shape[1]].to(model.device)
        loss, values = gradients(encoder, state.parameters, crops, labels[chosen].to(model.device), model.scale)
        return {"ce": loss.item()}, values

    return Training(("context", *Head._fields), state, step, len(labels), learn)


def predictor(fitted: FittedMethod, names: Sequence[str], _template: str) -> Probabilities:
    """Make a function that computes class vectors for each image."""
    model, tensors = fitted.model, fitted.on_device()
    network = Head(*(tensors[name] for name in Head._fields))
    encoder = encoder_of(model, names, fitted.config.learn)

    @torch.no_grad()
    def probabilities(views: Tensor) -> Tensor:
        images = views[:, 0].to(model.device)
        results = []
        with Bar("prompts of images", len(images)) as bar:
            for image, prompt in zip(images, prompts_of(images, tensors["context"], network), strict=True):
                results.append((model.scale * F.normalize(encoder(prompt)[0], dim=-1) @ image).softmax(-1))
                bar.step()
        return torch.stack(results)

    return probabilities


def cost(_config: CocoopConfig) -> str:
    return "text encoding of all class names"


COCOOP = Method(
    "cocoop",
    CocoopConfig(),
    predictor,
    train,
    tensors={"context": "M d", "w1": "E D", "b1": "E", "w2": "d E", "b2": "d"},
    more_cost=cost,
)
