"""LASP: hand-written sentences are told among the learned embeddings of classes, and a ViT's LayerNorms are tuned."""

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
from selftpt.config import PROMPT_ALONE, Config, ContrastConfig, TrainConfig, above, at_least, setting
from selftpt.errors import SelfTPTError
from selftpt.methods.method import Fitted, Job, Method, Predictor
from selftpt.models import Model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.prompt import initial_context
from selftpt.training import Crops, Losses, RunFiles, State, seeded, source_crops, source_features, train

NORMS_RATE = 0.1
BATCH = 64  # pictures that the tuned image tower takes at once

TEMPLATES = (  # of the authors' settings, one of them twice as there
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
class LaspConfig(TrainConfig):
    """The authors' recipe of most datasets."""

    epochs: int = setting(25, "epochs")
    batch: int = setting(32, "pictures a step")
    lr: float = setting(0.032, "learning rate")
    warmup_epochs: int = setting(3, "epochs at the rate of warm-up")
    clip: float = setting(1.0, "largest norm of a gradient")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "warmup_epochs")
        above(0, self, "clip")


@dataclass(frozen=True)
class Settings(Config):
    """Of the losses, and whether LayerNorms of the image tower are tuned, for which it must see pixels."""

    learn: LaspConfig = field(default_factory=LaspConfig)
    templates: tuple[str, ...] = setting(TEMPLATES, "hand-written sentences")
    text: float = setting(5.0, "weight of the text-to-text loss")
    noise: float = setting(0.05, "deviation of the noise on hand-written embeddings, in half of the steps")
    layer_norms: bool = setting(True, "tune the LayerNorms of an image tower that is a ViT of open_clip")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.templates:
            raise SelfTPTError("templates must be one or more sentences with {} for a class name")
        for template in self.templates:
            ContrastConfig(template=template)
        at_least(0, self, "text", "noise")


def rate(epoch: int, config: LaspConfig, share: float = 1.0) -> float:
    """A constant warm-up, then the cosine, not shortened by it; a share of it for the LayerNorms."""
    if epoch < config.warmup_epochs:
        return config.warmup_lr
    return share * config.lr * (1 + math.cos(math.pi * (epoch - config.warmup_epochs) / config.epochs)) / 2


def text_to_text(unit: Tensor, hand: Tensor, scale: float) -> Tensor:
    """The cross-entropy of each hand-written class among the learned ones, the mean over classes and sentences.

    unit: [C, D], learned embeddings; hand: [T, C, D], of T sentences, one at a time so that no [T, C, C] is kept.
    """
    classes = torch.arange(len(unit), device=unit.device)

    def one(learned: Tensor, written: Tensor) -> Tensor:
        return F.cross_entropy(scale * written @ learned.t(), classes)

    each = [checkpoint(one, unit, written, use_reentrant=False, preserve_rng_state=False) for written in hand]
    return torch.stack(each).mean()


def noisy(hand: Tensor, deviation: float, seed: str) -> Tensor:
    """Hand-written embeddings [T, C, D], in half of the cases with noise N(0, deviation)."""
    generator = seeded(seed)
    if torch.rand((), generator=generator) >= 0.5:
        return hand
    noise = torch.randn(hand.shape, generator=generator)
    return hand + deviation * noise.to(hand)


def clipped(gradients: Sequence[Tensor], most: float) -> list[Tensor]:
    """Gradients, made smaller together where their norm is above `most`."""
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * (most / (norm + 1e-6)).clamp(max=1) for gradient in gradients]


def tuned_features(model: Model, norms: Mapping[str, Tensor], pixels: Tensor) -> Tensor:
    """Pixels [B, 3, S, S], uint8, to L2-normalised features [B, D], with LayerNorms by the names of `ImageTower.norms`.

    The model itself stays as it is.
    """
    shown = model.preprocess.normalize(pixels.to(model.device)).to(model.image.dtype)
    return F.normalize(model.image(shown, norms=norms).to(model.text.embedding.weight.dtype), dim=-1)


@dataclass(frozen=True)
class Task:
    """A class list ready for the losses: its encoder, and its unit embeddings in hand-written sentences [T, C, D]."""

    encoder: TextEncoder
    hand: Tensor

    @classmethod
    def of(cls, model: Model, names: Sequence[str], settings: Settings) -> Task:
        """A class list, refused if a name does not fit."""
        config, text = settings.learn, model.text
        longest = max(settings.templates, key=lambda template: len(text.tokenizer.encode(template)))
        tokens = class_tokens(text.tokenizer, names, config.length, ContrastConfig(template=longest))
        hand = [encode_template(text, tokens, template, config.chunk) for template in settings.templates]
        encoder = TextEncoder(text, tokens, config.length, ("end",), chunk=config.chunk)
        return cls(encoder, F.normalize(torch.stack(hand), dim=-1))


