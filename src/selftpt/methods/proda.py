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
from selftpt.config import PROMPT_ALONE, VIEWS, TrainConfig, View, at_least, setting
from selftpt.errors import SelfTPTError
from selftpt.methods.method import Fitted, Job, Method
from selftpt.models import Model
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import ClassTokens, class_tokens
from selftpt.objective import Batch
from selftpt.prompt import initial_context
from selftpt.training import Losses, RunFiles, State, batches, train


@dataclass(frozen=True)
class Settings:
    """What of it is not the authors' own is told in the documentation."""

    learn: TrainConfig = field(default_factory=lambda: TrainConfig(length=16, words="", epochs=100, batch=20, lr=0.002))
    prompts: int = setting(32, "prompts of which the distribution is learned")
    prompts_per_step: int = setting(4, "of these, how many a step takes")
    orthogonality: float = setting(0.1, "weight of the loss that holds prompts apart")

    def __post_init__(self) -> None:
        if self.prompts < 2:
            raise SelfTPTError(f"prompts must be 2 or more, not {self.prompts}: one has no distribution")
        if self.prompts_per_step < 1 or self.prompts % self.prompts_per_step:
            raise SelfTPTError(f"prompts_per_step must divide the {self.prompts} prompts, not {self.prompts_per_step}")
        at_least(0, self, "orthogonality")


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


def descent(
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


def learn(
    model: Model, names: Sequence[str], features: Tensor, labels: Tensor, files: RunFiles, settings: Settings
) -> Tensor:
    """All contexts [K, M, d], learned of crops' features [N, crops, D] and labels [N]. Every prompt has its turn."""
    config, device = settings.learn, model.device
    tokens = _tokens(model, names, config.length)
    chunk = config.chunk and max(1, config.chunk // settings.prompts_per_step)
    task = Task.of(model, tokens, config.length, chunk)
    generator = torch.Generator().manual_seed(config.seed)
    drawn = [initial_context(model, config.length, config.words, generator) for _ in range(settings.prompts)]
    state = State.sgd([torch.stack(drawn).to(device)], config)
    steps, turns = len(batches(len(labels), config, 0)), settings.prompts // settings.prompts_per_step

    def step(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        turn, place = divmod(epoch * steps + number, turns)
        order = random.Random(f"prompts {config.seed} {turn}").sample(range(settings.prompts), settings.prompts)
        prompts = order[place * settings.prompts_per_step : (place + 1) * settings.prompts_per_step]
        crops = features[chosen, epoch % features.shape[1]]
        batch = Batch(crops.to(device), labels[chosen].to(device), model.scale)
        losses, gradient = descent(task, state.parameters[0], prompts, batch, settings.orthogonality)
        return losses, [gradient]

    train(state, step, len(labels), config, files)
    return state.parameters[0]


def mean_embedding(model: Model, contexts: Tensor, names: Sequence[str], settings: Settings) -> Classifier:
    """The classifier of the Gaussian's mean [C, D]: the mean of the unit embeddings of all prompts [K, M, d]."""
    tokens = _tokens(model, names, contexts.shape[1])
    task = Task.of(model, tokens, contexts.shape[1], settings.learn.chunk)
    total = torch.zeros(len(tokens), model.dimension)
    with torch.no_grad():
        for view, context in zip(places(len(contexts)), contexts.to(model.device), strict=True):
            total += F.normalize(task.encoders[view](context)[0], dim=-1).cpu()
    return Classifier.of(
        model, tokens.names, total / len(contexts), stage="proda", settings=dataclasses.asdict(settings)
    )


def _tokens(model: Model, names: Sequence[str], length: int) -> ClassTokens:
    return class_tokens(model.text.tokenizer, names, length, PROMPT_ALONE)


def fit(job: Job, settings: Settings) -> Fitted:
    """Prompts of the source; for class names, their mean embedding."""

    def make(features: Tensor, labels: Tensor, files: RunFiles) -> dict[str, Tensor]:
        return {"contexts": learn(job.model, job.teacher.names, features, labels, files, settings)}

    contexts = job.learned("proda", settings, make)["contexts"]
    return lambda names, _template: mean_embedding(job.model, contexts, names, settings)


PRODA = Method("proda", "the mean of 32 prompts, learned as a Gaussian", "Lu et al., CVPR 2022", Settings(), fit)
