"""LASP: a prompt regularised by a text-to-text loss on templates; the LayerNorms of a ViT are tuned as well."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from selftpt.classifier import Classifier
from selftpt.config import PROMPT_ALONE, Config, ContrastConfig, TrainConfig, check_template, setting
from selftpt.errors import SelfTPTError
from selftpt.methods import Inputs
from selftpt.methods.method import FitContext, FittedMethod, Method, PredictFunction
from selftpt.models import Model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.prompt import initial_context
from selftpt.training import Crops, Losses, State, Training, seeded

NORMS_RATE = 0.1  # learning rate of the LayerNorms relative to that of the prompt
BATCH = 64  # images that the tuned image tower encodes at once

TEMPLATES = (  # as in the authors' code, which has one of them twice
    "a photo of a {}, a type of flower.",
    "a photo of a person doing {}.",
    "a centered satellite photo of {}.",
    "a photo of a {}, a type of aircraft.",
    "{} texture.",
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
    "a photo of a {}.",
    "a photo of many {}.",
    "a photo of the hard to see {}.",
    "a low resolution photo of the {}.",
    "a rendering of a {}.",
    "a bad photo of the {}.",
    "a cropped photo of the {}.",
    "a pixelated photo of the {}.",
    "a bright photo of the {}.",
    "a cropped photo of a {}.",
    "a photo of the {}.",
    "a good photo of the {}.",
    "a rendering of the {}.",
    "a close-up photo of the {}.",
    "a low resolution photo of a {}.",
    "a rendition of the {}.",
    "a photo of the clean {}.",
    "a photo of a large {}.",
    "a blurry photo of a {}.",
    "a pixelated photo of a {}.",
    "itap of the {}.",
    "a jpeg corrupted photo of the {}.",
    "a good photo of a {}.",
)


@dataclass(frozen=True)
class LaspTrainConfig(TrainConfig):
    """The authors' settings for most datasets."""

    epochs: int = setting(25, "epochs")
    batch: int = setting(32, "images per step")
    lr: float = setting(0.032, "learning rate")
    warmup_epochs: int = setting(3, "epochs at the warm-up learning rate", minimum=0)
    clip: float = setting(1.0, "maximum joint norm of the gradients", above=0)


@dataclass(frozen=True)
class LaspConfig(Config):
    """The losses, and whether the LayerNorms of the image tower are tuned, which needs pixels."""

    learn: LaspTrainConfig = field(default_factory=LaspTrainConfig)
    templates: tuple[str, ...] = setting(TEMPLATES, "hand-crafted templates")
    text: float = setting(5.0, "weight of the text-to-text loss", minimum=0)
    noise: float = setting(
        0.05, "standard deviation of the noise that half of the steps add to hand-crafted embeddings", minimum=0
    )
    layer_norms: bool = setting(True, "tune the LayerNorms of an image tower that is a ViT of open_clip")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.templates:
            raise SelfTPTError("templates must have at least one sentence, with {} for the class name")
        for template in self.templates:
            check_template(template)


def rate(epoch: int, config: TrainConfig, share: float = 1.0) -> float:
    """Compute the learning rate: a constant warm-up, then a cosine that the warm-up does not shorten.

    Args:
        epoch: The epoch, from 0.
        config: The configuration.
        share: A factor of the cosine, but not of the warm-up; below 1 for the LayerNorms.
    """
    assert isinstance(config, LaspTrainConfig)
    if epoch < config.warmup_epochs:
        return config.warmup_lr
    return share * config.lr * (1 + math.cos(math.pi * (epoch - config.warmup_epochs) / config.epochs)) / 2


def norms_rate(epoch: int, config: TrainConfig) -> float:
    """Compute the learning rate of the LayerNorms."""
    return rate(epoch, config, NORMS_RATE)


