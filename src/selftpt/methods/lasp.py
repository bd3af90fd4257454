"""LASP: templates are classified among the learned class embeddings, and a ViT's LayerNorms are tuned."""

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
from selftpt.methods.method import FitContext, FittedMethod, Method, Probabilities
from selftpt.models import Model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.prompt import initial_context
from selftpt.training import Crops, Losses, State, Training, seeded

NORMS_RATE = 0.1
BATCH = 64  # images that the tuned image tower encodes at once

TEMPLATES = (  # of the authors' code, one of them twice as there
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
    """The authors' recipe for most datasets."""

    epochs: int = setting(25, "epochs")
    batch: int = setting(32, "images per step")
    lr: float = setting(0.032, "learning rate")
    warmup_epochs: int = setting(3, "epochs at the warm-up learning rate", minimum=0)
    clip: float = setting(1.0, "largest norm of a gradient", above=0)


@dataclass(frozen=True)
class LaspConfig(Config):
    """The losses, and whether LayerNorms of the image tower are tuned, which needs pixels."""

    learn: LaspTrainConfig = field(default_factory=LaspTrainConfig)
    templates: tuple[str, ...] = setting(TEMPLATES, "hand-crafted templates")
    text: float = setting(5.0, "weight of the text-to-text loss", minimum=0)
    noise: float = setting(
        0.05, "standard deviation of the noise on hand-crafted embeddings, in half of the steps", minimum=0
    )
    layer_norms: bool = setting(True, "tune the LayerNorms of an image tower that is a ViT of open_clip")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.templates:
            raise SelfTPTError("templates must be one or more sentences with {} for the class name")
        for template in self.templates:
            check_template(template)


def rate(epoch: int, config: TrainConfig, share: float = 1.0) -> float:
    """A constant warm-up, then the cosine, not shortened by it; a share of it for the LayerNorms."""
    assert isinstance(config, LaspTrainConfig)
    if epoch < config.warmup_epochs:
        return config.warmup_lr
    return share * config.lr * (1 + math.cos(math.pi * (epoch - config.warmup_epochs) / config.epochs)) / 2


def norms_rate(epoch: int, config: TrainConfig) -> float:
    """The learning rate of the LayerNorms."""
    return rate(epoch, config, NORMS_RATE)


def text_to_text(learned: Tensor, hand_crafted: Tensor, scale: float) -> Tensor:
    """The cross-entropy of each hand-crafted class embedding among the learned ones, averaged over all.

    Args:
        learned: L2-normalised learned embeddings, [C, D].
        hand_crafted: L2-normalised embeddings of T templates [T, C, D], one at a time so that no [T, C, C] is kept.
        scale: 1 / τ.
    """
    classes = torch.arange(len(learned), device=learned.device)

    def one(unit: Tensor, template: Tensor) -> Tensor:
        return F.cross_entropy(scale * template @ unit.t(), classes)

    each = [checkpoint(one, learned, each, use_reentrant=False, preserve_rng_state=False) for each in hand_crafted]
    return torch.stack(each).mean()


def noisy(hand_crafted: Tensor, std: float, seed: str) -> Tensor:
    """Hand-crafted embeddings [T, C, D], in half of the cases with Gaussian noise."""
    generator = seeded(seed)
    if torch.rand((), generator=generator) >= 0.5:
        return hand_crafted
    noise = torch.randn(hand_crafted.shape, generator=generator)
    return hand_crafted + std * noise.to(hand_crafted)


def clipped(gradients: Sequence[Tensor], most: float) -> list[Tensor]:
    """Gradients, scaled down together where their norm is above `most`."""
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * (most / (norm + 1e-6)).clamp(max=1) for gradient in gradients]


def tuned_features(model: Model, norms: Mapping[str, Tensor], pixels: Tensor) -> Tensor:
    """L2-normalised features [B, D] of pixels [B, 3, S, S], uint8, with other LayerNorms.

    `norms` are by the names of `ImageTower.norms`; the model itself stays as it is.
    """
    shown = model.preprocess.normalize(pixels.to(model.device)).to(model.image.dtype)
    return F.normalize(model.image(shown, norms=norms).to(model.text.embedding.weight.dtype), dim=-1)


