"""CoOp with SHIP: a generator learned on the source makes image features of class names that the source lacks.

A variational autoencoder rebuilds image features through the text tower: what it draws is a bias on prompt vectors,
and the sentence is that prompt and the class name. CoOp then learns on real and generated features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.adaptation import adapt
from selftpt.classifier import Classifier
from selftpt.config import AdaptConfig, LearnConfig, TrainConfig, above, setting
from selftpt.files import digest
from selftpt.learning import learn_from_features
from selftpt.methods.method import Fitted, Job, Method
from selftpt.models import Model
from selftpt.models.text import encode_pairs
from selftpt.models.tokenizer import ClassTokens, class_tokens, clean_name, end_ids
from selftpt.prompt import Prompt, initial_context
from selftpt.training import Losses, RunFiles, State, seeded, source_features, train

Ids = Sequence[Sequence[int]]  # token ids of class names and the full stop after them


@dataclass(frozen=True)
class GeneratorConfig(TrainConfig):
    """Learning the autoencoder, by AdamW at one rate."""

    words: str = setting("", "words the prompt vectors start from; without any they are drawn")
    epochs: int = setting(50, "epochs")
    batch: int = setting(256, "pictures a step")
    lr: float = setting(1e-3, "learning rate")
    warmup_lr: float = setting(1e-3, "learning rate of the first epoch")
    momentum: float = setting(0.9, "momentum of AdamW")
    weight_decay: float = setting(0.01, "weight decay of AdamW")
    chunk: int | None = setting(256, "sentences walked at once, more in parts; 0 walks all at once")
    encoder: int = setting(2048, "hidden width of the encoder")
    generator: int = setting(4096, "hidden width of the generator")

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, self, "encoder", "generator")


@dataclass(frozen=True)
class CoopConfig:
    """Learning the prompt on real and generated features. What is not here is as for the generator."""

    length: int = setting(4, "number of context vectors, M")
    words: str = setting("a photo of a", "words the context starts from")
    epochs: int = setting(200, "epochs")
    batch: int = setting(512, "features a step, real and generated")
    lr: float = setting(0.002, "learning rate")
    warmup_lr: float = setting(0.002, "learning rate of the first epoch")
    momentum: float = setting(0.0, "momentum of SGD")
    weight_decay: float = setting(0.0, "weight decay of SGD")

    def __post_init__(self) -> None:
        self.of(GeneratorConfig())

    def of(self, learn: GeneratorConfig) -> LearnConfig:
        """As settings of stage 1."""
        same = {name: getattr(learn, name) for name in ("shots", "crops", "chunk", "seed", "max_megapixels")}
        return LearnConfig(**dataclasses.asdict(self), **same, cpt=0, gm=0)


@dataclass(frozen=True)
class Settings:
    """Of the generator, and of CoOp after it."""

    learn: GeneratorConfig = field(default_factory=GeneratorConfig)
    coop: CoopConfig = field(default_factory=CoopConfig)


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


def learn_generator(
    model: Model, names: Ids, features: Tensor, labels: Tensor, config: GeneratorConfig, files: RunFiles
) -> Autoencoder:
    """The autoencoder of unit features [N, crops, D] with labels [N]."""
    vae = Autoencoder(*(tensor.to(model.device) for tensor in initial_autoencoder(model, config)))
    betas = config.momentum, 0.999
    optimizer = torch.optim.AdamW(list(vae), lr=config.lr, betas=betas, weight_decay=config.weight_decay)

    def step(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        images = features[chosen, epoch % features.shape[1]]
        noise = torch.randn(images.shape, generator=seeded(f"noise {config.seed} {epoch} {number}"))
        own = [names[label] for label in labels[chosen].tolist()]
        return generator_step(model, vae, images.to(model.device), noise.to(model.device), own, config.chunk)

    train(State(vae, optimizer), step, len(labels), config, files, lambda epoch, c: c.lr if epoch else c.warmup_lr)
    return vae


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


def fit(job: Job, settings: Settings) -> Fitted:
    """The generator; then, for class names, the features of new ones and CoOp on all."""
    model, learn, coop = job.model, settings.learn, settings.coop.of(settings.learn)
    known, length = job.teacher.names, max(learn.length, coop.length)

    def tokens(names: Sequence[str]) -> ClassTokens:
        return class_tokens(model.text.tokenizer, names, length, coop.contrast)

    def make(features: Tensor, labels: Tensor, files: RunFiles) -> dict[str, Tensor]:
        return learn_generator(
            model, end_ids(model.text.tokenizer, tokens(known).names), features, labels, learn, files
        )._asdict()

    learned = job.learned("ship-generator", Settings(learn), make)
    vae = Autoencoder(**{name: tensor.to(model.device) for name, tensor in learned.items()})

    def prompt(new: Sequence[str]) -> Prompt:
        file = job.file("ship-prompt", settings)
        file = file.with_name(f"ship-prompt-{digest(file.stem, new)}.safetensors")
        if file.is_file():
            return Prompt.load(file)
        few, everything = job.teacher.few(learn.shots, learn.seed), tokens([*known, *new])
        features, labels = source_features(model, few, learn, lambda _error: None)  # `learned` told of them
        if new:
            each = math.ceil(len(labels) / len(new))
            ids = end_ids(model.text.tokenizer, everything.names[len(known) :])
            made = generated_features(model, vae, ids, each, features.shape[1], learn)
            features = torch.cat([features, made])
            labels = torch.cat([labels, torch.arange(len(known), len(everything)).repeat_interleave(each)])
        return learn_from_features(model, everything, features, labels, coop, file)

    def classify(names: Sequence[str], _template: str) -> Classifier:
        had = {name.lower() for name in map(clean_name, known)}
        new = {name.lower(): name for name in tokens(names).names if name.lower() not in had}
        return adapt(model, prompt(list(new.values())), names, AdaptConfig(steps=0))

    return classify


SHIP = Method(
    "ship",
    "coop, with features generated for new class names",
    "Wang et al., ICCV 2023",
    Settings(),
    fit,
)