def text_to_text(learned: Tensor, hand_crafted: Tensor, scale: float) -> Tensor:
    """Compute the cross-entropy of each hand-crafted class embedding among the learned ones, averaged over all.

    Templates are processed one at a time with checkpointing, so that no tensor [T, C, C] is kept.

    Args:
        learned: L2-normalised learned embeddings, [C, D].
        hand_crafted: L2-normalised embeddings of T templates, [T, C, D].
        scale: 1 / τ.
    """
    classes = torch.arange(len(learned), device=learned.device)

    def template_loss(learned: Tensor, template: Tensor) -> Tensor:
        return F.cross_entropy(scale * template @ learned.t(), classes)

    losses = [
        checkpoint(template_loss, learned, template, use_reentrant=False, preserve_rng_state=False)
        for template in hand_crafted
    ]
    return torch.stack(losses).mean()


def noisy(hand_crafted: Tensor, std: float, seed: str) -> Tensor:
    """Add Gaussian noise to hand-crafted embeddings [T, C, D] with probability 1/2."""
    generator = seeded(seed)
    if torch.rand((), generator=generator) >= 0.5:
        return hand_crafted
    noise = torch.randn(hand_crafted.shape, generator=generator)
    return hand_crafted + std * noise.to(hand_crafted)


def clipped(gradients: Sequence[Tensor], most: float) -> list[Tensor]:
    """Scale gradients down together if their joint norm is above `most`."""
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * (most / (norm + 1e-6)).clamp(max=1) for gradient in gradients]


def tuned_features(model: Model, norms: Mapping[str, Tensor], pixels: Tensor) -> Tensor:
    """Encode images with tuned LayerNorms. The model itself does not change.

    Args:
        model: The frozen model.
        norms: Tuned parameters, by the names of `ImageTower.norms`.
        pixels: uint8, [B, 3, S, S].

    Returns:
        L2-normalised features, [B, D].
    """
    images = model.preprocess.normalize(pixels.to(model.device)).to(model.image.dtype)
    return F.normalize(model.image(images, norms=norms).to(model.text.embedding.weight.dtype), dim=-1)


@dataclass(frozen=True)
class Task:
    """A class list, prepared for the losses.

    Attributes:
        encoder: The encoder of the class names.
        hand_crafted: L2-normalised embeddings of the class names in T templates, [T, C, D].
    """

    encoder: TextEncoder
    hand_crafted: Tensor

    @classmethod
    def of(cls, model: Model, names: Sequence[str], config: LaspConfig) -> Task:
        """Prepare a class list. A class name that is too long for the longest template is an error."""
        learn, text = config.learn, model.text
        longest = max(config.templates, key=lambda template: len(text.tokenizer.encode(template)))
        tokens = class_tokens(text.tokenizer, names, learn.length, ContrastConfig(template=longest))
        hand_crafted = [encode_template(text, tokens, template, learn.chunk) for template in config.templates]
        encoder = TextEncoder(text, tokens, learn.length, ("end",), chunk=learn.chunk)
        return cls(encoder, F.normalize(torch.stack(hand_crafted), dim=-1))


def step(
    task: Task,
    context: Tensor,
    bias: Tensor,
    norms: Sequence[Tensor],
    images: Callable[[], Tensor],
    labels: Tensor,
    hand_crafted: Tensor,
    scale: float,
    text: float,
) -> tuple[Losses, list[Tensor]]:
    """Compute cross-entropy plus `text` times the text-to-text loss, and the gradients.

    Args:
        task: The class list.
        context: The context, [M, d].
        bias: The bias of the class embeddings, [1, D].
        norms: The parameters of LayerNorms on which `images` depends.
        images: Computes the L2-normalised features of the images, [B, D].
        labels: [B].
        hand_crafted: Embeddings of the templates, with the noise of the step, [T, C, D].
        scale: 1 / τ.
        text: The weight of the text-to-text loss.

    Returns:
        The two losses, and the gradients w.r.t. the context, the bias and each of `norms`.
    """
    losses: dict[str, float] = {}

    def loss(features: Tensor) -> Tensor:
        learned = F.normalize(features[0] + bias, dim=-1)
        ce = F.cross_entropy(scale * images() @ learned.t(), labels)
        text_loss = text_to_text(learned, hand_crafted, scale)
        losses.update(ce=ce.item(), text=text_loss.item())
        return ce + text * text_loss

    _, gradients = prompt_gradient(task.encoder, context, loss, [bias, *norms])
    return losses, gradients


