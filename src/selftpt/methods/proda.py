"""ProDA: many prompts, and the Gaussian that their class embeddings make."""

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
    """Which values are not the authors' own is said in the documentation."""

    learn: TrainConfig = field(default_factory=lambda: TrainConfig(length=16, words="", epochs=100, batch=20, lr=0.002))
    prompts: int = setting(32, "prompts whose distribution is learned", minimum=2)
    prompts_per_step: int = setting(4, "prompts per step", above=0)
    orthogonality: float = setting(0.1, "weight of the loss that keeps prompts apart", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts % self.prompts_per_step:
            raise SelfTPTError(f"prompts_per_step must divide the {self.prompts} prompts, not {self.prompts_per_step}")


def places(prompts: int) -> list[View]:
    """Where each prompt has the class name: half of them at the end, a quarter in the middle, a quarter in front."""
    quarter = prompts // 4
    counts: dict[View, int] = {"end": prompts - 2 * quarter, "middle": quarter, "front": quarter}
    return [view for view, count in counts.items() for _ in range(count)]


def bound(batch: Batch, features: Tensor) -> Tensor:
    """The surrogate loss: an upper bound of the expected cross-entropy under a Gaussian of the class embeddings.

    The Gaussian has the mean of the prompts' unit embeddings, and of their covariance the same coordinate of any two
    classes. E log Σ_c exp(s z·(w_c - w_y)) <= log Σ_c exp(s z·(μ_c - μ_y) + s²/2 Var[z·(w_c - w_y)]), which is
    cross-entropy with a variance added to the logits; that of the right class is 0.
    features: [n, C, D], of n prompts.
    """
    unit = F.normalize(features, dim=-1)
    mean = unit.mean(0)
    off = unit - mean
    own, squares = off[:, batch.labels], batch.images.square()  # [n, B, D], [B, D]
    variance = squares @ off.square().sum(0).t() + (squares * own.square().sum(0)).sum(-1, keepdim=True)
    variance = (variance - 2 * torch.einsum("nbd,ncd->bc", squares * own, off)) / (len(unit) + 1)
    logits = batch.scale * batch.images @ mean.t() + batch.scale**2 / 2 * variance
    return F.cross_entropy(logits, batch.labels)


def likeness(own: Tensor) -> Tensor:
    """The orthogonality loss: the mean size of the cosine of two prompts, of their embeddings without a name [K, D]."""
    unit = F.normalize(own, dim=-1)
    cosines = unit @ unit.t()
    return cosines[~torch.eye(len(unit), dtype=torch.bool, device=unit.device)].abs().mean()


@dataclass(frozen=True)
class Task:
    """A class list ready for the losses: encoders by where the name is, and one of prompts without a name."""

    encoders: Mapping[View, TextEncoder]
    alone: TextEncoder

    @classmethod
    def of(cls, model: Model, tokens: ClassTokens, length: int, chunk: int | None) -> Task:
        """A class list with prompts of `length` vectors."""
        nameless = ClassTokens(("",), ((),), torch.zeros(1, dtype=torch.long))
        return cls(
            {view: TextEncoder(model.text, tokens, length, (view,), chunk=chunk) for view in VIEWS},
            TextEncoder(model.text, nameless, length, ("end",)),
        )

    def nameless(self, contexts: Tensor) -> Tensor:
        """The embeddings [K, D] of contexts [K, M, d] without a name."""
        if self.alone.tower.supports_packed:  # all in one forward pass, which is many times faster
            return torch.vmap(lambda context: self.alone(context)[0, 0])(contexts)
        return torch.cat([self.alone(context)[0] for context in contexts])


def step(
    task: Task, contexts: Tensor, chosen: Sequence[int], batch: Batch, orthogonality: float
) -> tuple[Losses, Tensor]:
    """The losses of a step that takes the `chosen` of all prompts, and their gradient [K, M, d] by all contexts.

    A long class list is walked in chunks, one prompt after the other.
    """
    where = places(len(contexts))
    encoders = [task.encoders[where[k]] for k in chosen]
    whole = encoders[0].unchunked
    p = contexts.detach().requires_grad_()
    with torch.set_grad_enabled(whole):
        features = torch.stack([encoder(p[k])[0] for encoder, k in zip(encoders, chosen, strict=True)])
    if not whole:
        features.requires_grad_()
    ce = bound(batch, features)
    if whole:
        (gradient,) = torch.autograd.grad(ce, p)
    else:
        (by_features,) = torch.autograd.grad(ce, features)
        gradient = torch.zeros_like(contexts)
        for encoder, k, u in zip(encoders, chosen, by_features, strict=True):
            (gradient[k],) = encoder.vjp(contexts[k], u[None])
    losses = {"bound": ce.item()}
    if orthogonality:
        alike = likeness(task.nameless(p))
        gradient += torch.autograd.grad(orthogonality * alike, p)[0]
        losses["likeness"] = alike.item()
    return losses, gradient


def train(context: FitContext, config: ProdaConfig) -> Training:
    """All contexts [K, M, d]; every step takes some of them, and every prompt has its turn."""
    model, learn, device = context.model, config.learn, context.model.device
    features, labels = context.features(learn)
    tokens = _tokens(model, context.source.names, learn.length)
    chunk = learn.chunk and max(1, learn.chunk // config.prompts_per_step)
    task = Task.of(model, tokens, learn.length, chunk)
    generator = torch.Generator().manual_seed(learn.seed)
    drawn = [initial_context(model, learn.length, learn.words, generator) for _ in range(config.prompts)]
    state = State.sgd([torch.stack(drawn).to(device)], learn)
    steps, turns = len(batches(len(labels), learn, 0)), config.prompts // config.prompts_per_step

    def gradients(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        turn, place = divmod(epoch * steps + number, turns)
        order = random.Random(f"prompts {learn.seed} {turn}").sample(range(config.prompts), config.prompts)
        prompts = order[place * config.prompts_per_step : (place + 1) * config.prompts_per_step]
        crops = features[chosen, epoch % features.shape[1]]
        batch = Batch(crops.to(device), labels[chosen].to(device), model.scale)
        losses, gradient = step(task, state.parameters[0], prompts, batch, config.orthogonality)
        return losses, [gradient]

    return Training(["contexts"], state, gradients, len(labels), learn)


def mean_embedding(model: Model, contexts: Tensor, names: Sequence[str], config: ProdaConfig) -> Classifier:
    """The classifier of the Gaussian's mean [C, D]: the mean of the unit embeddings of all prompts [K, M, d]."""
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
    """The mean embedding of all prompts."""
    return mean_embedding(fitted.model, fitted.tensors["contexts"], names, fitted.config)


PRODA = Method(
    "proda",
    ProdaConfig(),
    classify,
    train,
    tensors={"contexts": "K M d"},
)
