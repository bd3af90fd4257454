"""CoOp with SHIP: a generator learned on the source makes image features of class names that the source lacks.

A variational autoencoder rebuilds image features through the text tower: what it draws is a bias on prompt vectors,
and the sentence is that prompt and the class name. CoOp then learns on real and generated features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.adaptation import adapt
from selftpt.classifier import Classifier
from selftpt.config import AdaptConfig, Config, ContrastConfig, LearnConfig, TrainConfig, setting
from selftpt.data.cache import code_digest, content_digest
from selftpt.data.sources import Source
from selftpt.files import digest
from selftpt.learning import learn_from_features
from selftpt.methods.method import FitContext, FittedMethod, Method
from selftpt.models import Model
from selftpt.models.text import encode_pairs
from selftpt.models.tokenizer import ClassTokens, class_tokens, clean_name, end_ids
from selftpt.prompt import Prompt, initial_context
from selftpt.training import Losses, State, Training, seeded

Ids = Sequence[Sequence[int]]  # token ids of class names and the full stop after them


@dataclass(frozen=True)
class GeneratorConfig(TrainConfig):
    """Learning the autoencoder, with AdamW at a constant learning rate."""

    words: str = setting("", "words the prompt vectors start from; without any they are drawn")
    epochs: int = setting(50, "epochs")
    batch: int = setting(256, "images per step")
    lr: float = setting(1e-3, "learning rate")
    warmup_lr: float = setting(1e-3, "learning rate of the first epoch")
    momentum: float = setting(0.9, "first-moment decay of AdamW")
    weight_decay: float = setting(0.01, "weight decay of AdamW")
    chunk: int | None = setting(256, "sentences encoded at once; none encodes all at once")
    encoder: int = setting(2048, "hidden width of the encoder", above=0)
    generator: int = setting(4096, "hidden width of the generator", above=0)


@dataclass(frozen=True)
class ShipCoopConfig(Config):
    """Learning the prompt on real and generated features. What is not here is as for the generator."""

    length: int = setting(4, "number of context vectors, M", above=0)
    words: str = setting("a photo of a", "words the context starts from")
    epochs: int = setting(200, "epochs", above=0)
    batch: int = setting(512, "features per step, real and generated", above=0)
    lr: float = setting(0.002, "learning rate", above=0)
    warmup_lr: float = setting(0.002, "learning rate of the first epoch", above=0)
    momentum: float = setting(0.0, "momentum of SGD", minimum=0, below=1)
    weight_decay: float = setting(0.0, "weight decay of SGD", minimum=0)

    def of(self, learn: GeneratorConfig) -> LearnConfig:
        """As a configuration of stage 1."""
        same = {name: getattr(learn, name) for name in ("shots", "crops", "chunk", "seed", "max_megapixels")}
        return LearnConfig(**dataclasses.asdict(self), **same, cpt=0, gm=0)


@dataclass(frozen=True)
class ShipConfig(Config):
    """The generator, and CoOp after it."""

    learn: GeneratorConfig = field(default_factory=GeneratorConfig)
    coop: ShipCoopConfig = field(default_factory=ShipCoopConfig)


class Autoencoder(NamedTuple):
    """The prompt vectors [M, d] and three perceptrons' weights and biases: D to E to D and D; D to G to d."""

    context: Tensor
    hidden: Tensor
    hidden_bias: Tensor
    mean: Tensor
    mean_bias: Tensor
    variance: Tensor
    variance_bias: Tensor
    inner: Tensor
    inner_bias: Tensor
    shift: Tensor
    shift_bias: Tensor

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the logarithm of the variance of q(z | x) [B, D] of image features [B, D]."""
        x = F.linear(images, self.hidden, self.hidden_bias).relu()
        return F.linear(x, self.mean, self.mean_bias), F.linear(x, self.variance, self.variance_bias)

    def prompts(self, z: Tensor) -> Tensor:
        """Prompts [B, M, d] of z [B, D]: the shared vectors, all shifted by what the generator makes of z."""
        x = F.linear(z, self.inner, self.inner_bias).relu()
        return self.context + F.linear(x, self.shift, self.shift_bias)[:, None]

    def generate(self, model: Model, z: Tensor, names: Ids) -> Tensor:
        """Unit features [B, D] of z [B, D], each for its own class name."""
        return F.normalize(encode_pairs(model.text, self.prompts(z), names), dim=-1)


def initial_autoencoder(model: Model, config: GeneratorConfig) -> Autoencoder:
    """Weights of N(0, 0.02), biases of zero."""
    rng = torch.Generator().manual_seed(config.seed)
    context = initial_context(model, config.length, config.words, rng)
    D, E, G = model.dimension, config.encoder, config.generator
    shapes = [(E, D), (D, E), (D, E), (G, D), (model.text.width, G)]
    layers = [(torch.empty(shape).normal_(0, 0.02, generator=rng), torch.zeros(shape[0])) for shape in shapes]
    return Autoencoder(context, *(tensor for layer in layers for tensor in layer))


def vae_losses(rebuilt: Tensor, images: Tensor, mean: Tensor, log_variance: Tensor) -> tuple[Tensor, Tensor]:
    """The two terms of the evidence bound, sums over [B, D]: |x' - x|², and KL(q(z | x), N(0, 1)).

    The loss is their sum by B.
    """
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
    return (rebuilt - images).square().sum(), divergence.sum()


def generator_step(
    model: Model, vae: Autoencoder, images: Tensor, noise: Tensor, names: Ids, chunk: int | None
) -> tuple[Losses, list[Tensor]]:
    """The losses of image features [B, D] with noise [B, D] for z, and the gradient of each tensor, part by part."""
    parameters = [tensor.detach().requires_grad_() for tensor in vae]
    gradients = [torch.zeros_like(tensor) for tensor in vae]
    count, losses = len(images), {"reconstruction": 0.0, "divergence": 0.0}
    for part in torch.arange(count).split(chunk or count):
        own, x = Autoencoder(*parameters), images[part]
        mean, log_variance = own.encode(x)
        z = mean + (0.5 * log_variance).exp() * noise[part]
        rebuilt = own.generate(model, z, [names[i] for i in part.tolist()])
        squares, divergence = vae_losses(rebuilt, x, mean, log_variance)
        for total, gradient in zip(
            gradients, torch.autograd.grad((squares + divergence) / count, parameters), strict=True
        ):
            total += gradient
        losses["reconstruction"] += squares.item() / count
        losses["divergence"] += divergence.item() / count
    return losses, gradients


def train(context: FitContext, config: GeneratorConfig) -> Training:
    """The autoencoder; the training features are kept with it, because CoOp needs them for every class list."""
    model = context.model
    features, labels = context.features(config)
    names = end_ids(model.text.tokenizer, _tokens(model, context.source.names, config.length).names)
    vae = Autoencoder(*(tensor.to(model.device) for tensor in initial_autoencoder(model, config)))
    betas = config.momentum, 0.999
    optimizer = torch.optim.AdamW(list(vae), lr=config.lr, betas=betas, weight_decay=config.weight_decay)

    def gradients(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        images = features[chosen, epoch % features.shape[1]]
        noise = torch.randn(images.shape, generator=seeded(f"noise {config.seed} {epoch} {number}"))
        own = [names[label] for label in labels[chosen].tolist()]
        return generator_step(model, vae, images.to(model.device), noise.to(model.device), own, config.chunk)

    kept = {"features": features, "labels": labels}
    return Training(Autoencoder._fields, State(vae, optimizer), gradients, len(labels), config, rate, kept)


def rate(epoch: int, config: TrainConfig) -> float:
    """One learning rate, and another for the first epoch."""
    return config.lr if epoch else config.warmup_lr


@torch.no_grad()
def generated_features(
    model: Model, vae: Autoencoder, names: Ids, each: int, crops: int, config: GeneratorConfig
) -> Tensor:
    """Unit features [C * each, crops, D] of z ~ N(0, 1), `each` a name, name after name."""
    count = len(names) * each * crops
    made, generator = torch.empty(count, model.dimension), seeded(f"generate {config.seed}")
    for part in torch.arange(count).split(config.chunk or count):
        z = torch.randn(len(part), model.dimension, generator=generator)
        made[part] = vae.generate(model, z.to(model.device), [names[i // (each * crops)] for i in part.tolist()]).cpu()
    return made.view(len(names) * each, crops, -1)


def _tokens(model: Model, names: Sequence[str], length: int) -> ClassTokens:
    return class_tokens(model.text.tokenizer, names, length, ContrastConfig())


def learn_prompt(fitted: FittedMethod, new: Sequence[str]) -> Prompt:
    """CoOp on the training features and on generated features of new class names."""
    model, config, tensors = fitted.model, fitted.config, fitted.tensors
    coop, known = config.coop.of(config.learn), fitted.data["classes"]
    everything = _tokens(model, [*known, *new], max(config.learn.length, coop.length))
    source = Source.from_features(tensors["features"], tensors["labels"].tolist(), known)
    features, labels = tensors["features"], torch.tensor(source.labels)
    if new:
        vae = Autoencoder(*(tensors[name].to(model.device) for name in Autoencoder._fields))
        each = math.ceil(len(labels) / len(new))
        ids = end_ids(model.text.tokenizer, everything.names[len(known) :])
        made = generated_features(model, vae, ids, each, features.shape[1], config.learn)
        features = torch.cat([features, made])
        labels = torch.cat([labels, torch.arange(len(known), len(everything)).repeat_interleave(each)])
    learned = [(name, content_digest(tensors[name])) for name in sorted(tensors)]
    key = digest(code_digest(), fitted.model_id.digest, dataclasses.asdict(config), learned, known, new)

    def learn(file: Path | None, optional: bool) -> Prompt:
        return learn_from_features(model, everything, features, labels, coop, file, optional=optional)

    return fitted.files.read_or_learn(f"ship-prompt-{key}.safetensors", Prompt.load, learn)


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """CoOp on the classes of the source and on those of `names` that the source lacks."""
    model, length = fitted.model, fitted.config.learn.length
    known = {clean_name(name).lower() for name in fitted.data["classes"]}
    new = {name.lower(): name for name in _tokens(model, names, length).names if name.lower() not in known}
    return adapt(model, learn_prompt(fitted, list(new.values())), names, AdaptConfig(steps=0))


def generator_config(_context: FitContext, config: ShipConfig) -> GeneratorConfig:
    """The configuration of the generator, which is learned without CoOp's."""
    return config.learn


SHIP = Method(
    "ship",
    ShipConfig(),
    classify,
    train,
    generator_config,
    tensors={
        "context": "M d",
        "hidden": "E D",
        "hidden_bias": "E",
        "mean": "D E",
        "mean_bias": "D",
        "variance": "D E",
        "variance_bias": "D",
        "inner": "G D",
        "inner_bias": "G",
        "shift": "d G",
        "shift_bias": "d",
        "features": "N V D",
        "labels": "I64 N",
    },
)