def train(context: FitContext, config: LaspConfig) -> Training:
    """Prepare the training of the context, the bias and, if pixels are used, the LayerNorms."""
    model, learn, device = context.model, config.learn, context.model.device
    task = Task.of(model, context.source.names, config)
    inputs, labels = context.crops(learn) if choose_inputs(config, model) == "pixels" else context.features(learn)
    initial = initial_context(model, learn.length, learn.words, torch.Generator().manual_seed(learn.seed))
    text_parameters = [initial.to(device), torch.zeros(1, model.dimension, device=device)]
    norms: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = [{"params": text_parameters}]
    if isinstance(inputs, Crops):
        norms = {name: tensor.clone().float() for name, tensor in model.image.norms().items()}
        groups.append({"params": list(norms.values()), "rate": norms_rate})
    optimizer = torch.optim.SGD(groups, lr=learn.lr, momentum=learn.momentum, weight_decay=learn.weight_decay)
    state = State([*text_parameters, *norms.values()], optimizer)

    def gradients(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        def images() -> Tensor:
            if isinstance(inputs, Tensor):
                return inputs[chosen, epoch % inputs.shape[1]].to(device)
            return tuned_features(model, norms, inputs(chosen, epoch))

        hand_crafted = noisy(task.hand_crafted, config.noise, f"noise {learn.seed} {epoch} {number}")
        prompt, bias, *tuned = state.parameters
        losses, values = step(
            task, prompt, bias, tuned, images, labels[chosen].to(device), hand_crafted, model.scale, config.text
        )
        return losses, clipped(values, learn.clip)

    return Training(("context", "bias", *norms), state, gradients, len(labels), learn, rate)


def classify(fitted: FittedMethod, names: Sequence[str]) -> Classifier:
    """Make the classifier of the learned context and bias."""
    model, tensors = fitted.model, fitted.on_device()
    tokens = class_tokens(model.text.tokenizer, names, len(tensors["context"]), PROMPT_ALONE)
    encoder = TextEncoder(model.text, tokens, len(tensors["context"]), ("end",), chunk=fitted.config.learn.chunk)
    with torch.no_grad():
        weights = F.normalize(encoder(tensors["context"])[0] + tensors["bias"], dim=-1)
    return Classifier.of(model, tokens.names, weights, stage="lasp", settings=dataclasses.asdict(fitted.config))


def predictor(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier | PredictFunction:
    """Make a classifier; if LayerNorms were tuned, a function that first encodes pixels with them."""
    classifier, model = classify(fitted, names), fitted.model
    if choose_inputs(fitted.config, model) == "features":
        return classifier
    norms = {name: tensor for name, tensor in fitted.on_device().items() if name not in ("context", "bias")}
    shapes = {name: tensor.shape for name, tensor in model.image.norms().items()}
    if {name: tensor.shape for name, tensor in norms.items()} != shapes:
        raise SelfTPTError(f"the LayerNorms of the fitted lasp do not match those of {model.id}: fit it again")

    @torch.no_grad()
    def probabilities(pixels: Tensor) -> Tensor:
        features = torch.cat([tuned_features(model, norms, batch) for batch in pixels.flatten(0, 1).split(BATCH)])
        return classifier(features.unflatten(0, pixels.shape[:2]))

    return probabilities


def choose_inputs(config: LaspConfig, model: Model) -> Inputs:
    """Choose pixels if LayerNorms are tuned, features otherwise."""
    return "pixels" if config.layer_norms and model.image.runs_blocks else "features"


LASP = Method(
    "lasp",
    LaspConfig(),
    predictor,
    train,
    inputs="pixels",
    choose_inputs=choose_inputs,
    tensors={"context": "M d", "bias": "B D", "*": ""},
)