@dataclass(frozen=True)
class Task:
    """A class list ready for the losses.

    Attributes:
        encoder: Its encoder.
        hand_crafted: Its L2-normalised embeddings in T templates, [T, C, D].
    """

    encoder: TextEncoder
    hand_crafted: Tensor

    @classmethod
    def of(cls, model: Model, names: Sequence[str], config: LaspConfig) -> Task:
        """A class list, refused if a name is too long."""
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
    """Cross-entropy plus `text` times the text-to-text loss, and the gradients w.r.t. context, bias and LayerNorms.

    Args:
        task: The class list.
        context: [M, d].
        bias: Of the class embeddings, [1, D].
        norms: Parameters of LayerNorms that `images` depends on.
        images: Gives the L2-normalised features of the images, [B, D].
        labels: [B].
        hand_crafted: Embeddings of the templates with the noise of the step, [T, C, D].
        scale: 1 / τ.
        text: The weight.
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
    """The context, the bias and, if pixels are used, the LayerNorms."""
    model, learn, device = context.model, config.learn, context.model.device
    task = Task.of(model, context.source.names, config)
    shown, labels = context.crops(learn) if choose_inputs(config, model) == "pixels" else context.features(learn)
    initial = initial_context(model, learn.length, learn.words, torch.Generator().manual_seed(learn.seed))
    first = [initial.to(device), torch.zeros(1, model.dimension, device=device)]
    norms: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = [{"params": first}]
    if isinstance(shown, Crops):
        norms = {name: tensor.clone().float() for name, tensor in model.image.norms().items()}
        groups.append({"params": list(norms.values()), "rate": norms_rate})
    optimizer = torch.optim.SGD(groups, lr=learn.lr, momentum=learn.momentum, weight_decay=learn.weight_decay)
    state = State([*first, *norms.values()], optimizer)

    def gradients(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        def images() -> Tensor:
            if isinstance(shown, Tensor):
                return shown[chosen, epoch % shown.shape[1]].to(device)
            return tuned_features(model, norms, shown(chosen, epoch))

        hand_crafted = noisy(task.hand_crafted, config.noise, f"noise {learn.seed} {epoch} {number}")
        prompt, bias, *tuned = state.parameters
        losses, found = step(
            task, prompt, bias, tuned, images, labels[chosen].to(device), hand_crafted, model.scale, config.text
        )
        return losses, clipped(found, learn.clip)

    return Training(("context", "bias", *norms), state, gradients, len(labels), learn, rate)


def classify(fitted: FittedMethod, names: Sequence[str]) -> Classifier:
    """The class vectors of the learned context and bias."""
    model, tensors = fitted.model, fitted.on_device()
    tokens = class_tokens(model.text.tokenizer, names, len(tensors["context"]), PROMPT_ALONE)
    encoder = TextEncoder(model.text, tokens, len(tensors["context"]), ("end",), chunk=fitted.config.learn.chunk)
    with torch.no_grad():
        weights = F.normalize(encoder(tensors["context"])[0] + tensors["bias"], dim=-1)
    return Classifier.of(model, tokens.names, weights, stage="lasp", settings=dataclasses.asdict(fitted.config))


def predictor(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier | Probabilities:
    """A classifier, after the tuned image tower if LayerNorms were tuned."""
    classifier, model = classify(fitted, names), fitted.model
    if choose_inputs(fitted.config, model) == "features":
        return classifier
    norms = {name: tensor for name, tensor in fitted.on_device().items() if name not in ("context", "bias")}
    shapes = {name: tensor.shape for name, tensor in model.image.norms().items()}
    if {name: tensor.shape for name, tensor in norms.items()} != shapes:
        raise SelfTPTError(f"the fitted lasp does not have the LayerNorms of {model.id}: fit it again")

    @torch.no_grad()
    def probabilities(pixels: Tensor) -> Tensor:
        features = torch.cat([tuned_features(model, norms, some) for some in pixels.flatten(0, 1).split(BATCH)])
        return classifier(features.unflatten(0, pixels.shape[:2]))

    return probabilities


def choose_inputs(config: LaspConfig, model: Model) -> Inputs:
    """Pixels if LayerNorms are tuned."""
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
