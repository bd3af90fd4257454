"""TPT: for each picture the prompt is tuned until its confident views agree, and the picture is classified with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import PROMPT_ALONE, AdaptConfig, LearnConfig, PredictConfig, setting
from selftpt.data.features import ViewSpec
from selftpt.errors import SelfTPTError
from selftpt.methods.coop import COOP
from selftpt.methods.method import Fitted, Job, Method
from selftpt.methods.views import confident_views, views_of
from selftpt.models import Model
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.progress import Bar


@dataclass(frozen=True)
class TuneConfig:
    """Tuning a prompt to one picture, by the values of TPT's authors."""

    views: int = setting(64, "looks at a picture: itself and random crops")
    augmix: bool = setting(False, "whether AugMix is applied to the crops")
    confident: float = setting(0.1, "share of the views that is tuned on, the most confident ones")
    steps: int = setting(1, "steps of AdamW")
    lr: float = setting(0.005, "learning rate")
    weight_decay: float = setting(0.01, "weight decay of AdamW")
    chunk: int | None = setting(256, "classes walked at once, longer lists in parts; 0 walks all at once")

    def __post_init__(self) -> None:
        PredictConfig(views=self.views, confident=self.confident)
        AdaptConfig(steps=self.steps, lr=self.lr, weight_decay=self.weight_decay, chunk=self.chunk)


@dataclass(frozen=True)
class Settings(TuneConfig):
    """From words."""

    words: str = setting("a photo of a", "words the prompt starts from")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.words.strip():
            raise SelfTPTError("words are what the prompt starts from: give one at least")


@dataclass(frozen=True)
class LearnedSettings(TuneConfig):
    """From the prompt that `coop` learns."""

    learn: LearnConfig = field(default_factory=lambda: COOP.settings.learn)


def most_confident(logits: Tensor, share: float) -> Tensor:
    """Of views with logits [V, C], the share of least entropy, one at least: their indices [K]."""
    return confident_views(logits.softmax(-1), share)


def mean_entropy(logits: Tensor) -> Tensor:
    """The entropy of the mean of the probabilities that logits [K, C] stand for: TPT's loss."""
    logs = logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    return -(logs.exp() * logs).sum()


class Tuner:
    """A predictor that tunes a prompt [M, d] to each picture, always from its beginning.

    The class features of the beginning are the same for all pictures: they are computed once, and their graph is kept,
    unless the class list is walked in chunks.

    select: logits [V, C] of the beginning to the views that are tuned on [K].
    loss: of the logits of those views [K, C] and the unit class vectors [C, D].
    """

    def __init__(
        self,
        model: Model,
        names: Sequence[str],
        prompt: Tensor,
        config: TuneConfig,
        select: Callable[[Tensor], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.config, self.scale, self.select, self.loss = config, model.scale, select, loss
        tokens = class_tokens(model.text.tokenizer, names, len(prompt), PROMPT_ALONE)
        self.encoder = TextEncoder(model.text, tokens, len(prompt), ("end",), chunk=config.chunk)
        self.prompt = prompt.detach().clone().to(model.text.embedding.weight).requires_grad_(self.encoder.unchunked)
        self.features = self.encoder(self.prompt)

    def __call__(self, shown: Tensor) -> Tensor:
        """Unit features [N, V, D], first those of the pictures themselves, to probabilities [N, C]."""
        answers = []
        with Bar("tuning", len(shown)) as bar:
            for views in shown.to(self.prompt):
                tuned = self.tune(views)
                with torch.no_grad():
                    answers.append(self._logits(views[0], self.encoder(tuned)).softmax(-1))
                if not answers[-1].isfinite().all():
                    raise SelfTPTError("the tuned prompt is no longer of numbers: lower the rate")
                bar.step()
        return torch.stack(answers).cpu()

    def tune(self, views: Tensor) -> Tensor:
        """The prompt [M, d] tuned to the views [V, D] of a picture."""
        objective = self.objective(views)
        prompt = self.prompt.detach().clone()
        optimizer = torch.optim.AdamW([prompt], lr=self.config.lr, weight_decay=self.config.weight_decay)
        for step in range(self.config.steps):
            if step == 0:
                prompt.grad = self.first_gradient(objective)
            else:
                _, (prompt.grad,) = prompt_gradient(self.encoder, prompt, objective)
            optimizer.step()
        return prompt

    def objective(self, views: Tensor) -> Callable[[Tensor], Tensor]:
        """What class features [1, C, D] are descended by, of the views [V, D] of a picture that are selected."""
        chosen = views[self.select(self._logits(views, self.features.detach()))]
        return lambda features: self.loss(self._logits(chosen, features), F.normalize(features[0], dim=-1))

    def first_gradient(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient [M, d] of a loss of the class features, at the beginning."""
        features = self.features.detach().requires_grad_()
        (u,) = torch.autograd.grad(loss(features), features)
        if self.encoder.unchunked:
            return torch.autograd.grad(self.features, self.prompt, u, retain_graph=True)[0]
        return self.encoder.vjp(self.prompt, u)[0]

    def _logits(self, views: Tensor, features: Tensor) -> Tensor:
        return self.scale * views @ F.normalize(features[0], dim=-1).t()


def tuner(model: Model, names: Sequence[str], prompt: Tensor, config: TuneConfig) -> Tuner:
    """TPT proper."""
    return Tuner(
        model,
        names,
        prompt,
        config,
        lambda logits: most_confident(logits, config.confident),
        lambda logits, _vectors: mean_entropy(logits),
    )


def fit(job: Job, settings: Settings) -> Fitted:
    """From words."""
    prompt = job.model.text.words(settings.words)
    return lambda names, _template: tuner(job.model, names, prompt, settings)


def fit_learned(job: Job, settings: LearnedSettings) -> Fitted:
    """From the prompt of CoOp."""
    prompt = job.prompt(settings.learn).context
    return lambda names, _template: tuner(job.model, names, prompt, settings)


def looks(settings: TuneConfig) -> list[ViewSpec]:
    """The picture, and its crops."""
    return views_of(settings.views, settings.augmix)


REFERENCE = "Shu et al., NeurIPS 2022"
COST, NEEDS = "64 views, 1 step", "features of views"
TPT = Method("tpt", "a prompt tuned to each picture", REFERENCE, Settings(), fit, COST, NEEDS, looks)
COOP_TPT = Method(
    "coop+tpt",
    "tpt from the prompt of coop",
    REFERENCE,
    LearnedSettings(),
    fit_learned,
    COST,
    NEEDS,
    looks,
    papers_epochs=lambda _settings: True,
)
