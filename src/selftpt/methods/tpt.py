"""TPT: for each image, a prompt is tuned to make its confident views agree, and then classifies the image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.classifier import confident_views
from selftpt.config import PROMPT_ALONE, Config, LearnConfig, setting
from selftpt.data.views import ViewSpec, image_and_crops
from selftpt.errors import SelfTPTError
from selftpt.methods.method import FittedMethod, Method, always
from selftpt.methods.self_tpt import PROMPT_TENSORS, learn_config, train
from selftpt.models import Model
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.progress import Bar


@dataclass(frozen=True)
class TuneConfig(Config):
    """Settings of tuning a prompt for one image. The defaults are those of TPT's authors."""

    views: int = setting(64, "views of an image: itself and random crops", above=0)
    augmix: bool = setting(False, "whether AugMix is applied to the crops")
    confidence_ratio: float = setting(
        0.1, "share of the views that is used for tuning, the most confident ones", above=0, maximum=1
    )
    steps: int = setting(1, "number of AdamW steps", minimum=0)
    lr: float = setting(0.005, "learning rate", above=0)
    weight_decay: float = setting(0.01, "weight decay of AdamW", minimum=0)
    chunk: int | None = setting(256, "classes encoded at once; none encodes all at once", above=0)


@dataclass(frozen=True)
class TptConfig(TuneConfig):
    """TPT whose initial prompt is the token embeddings of words."""

    words: str = setting("a photo of a", "words whose token embeddings initialise the prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.words.strip():
            raise SelfTPTError("words is empty: give at least one word to initialise the prompt")


@dataclass(frozen=True)
class CoopTptConfig(TuneConfig):
    """TPT whose initial prompt is the one that `coop` learns."""

    learn: LearnConfig = field(default_factory=lambda: LearnConfig(cpt=0, gm=0))


def most_confident(logits: Tensor, share: float) -> Tensor:
    """Return the indices [K] of the views with the lowest entropy, a share of logits [V, C], at least one."""
    return confident_views(logits.softmax(-1), share)


def mean_entropy(logits: Tensor) -> Tensor:
    """Compute TPT's loss: the entropy of the mean of the probabilities of logits [K, C]."""
    logs = logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    return -(logs.exp() * logs).sum()


class Tuner:
    """A predictor that tunes a prompt [M, d] for each image, always from the same initial prompt.

    The class features of the initial prompt are the same for all images. They are computed once, and their graph is
    kept unless the class list is encoded in chunks.

    Args:
        model: The frozen model.
        names: Class names, [C].
        prompt: The initial prompt, [M, d].
        config: The configuration.
        select: Takes the initial logits [V, C], and returns the indices [K] of the views that are used for tuning.
        loss: Takes the logits of these views [K, C] and the L2-normalised class vectors [C, D].
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

    def __call__(self, features: Tensor) -> Tensor:
        """Tune the prompt for each image and classify the image.

        Args:
            features: L2-normalised features of views, [N, V, D]; the first view is the image itself.

        Returns:
            Probabilities, [N, C].
        """
        results = []
        with Bar("tuning", len(features)) as bar:
            for views in features.to(self.prompt):
                tuned = self.tune(views)
                with torch.no_grad():
                    results.append(self._logits(views[0], self.encoder(tuned)).softmax(-1))
                if not results[-1].isfinite().all():
                    raise SelfTPTError(
                        "the tuned prompt gives probabilities that are not finite: lower the learning rate, lr"
                    )
                bar.step()
        return torch.stack(results)

    def tune(self, views: Tensor) -> Tensor:
        """Tune the prompt [M, d] for the views [V, D] of an image."""
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
        """Select views of an image [V, D], and return their loss as a function of class features [1, C, D]."""
        chosen = views[self.select(self._logits(views, self.features.detach()))]
        return lambda features: self.loss(self._logits(chosen, features), F.normalize(features[0], dim=-1))

    def first_gradient(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the gradient [M, d] of a loss of the class features at the initial prompt."""
        features = self.features.detach().requires_grad_()
        (u,) = torch.autograd.grad(loss(features), features)
        if self.encoder.unchunked:
            return torch.autograd.grad(self.features, self.prompt, u, retain_graph=True)[0]
        return self.encoder.vjp(self.prompt, u)[0]

    def _logits(self, views: Tensor, features: Tensor) -> Tensor:
        return self.scale * views @ F.normalize(features[0], dim=-1).t()


def tuner(model: Model, names: Sequence[str], prompt: Tensor, config: TuneConfig) -> Tuner:
    """Make a tuner with TPT's selection of views and TPT's loss."""
    return Tuner(
        model,
        names,
        prompt,
        config,
        lambda logits: most_confident(logits, config.confidence_ratio),
        lambda logits, _vectors: mean_entropy(logits),
    )


def predictor(fitted: FittedMethod, names: Sequence[str], _template: str) -> Tuner:
    """Make a tuner whose initial prompt is the token embeddings of words."""
    return tuner(fitted.model, names, fitted.model.text.embed_words(fitted.config.words), fitted.config)


def predictor_from_coop(fitted: FittedMethod, names: Sequence[str], _template: str) -> Tuner:
    """Make a tuner whose initial prompt is CoOp's."""
    return tuner(fitted.model, names, fitted.tensors["context"], fitted.config)


def views(config: TuneConfig) -> list[ViewSpec]:
    """Return the image and its crops."""
    return image_and_crops(config.views, config.augmix)


def cost(config: TuneConfig) -> str:
    return f"{config.steps} step{'' if config.steps == 1 else 's'}"


TPT = Method(
    "tpt",
    TptConfig(),
    predictor,
    views=views,
    inputs="views",
    more_cost=cost,
)
COOP_TPT = Method(
    "coop+tpt",
    CoopTptConfig(),
    predictor_from_coop,
    train,
    learn_config,
    views=views,
    inputs="views",
    tensors=PROMPT_TENSORS,
    uses_protocol_epochs=always,
    more_cost=cost,
)
