"""SHIP with CoOp: a generator trained on the source makes image features for class names that the source lacks.

A variational autoencoder reconstructs image features through the text tower. Its generator maps a latent vector to a
bias of prompt vectors, and the text tower encodes this prompt with the class name. CoOp then learns on real and
generated features.
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

Ids = Sequence[Sequence[int]]  # token ids of class names, each with a full stop


@dataclass(frozen=True)
class GeneratorConfig(TrainConfig):
    """Settings of the autoencoder, which is trained with AdamW at a constant learning rate."""

    words: str = setting("", "words whose token embeddings initialise the prompt vectors; empty for random vectors")
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
    """Settings of CoOp on real and generated features. All other settings are those of the generator."""

    length: int = setting(4, "number of context vectors, M", above=0)
    words: str = setting("a photo of a", "words whose token embeddings initialise the context")
    epochs: int = setting(200, "epochs", above=0)
    batch: int = setting(512, "features per step, real and generated", above=0)
    lr: float = setting(0.002, "learning rate", above=0)
    warmup_lr: float = setting(0.002, "learning rate of the first epoch", above=0)
    momentum: float = setting(0.0, "momentum of SGD", minimum=0, below=1)
    weight_decay: float = setting(0.0, "weight decay of SGD", minimum=0)

    def of(self, learn: GeneratorConfig) -> LearnConfig:
        """Convert to a configuration of stage 1, with the remaining settings of the generator."""
        shared = {name: getattr(learn, name) for name in ("shots", "crops", "chunk", "seed", "max_megapixels")}
        return LearnConfig(**dataclasses.asdict(self), **shared, cpt=0, gm=0)


@dataclass(frozen=True)
class ShipConfig(Config):
    """Settings of the generator, and of CoOp after it."""

    learn: GeneratorConfig = field(default_factory=GeneratorConfig)
    coop: ShipCoopConfig = field(default_factory=ShipCoopConfig)


class Autoencoder(NamedTuple):
    """The parameters of the autoencoder.

    They are the prompt vectors [M, d], the encoder D -> E -> (D, D) and the generator D -> G -> d.
    """

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
        """Compute the mean and the log-variance [B, D] of q(z | x) from image features x [B, D]."""
        x = F.linear(images, self.hidden, self.hidden_bias).relu()
        return F.linear(x, self.mean, self.mean_bias), F.linear(x, self.variance, self.variance_bias)

    def prompts(self, z: Tensor) -> Tensor:
        """Compute prompts [B, M, d] from z [B, D]: the shared vectors plus the bias that the generator computes."""
        x = F.linear(z, self.inner, self.inner_bias).relu()
        return self.context + F.linear(x, self.shift, self.shift_bias)[:, None]

    def generate(self, model: Model, z: Tensor, names: Ids) -> Tensor:
        """Generate L2-normalised features [B, D] from z [B, D], each for its own class name."""
        return F.normalize(encode_pairs(model.text, self.prompts(z), names), dim=-1)


def initial_autoencoder(model: Model, config: GeneratorConfig) -> Autoencoder:
    """Initialise the autoencoder: weights from N(0, 0.02), biases zero."""
    rng = torch.Generator().manual_seed(config.seed)
    context = initial_context(model, config.length, config.words, rng)
    D, E, G = model.dimension, config.encoder, config.generator
    shapes = [(E, D), (D, E), (D, E), (G, D), (model.text.width, G)]
    layers = [(torch.empty(shape).normal_(0, 0.02, generator=rng), torch.zeros(shape[0])) for shape in shapes]
    return Autoencoder(context, *(tensor for layer in layers for tensor in layer))


def vae_losses(rebuilt: Tensor, images: Tensor, mean: Tensor, log_variance: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the two terms of the evidence lower bound: |x' - x|² and KL(q(z | x), N(0, 1)).

    Both are summed over [B, D]. The loss is their sum divided by B.

    Args:
        rebuilt: Reconstructed features x', [B, D].
        images: Image features x, [B, D].
        mean: The mean of q(z | x), [B, D].
        log_variance: The log-variance of q(z | x), [B, D].
    """
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
    return (rebuilt - images).square().sum(), divergence.sum()


def generator_step(
    model: Model, vae: Autoencoder, images: Tensor, noise: Tensor, names: Ids, chunk: int | None
) -> tuple[Losses, list[Tensor]]:
    """Compute the losses of a batch and their gradients, in chunks.

    Args:
        model: The frozen model.
        vae: The autoencoder.
        images: Image features, [B, D].
        noise: Samples of N(0, 1) for z, [B, D].
        names: The class name of each image.
        chunk: The number of sentences that are encoded at once; None encodes all at once.

    Returns:
        The losses, and the gradient w.r.t. each tensor of `vae`.
    """
    parameters = [tensor.detach().requires_grad_() for tensor in vae]
    gradients = [torch.zeros_like(tensor) for tensor in vae]
    count, losses = len(images), {"reconstruction": 0.0, "divergence": 0.0}
    for part in torch.arange(count).split(chunk or count):
        autoencoder, x = Autoencoder(*parameters), images[part]
        mean, log_variance = autoencoder.encode(x)
        z = mean + (0.5 * log_variance).exp() * noise[part]
        rebuilt = autoencoder.generate(model, z, [names[i] for i in part.tolist()])
        squares, divergence = vae_losses(rebuilt, x, mean, log_variance)
        for total, gradient in zip(
            gradients, torch.autograd.grad((squares + divergence) / count, parameters), strict=True
        ):
            total += gradient
        losses["reconstruction"] += squares.item() / count
        losses["divergence"] += divergence.item() / count
    return losses, gradients