def descent(
    task: Task,
    context: Tensor,
    bias: Tensor,
    norms: Sequence[Tensor],
    images: Callable[[], Tensor],
    labels: Tensor,
    hand: Tensor,
    scale: float,
    text: float,
) -> tuple[Losses, list[Tensor]]:
    """Cross-entropy and `text` times the text-to-text loss, and the gradients by context, bias [1, D] and LayerNorms.

    images: makes the pictures' unit features [B, D], out of the LayerNorms if there are any.
    hand: [T, C, D], with the noise of the step.
    """
    losses: dict[str, float] = {}

    def loss(features: Tensor) -> Tensor:
        unit = F.normalize(features[0] + bias, dim=-1)
        ce = F.cross_entropy(scale * images() @ unit.t(), labels)
        told = text_to_text(unit, hand, scale)
        losses.update(ce=ce.item(), text=told.item())
        return ce + text * told

    _, gradients = prompt_gradient(task.encoder, context, loss, [bias, *norms])
    return losses, gradients


def learn(
    model: Model, names: Sequence[str], shown: Tensor | Crops, labels: Tensor, files: RunFiles, settings: Settings
) -> dict[str, Tensor]:
    """The context, the bias and, of pixels, the LayerNorms.

    shown: features of crops [N, crops, D], or what cuts their pixels. labels: [N].
    """
    config, device = settings.learn, model.device
    task = Task.of(model, names, settings)
    context = initial_context(model, config.length, config.words, torch.Generator().manual_seed(config.seed))
    bias = torch.zeros(1, model.dimension, device=device)
    norms = {}
    if not isinstance(shown, Tensor):
        norms = {name: tensor.clone().float() for name, tensor in model.image.norms().items()}
    first = [context.to(device), bias]
    groups: list[dict[str, Any]] = [{"params": first}]
    if norms:
        slower = {"rate": lambda epoch, _: rate(epoch, config, NORMS_RATE)}
        groups.append({"params": list(norms.values()), **slower})
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    state = State([*first, *norms.values()], optimizer)

    def step(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        def images() -> Tensor:
            if isinstance(shown, Tensor):
                return shown[chosen, epoch % shown.shape[1]].to(device)
            return tuned_features(model, norms, shown(chosen, epoch))

        hand = noisy(task.hand, settings.noise, f"noise {config.seed} {epoch} {number}")
        context, bias, *tuned = state.parameters
        losses, gradients = descent(
            task, context, bias, tuned, images, labels[chosen].to(device), hand, model.scale, settings.text
        )
        return losses, clipped(gradients, config.clip)

    train(state, step, len(labels), config, files, lambda epoch, _: rate(epoch, config))
    return {"context": state.parameters[0], "bias": bias, **norms}


def classify(model: Model, names: Sequence[str], context: Tensor, bias: Tensor, settings: Settings) -> Classifier:
    """The classifier [C, D] of a learned context [M, d] and bias [1, D]."""
    tokens = class_tokens(model.text.tokenizer, names, len(context), PROMPT_ALONE)
    encoder = TextEncoder(model.text, tokens, len(context), ("end",), chunk=settings.learn.chunk)
    with torch.no_grad():
        weights = F.normalize(encoder(context.to(model.device))[0] + bias.to(model.device), dim=-1)
    return Classifier.of(model, tokens.names, weights, stage="lasp", settings=dataclasses.asdict(settings))


def pixels(settings: Settings, model: Model) -> bool:
    """Whether LayerNorms are tuned."""
    return settings.layer_norms and model.image.runs_blocks


def fit(job: Job, settings: Settings) -> Fitted:
    """What is learned of the source; for class names, a classifier, behind the tuned image tower if there is one."""
    model, tunes = job.model, pixels(settings, job.model)

    def make(shown: Tensor | Crops, labels: Tensor, files: RunFiles) -> dict[str, Tensor]:
        return learn(model, job.teacher.names, shown, labels, files, settings)

    learned = job.learned("lasp", settings, make, source_crops if tunes else source_features)
    context, bias, norms = learned.pop("context"), learned.pop("bias"), learned

    def plain(names: Sequence[str], _template: str) -> Classifier:
        return classify(model, names, context, bias, settings)

    if not tunes:
        return plain
    tuned = {name: tensor.to(model.device) for name, tensor in norms.items()}

    def behind(names: Sequence[str], template: str) -> Predictor:
        classifier = plain(names, template)

        @torch.no_grad()
        def predict(shown: Tensor) -> Tensor:
            features = torch.cat([tuned_features(model, tuned, some) for some in shown.flatten(0, 1).split(BATCH)])
            return classifier(features.cpu().unflatten(0, shown.shape[:2]))

        return predict

    return behind


LASP = Method(
    "lasp",
    "a prompt held by hand-written sentences; LayerNorms",
    "Bulat and Tzimiropoulos, CVPR 2023",
    Settings(),
    fit,
    needs="pixels if the image tower is a ViT of open_clip, else features",
    pixels=pixels,
)
