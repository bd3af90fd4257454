"""CoCoOp: a meta-network adds an image-dependent vector to every context vector.

Each image therefore has its own class vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import PROMPT_ALONE, Config, TrainConfig
from selftpt.losses import Head, cross_entropy, project
from selftpt.methods.method import FitContext, FittedMethod, Method, PredictFunction
from selftpt.models import Model
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.progress import Bar
from selftpt.prompt import initial_context
from selftpt.training import Losses, State, Training

REDUCTION = 16  # hidden width of the meta-network: D // 16


@dataclass(frozen=True)
class CocoopConfig(Config):
    """CoCoOp's configuration. The defaults are those of the authors' scripts."""

    learn: TrainConfig = field(default_factory=lambda: TrainConfig(batch=1))


def initial_meta_net(dimension: int, width: int, generator: torch.Generator) -> Head:
    """Initialise CoCoOp's meta-network, D -> D // 16 -> d, like `torch.nn.Linear`.

    Weights and biases are uniform within ±1 / sqrt(fan_in).

    Args:
        dimension: Dimension of the image features, D.
        width: Width of the text tower, d.
        generator: The random generator.

    Returns:
        The meta-network, with `w1` [D // 16, D], `b1` [D // 16], `w2` [d, D // 16] and `b2` [d].
    """
    hidden = max(1, dimension // REDUCTION)
    shapes = ((hidden, dimension), (hidden,), (width, hidden), (width,))
    bounds = (dimension**-0.5, dimension**-0.5, hidden**-0.5, hidden**-0.5)
    drawn = (
        torch.empty(shape).uniform_(-bound, bound, generator=generator)
        for shape, bound in zip(shapes, bounds, strict=True)
    )
    return Head(*drawn)


def image_prompts(image_features: Tensor, context: Tensor, meta_net: Head) -> Tensor:
    """Compute the prompt of each image, v_m(x) = v_m + h(x).

    Args:
        image_features: L2-normalised image features x, [B, D].
        context: The context v, [M, d].
        meta_net: The meta-network h.

    Returns:
        Prompts, [B, M, d].
    """
    return context + project(image_features, meta_net, normalize=False)[:, None]


def gradients(
    encoder: TextEncoder, parameters: Sequence[Tensor], image_features: Tensor, labels: Tensor, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Compute the mean cross-entropy of a batch and its gradients. Each image has its own prompt.

    All classes are encoded once per image, one image at a time.

    Args:
        encoder: The encoder of the class names.
        parameters: The context [M, d] and the tensors of the meta-network.
        image_features: L2-normalised image features, [B, D].
        labels: Class indices, [B].
        scale: Logit scale, 1 / τ.

    Returns:
        The mean loss, and its gradient w.r.t. each of `parameters`.
    """
    context, *meta_net = (parameter.detach().requires_grad_() for parameter in parameters)
    prompts = image_prompts(image_features, context, Head(*meta_net))

    def image_gradient(prompt: Tensor, image: Tensor, label: Tensor) -> tuple[Tensor, list[Tensor]]:
        return prompt_gradient(
            encoder, prompt, lambda classes: cross_entropy(image[None], classes[0], label[None], scale)
        )

    results = [image_gradient(*inputs) for inputs in zip(prompts.detach(), image_features, labels, strict=True)]
    prompt_gradients = torch.stack([gradient for _, (gradient,) in results]) / len(image_features)
    loss = torch.stack([value for value, _ in results]).mean()
    return loss, list(torch.autograd.grad(prompts, [context, *meta_net], prompt_gradients))


def class_encoder(model: Model, names: Sequence[str], config: TrainConfig) -> TextEncoder:
    """Make the text encoder of the class names in the end view."""
    tokens = class_tokens(model.text.tokenizer, names, config.length, PROMPT_ALONE)
    return TextEncoder(model.text, tokens, config.length, ["end"], chunk=config.chunk)


def train(fit_context: FitContext, config: CocoopConfig) -> Training:
    """Prepare the training of the context and the meta-network."""
    model, learn = fit_context.model, config.learn
    features, labels = fit_context.features(learn)
    generator = torch.Generator().manual_seed(learn.seed)
    context = initial_context(model, learn.length, learn.words, generator)
    meta_net = initial_meta_net(model.dimension, model.text.width, generator)
    state = State.sgd([tensor.to(model.device) for tensor in (context, *meta_net)], learn)
    encoder = class_encoder(model, fit_context.source.names, learn)

    def step(chosen: Tensor, epoch: int, _number: int) -> tuple[Losses, Sequence[Tensor]]:
        crops = features[chosen, epoch % features.shape[1]].to(model.device)
        loss, values = gradients(encoder, state.parameters, crops, labels[chosen].to(model.device), model.scale)
        return {"ce": loss.item()}, values

    return Training(("context", *Head._fields), state, step, len(labels), learn)


def predictor(fitted: FittedMethod, names: Sequence[str], _template: str) -> PredictFunction:
    """Return a function from image features [N, 1, D] to probabilities [N, C]. Each image has its own class vectors."""
    model, tensors = fitted.model, fitted.on_device()
    meta_net = Head(*(tensors[name] for name in Head._fields))
    encoder = class_encoder(model, names, fitted.config.learn)

    @torch.no_grad()
    def probabilities(views: Tensor) -> Tensor:
        images = views[:, 0].to(model.device)
        results = []
        with Bar("predicting", len(images)) as bar:
            for image, prompt in zip(images, image_prompts(images, tensors["context"], meta_net), strict=True):
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
    extra_cost=cost,
)