def train(context: FitContext, config: GeneratorConfig) -> Training:
    """Prepare the training of the autoencoder. It also stores the features, which CoOp needs for every class list."""
    model = context.model
    features, labels = context.features(config)
    names = end_ids(model.text.tokenizer, _tokens(model, context.source.names, config.length).names)
    vae = Autoencoder(*(tensor.to(model.device) for tensor in initial_autoencoder(model, config)))
    betas = config.momentum, 0.999
    optimizer = torch.optim.AdamW(list(vae), lr=config.lr, betas=betas, weight_decay=config.weight_decay)

    def gradients(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        images = features[chosen, epoch % features.shape[1]]
        noise = torch.randn(images.shape, generator=seeded(f"noise {config.seed} {epoch} {number}"))
        image_names = [names[label] for label in labels[chosen].tolist()]
        return generator_step(model, vae, images.to(model.device), noise.to(model.device), image_names, config.chunk)

    stored = {"features": features, "labels": labels}
    return Training(Autoencoder._fields, State(vae, optimizer), gradients, len(labels), config, rate, stored)


def rate(epoch: int, config: TrainConfig) -> float:
    """Compute the learning rate: constant, except in the first epoch."""
    return config.lr if epoch else config.warmup_lr


@torch.no_grad()
def generated_features(
    model: Model, vae: Autoencoder, names: Ids, each: int, crops: int, config: GeneratorConfig
) -> Tensor:
    """Generate L2-normalised features from z ~ N(0, 1).

    Args:
        model: The frozen model.
        vae: The autoencoder.
        names: The class names, [C].
        each: The number of images per class name.
        crops: The number of features per image.
        config: The configuration.

    Returns:
        Features [C * each, crops, D], in the order of the class names.
    """
    count = len(names) * each * crops
    features, generator = torch.empty(count, model.dimension), seeded(f"generate {config.seed}")
    for part in torch.arange(count).split(config.chunk or count):
        z = torch.randn(len(part), model.dimension, generator=generator)
        part_names = [names[i // (each * crops)] for i in part.tolist()]
        features[part] = vae.generate(model, z.to(model.device), part_names).cpu()
    return features.view(len(names) * each, crops, -1)


def _tokens(model: Model, names: Sequence[str], length: int) -> ClassTokens:
    return class_tokens(model.text.tokenizer, names, length, ContrastConfig())


def learn_prompt(fitted: FittedMethod, new: Sequence[str]) -> Prompt:
    """Learn a prompt with CoOp on the training features and on generated features of new class names."""
    model, config, tensors = fitted.model, fitted.config, fitted.tensors
    coop, known = config.coop.of(config.learn), fitted.data["classes"]
    all_tokens = _tokens(model, [*known, *new], max(config.learn.length, coop.length))
    source = Source.from_features(tensors["features"], tensors["labels"].tolist(), known)
    features, labels = tensors["features"], torch.tensor(source.labels)
    if new:
        vae = Autoencoder(*(tensors[name].to(model.device) for name in Autoencoder._fields))
        each = math.ceil(len(labels) / len(new))
        ids = end_ids(model.text.tokenizer, all_tokens.names[len(known) :])
        generated = generated_features(model, vae, ids, each, features.shape[1], config.learn)
        features = torch.cat([features, generated])
        labels = torch.cat([labels, torch.arange(len(known), len(all_tokens)).repeat_interleave(each)])
    digests = [(name, content_digest(tensors[name])) for name in sorted(tensors)]
    key = digest(code_digest(), fitted.model_id.digest, dataclasses.asdict(config), digests, known, new)

    def learn(file: Path | None, optional: bool) -> Prompt:
        return learn_from_features(model, all_tokens, features, labels, coop, file, optional=optional)

    return fitted.files.read_or_learn(f"ship-prompt-{key}.safetensors", Prompt.load, learn)


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Learn a prompt on the source and on generated features of new class names, and make its classifier."""
    model, length = fitted.model, fitted.config.learn.length
    known = {clean_name(name).lower() for name in fitted.data["classes"]}
    new = {name.lower(): name for name in _tokens(model, names, length).names if name.lower() not in known}
    return adapt(model, learn_prompt(fitted, list(new.values())), names, AdaptConfig(steps=0))


def generator_config(_context: FitContext, config: ShipConfig) -> GeneratorConfig:
    """Return the configuration of the generator, which does not depend on CoOp's."""
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
