"""ProDA: many prompts, whose class embeddings are treated as samples of a Gaussian."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import PROMPT_ALONE, VIEWS, Config, TrainConfig, View, setting
from selftpt.errors import SelfTPTError
from selftpt.methods.method import FitContext, FittedMethod, Method
from selftpt.models import Model
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import ClassTokens, class_tokens
from selftpt.objective import Batch
from selftpt.prompt import initial_context
from selftpt.training import Losses, State, Training, batches


@dataclass(frozen=True)
class ProdaConfig(Config):
    """ProDA's settings. docs/methods.md lists those that are not confirmed by the authors' code."""

    learn: TrainConfig = field(default_factory=lambda: TrainConfig(length=16, words="", epochs=100, batch=20, lr=0.002))
    prompts: int = setting(32, "number of prompts", minimum=2)
    prompts_per_step: int = setting(4, "prompts used in each step", above=0)
    orthogonality: float = setting(0.1, "weight of the loss that keeps prompts apart", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts % self.prompts_per_step:
            raise SelfTPTError(
                f"prompts_per_step must be a divisor of prompts, {self.prompts}, but is {self.prompts_per_step}"
            )


def places(prompts: int) -> list[View]:
    """Return the view of each prompt: the class name is at the end in half of them, else in the middle or in front."""
    quarter = prompts // 4
    counts: dict[View, int] = {"end": prompts - 2 * quarter, "middle": quarter, "front": quarter}
    return [view for view, count in counts.items() for _ in range(count)]


def bound(batch: Batch, features: Tensor) -> Tensor:
    """Compute an upper bound of the expected cross-entropy under a Gaussian of the class embeddings.

    E log Σ_c exp(s z·(w_c - w_y)) <= log Σ_c exp(s z·(μ_c - μ_y) + s²/2 Var[z·(w_c - w_y)])

    The bound is cross-entropy with a variance added to the logits. The variance of the correct class is 0. The mean of
    the Gaussian is that of the L2-normalised embeddings w. Of the covariance of two classes only the diagonal is used.

    Args:
        batch: The images of the step.
        features: Class features of n prompts, [n, C, D].
    """
    embeddings = F.normalize(features, dim=-1)
    mean = embeddings.mean(0)
    centered = embeddings - mean
    label, squares = centered[:, batch.labels], batch.image_features.square()  # [n, B, D], [B, D]
    variance = squares @ centered.square().sum(0).t() + (squares * label.square().sum(0)).sum(-1, keepdim=True)
    variance = (variance - 2 * torch.einsum("nbd,ncd->bc", squares * label, centered)) / (len(embeddings) + 1)
    logits = batch.scale * batch.image_features @ mean.t() + batch.scale**2 / 2 * variance
    return F.cross_entropy(logits, batch.labels)


def likeness(own: Tensor) -> Tensor:
    """Compute the orthogonality loss: the mean absolute cosine over all pairs of prompts.

    Args:
        own: Embeddings of the prompts without a class name, [K, D].
    """
    embeddings = F.normalize(own, dim=-1)
    cosines = embeddings @ embeddings.t()
    return cosines[~torch.eye(len(embeddings), dtype=torch.bool, device=embeddings.device)].abs().mean()


@dataclass(frozen=True)
class Task:
    """A class list, prepared for the losses.

    Attributes:
        encoders: An encoder of the class names for each view.
        alone: An encoder of prompts without a class name.
    """

    encoders: Mapping[View, TextEncoder]
    alone: TextEncoder

    @classmethod
    def of(cls, model: Model, tokens: ClassTokens, length: int, chunk: int | None) -> Task:
        """Prepare a class list for prompts of `length` vectors."""
        nameless = ClassTokens(("",), ((),), torch.zeros(1, dtype=torch.long))
        return cls(
            {view: TextEncoder(model.text, tokens, length, (view,), chunk=chunk) for view in VIEWS},
            TextEncoder(model.text, nameless, length, ("end",)),
        )

    def nameless(self, contexts: Tensor) -> Tensor:
        """Compute the embeddings [K, D] of contexts [K, M, d] without a class name."""
        if self.alone.tower.supports_packed:  # one forward pass for all contexts is many times faster
            return torch.vmap(lambda context: self.alone(context)[0, 0])(contexts)
        return torch.cat([self.alone(context)[0] for context in contexts])


def step(
    task: Task, contexts: Tensor, chosen: Sequence[int], batch: Batch, orthogonality: float
) -> tuple[Losses, Tensor]:
    """Compute the losses of one step and their gradient.

    A long class list is encoded in chunks, one prompt after the other.

    Args:
        task: The class list.
        contexts: The contexts of all prompts, [K, M, d].
        chosen: The indices of the prompts that the step uses.
        batch: The images of the step.
        orthogonality: The weight of the orthogonality loss.

    Returns:
        The losses, and the gradient [K, M, d] w.r.t. all contexts.
    """
    views = places(len(contexts))
    encoders = [task.encoders[views[k]] for k in chosen]
    single_pass = encoders[0].single_pass
    p = contexts.detach().requires_grad_()
    with torch.set_grad_enabled(single_pass):
        features = torch.stack([encoder(p[k])[0] for encoder, k in zip(encoders, chosen, strict=True)])
    if not single_pass:
        features.requires_grad_()
    ce = bound(batch, features)
    if single_pass:
        (gradient,) = torch.autograd.grad(ce, p)
    else:
        (feature_gradients,) = torch.autograd.grad(ce, features)
        gradient = torch.zeros_like(contexts)
        for encoder, k, u in zip(encoders, chosen, feature_gradients, strict=True):
            (gradient[k],) = encoder.vjp(contexts[k], u[None])
    losses = {"bound": ce.item()}
    if orthogonality:
        cosine = likeness(task.nameless(p))
        gradient += torch.autograd.grad(orthogonality * cosine, p)[0]
        losses["likeness"] = cosine.item()
    return losses, gradient


def train(context: FitContext, config: ProdaConfig) -> Training:
    """Prepare the training of all contexts [K, M, d]. Each step uses some prompts, and all are used equally often."""
    model, learn, device = context.model, config.learn, context.model.device
    features, labels = context.features(learn)
    tokens = _tokens(model, context.source.names, learn.length)
    chunk = learn.chunk and max(1, learn.chunk // config.prompts_per_step)
    task = Task.of(model, tokens, learn.length, chunk)
    generator = torch.Generator().manual_seed(learn.seed)
    initial = [initial_context(model, learn.length, learn.words, generator) for _ in range(config.prompts)]
    state = State.sgd([torch.stack(initial).to(device)], learn)
    steps_per_epoch, groups = len(batches(len(labels), learn, 0)), config.prompts // config.prompts_per_step

    def gradients(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        cycle, group = divmod(epoch * steps_per_epoch + number, groups)
        order = random.Random(f"prompts {learn.seed} {cycle}").sample(range(config.prompts), config.prompts)
        prompts = order[group * config.prompts_per_step : (group + 1) * config.prompts_per_step]
        crops = features[chosen, epoch % features.shape[1]]
        batch = Batch(crops.to(device), labels[chosen].to(device), model.scale)
        losses, gradient = step(task, state.parameters[0], prompts, batch, config.orthogonality)
        return losses, [gradient]

    return Training(["contexts"], state, gradients, len(labels), learn)


def mean_embedding(model: Model, contexts: Tensor, names: Sequence[str], config: ProdaConfig) -> Classifier:
    """Make the classifier of the mean of the Gaussian.

    A class vector is the mean of the L2-normalised embeddings over all contexts [K, M, d]. It is not normalised again.
    """
    tokens = _tokens(model, names, contexts.shape[1])
    task = Task.of(model, tokens, contexts.shape[1], config.learn.chunk)
    total = torch.zeros(len(tokens), model.dimension)
    with torch.no_grad():
        for view, context in zip(places(len(contexts)), contexts.to(model.device), strict=True):
            total += F.normalize(task.encoders[view](context)[0], dim=-1).cpu()
    return Classifier.of(model, tokens.names, total / len(contexts), stage="proda", settings=dataclasses.asdict(config))


def _tokens(model: Model, names: Sequence[str], length: int) -> ClassTokens:
    return class_tokens(model.text.tokenizer, names, length, PROMPT_ALONE)


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Make the classifier of the mean embedding of all prompts."""
    return mean_embedding(fitted.model, fitted.tensors["contexts"], names, fitted.config)


PRODA = Method(
    "proda",
    ProdaConfig(),
    classify,
    train,
    tensors={"contexts": "K M d"},
)
