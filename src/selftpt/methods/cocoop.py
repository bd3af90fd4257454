"""CoCoOp: the prompt is moved by a small network that sees the picture, so that each picture has class vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import PROMPT_ALONE, TrainConfig
from selftpt.losses import Head, cross_entropy, project
from selftpt.methods.method import Fitted, Job, Method, Predictor
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.progress import Bar
from selftpt.prompt import initial_context
from selftpt.training import Losses, RunFiles, State, train

NARROWING = 16  # of the network's hidden layer, against the features


@dataclass(frozen=True)
class Settings:
    """As in the authors' scripts."""

    learn: TrainConfig = field(default_factory=lambda: TrainConfig(batch=1))


def initial_network(dimension: int, width: int, generator: torch.Generator) -> Head:
    """The meta-network D to D / 16 to d: all within ± 1 / √(inputs of the layer), as torch's linear layers start."""
    hidden = max(1, dimension // NARROWING)
    shapes = ((hidden, dimension), (hidden,), (width, hidden), (width,))
    bounds = (dimension**-0.5, dimension**-0.5, hidden**-0.5, hidden**-0.5)
    drawn = (
        torch.empty(shape).uniform_(-bound, bound, generator=generator)
        for shape, bound in zip(shapes, bounds, strict=True)
    )
    return Head(*drawn)


def prompts_of(images: Tensor, context: Tensor, network: Head) -> Tensor:
    """v_m(x) = v_m + h(x): unit image features [B, D] and the context [M, d] to each picture's prompt [B, M, d]."""
    return context + project(images, network, normalize=False)[:, None]


def gradients(
    encoder: TextEncoder, parameters: Sequence[Tensor], images: Tensor, labels: Tensor, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Cross-entropy of pictures [B, D], each under its own prompt, and its gradient by context and network.

    parameters: the context [M, d], then the network. One walk of all classes a picture; each is forgotten before
    the next.
    """
    context, *network = (parameter.detach().requires_grad_() for parameter in parameters)
    prompts = prompts_of(images, context, Head(*network))

    def of_one(prompt: Tensor, image: Tensor, label: Tensor) -> tuple[Tensor, list[Tensor]]:
        return prompt_gradient(
            encoder, prompt, lambda classes: cross_entropy(image[None], classes[0], label[None], scale)
        )

    steps = [of_one(*one) for one in zip(prompts.detach(), images, labels, strict=True)]
    by_prompts = torch.stack([gradient for _, (gradient,) in steps]) / len(images)
    loss = torch.stack([value for value, _ in steps]).mean()
    return loss, list(torch.autograd.grad(prompts, [context, *network], by_prompts))


def fit(job: Job, settings: Settings) -> Fitted:
    """Learn context and network on the source."""
    model, config = job.model, settings.learn

    def encode(names: Sequence[str]) -> TextEncoder:
        tokens = class_tokens(model.text.tokenizer, names, config.length, PROMPT_ALONE)
        return TextEncoder(model.text, tokens, config.length, ["end"], chunk=config.chunk)

    def make(features: Tensor, labels: Tensor, files: RunFiles) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(config.seed)
        context = initial_context(model, config.length, config.words, generator)
        network = initial_network(model.dimension, model.text.width, generator)
        state = State.sgd([tensor.to(model.device) for tensor in (context, *network)], config)
        encoder = encode(job.teacher.names)

        def step(chosen: Tensor, epoch: int, _number: int) -> tuple[Losses, Sequence[Tensor]]:
            crops = features[chosen, epoch % features.shape[1]].to(model.device)
            loss, found = gradients(encoder, state.parameters, crops, labels[chosen].to(model.device), model.scale)
            return {"ce": loss.item()}, found

        train(state, step, len(labels), config, files)
        return dict(zip(("context", *Head._fields), state.parameters, strict=True))

    learned = {name: tensor.to(model.device) for name, tensor in job.learned("cocoop", settings, make).items()}
    context = learned.pop("context")
    network = Head(**learned)

    def predictor(names: Sequence[str], _template: str) -> Predictor:
        encoder = encode(names)

        @torch.no_grad()
        def predict(shown: Tensor) -> Tensor:
            images = shown[:, 0].to(model.device)
            answers = []
            with Bar("prompts of pictures", len(images)) as bar:
                for image, prompt in zip(images, prompts_of(images, context, network), strict=True):
                    answers.append((model.scale * F.normalize(encoder(prompt)[0], dim=-1) @ image).softmax(-1))
                    bar.step()
            return torch.stack(answers).cpu()

        return predict

    return predictor


COCOOP = Method(
    "cocoop",
    "a prompt that depends on the picture",
    "Zhou et al., CVPR 2022",
    Settings(),
    fit,
    "1 view, all names",
)
