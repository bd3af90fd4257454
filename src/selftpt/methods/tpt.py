"""TPT: tunes a prompt for each image, and classifies the image with the tuned prompt.

The prompt is tuned by minimising the entropy of the mean prediction of the image's confident views.
"""

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
    """Configuration of test-time prompt tuning. The defaults are those of TPT's authors."""

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
    """Configuration of TPT with a prompt that is initialised from the token embeddings of `words`."""

    words: str = setting("a photo of a", "words whose token embeddings initialise the prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.words.strip():
            raise SelfTPTError("words is empty: give at least one word to initialise the prompt")


@dataclass(frozen=True)
class CoopTptConfig(TuneConfig):
    """Configuration of TPT that starts from a prompt learned with `coop`."""

    learn: LearnConfig = field(default_factory=lambda: LearnConfig(cpt=0, gm=0))


def most_confident(logits: Tensor, confidence_ratio: float) -> Tensor:
    """Return the indices [K] of the views with the lowest entropy, given logits [V, C].

    K = max(1, int(confidence_ratio * V)).
    """
    return confident_views(logits.softmax(-1), confidence_ratio)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Compute TPT's loss, the marginal entropy: the entropy of the mean of the probabilities of logits [K, C].

    Returns:
        A scalar.
    """
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
        loss: Takes the logits of these views [K, C] and the L2-normalised class vectors [C, D], and returns a scalar.
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
        self.prompt = prompt.detach().clone().to(model.text.embedding.weight).requires_grad_(self.encoder.single_pass)
        self.class_features = self.encoder(self.prompt)

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
                        "the tuned prompt gives probabilities that are not finite: lower the learning rate (`lr`)"
                    )
                bar.step()
        return torch.stack(results)

    def tune(self, views: Tensor) -> Tensor:
        """Tune the prompt [M, d] for the views [V, D] of an image."""
        loss = self.view_loss(views)
        prompt = self.prompt.detach().clone()
        optimizer = torch.optim.AdamW([prompt], lr=self.config.lr, weight_decay=self.config.weight_decay)
        for step in range(self.config.steps):
            if step == 0:
                prompt.grad = self.first_gradient(loss)
            else:
                _, (prompt.grad,) = prompt_gradient(self.encoder, prompt, loss)
            optimizer.step()
        return prompt

    def view_loss(self, views: Tensor) -> Callable[[Tensor], Tensor]:
        """Select views of an image, and return their loss as a function of the class features.

        Args:
            views: Features of views, [V, D].

        Returns:
            A function from class features [1, C, D] to a scalar.
        """
        chosen = views[self.select(self._logits(views, self.class_features.detach()))]
        return lambda features: self.loss(self._logits(chosen, features), F.normalize(features[0], dim=-1))

    def first_gradient(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the gradient [M, d], w.r.t. the initial prompt, of a loss that is a function of the class features.

        Args:
            loss: Takes class features [1, C, D], and returns a scalar.
        """
        features = self.class_features.detach().requires_grad_()
        (u,) = torch.autograd.grad(loss(features), features)
        if self.encoder.single_pass:
            return torch.autograd.grad(self.class_features, self.prompt, u, retain_graph=True)[0]
        return self.encoder.vjp(self.prompt, u)[0]

    def _logits(self, views: Tensor, class_features: Tensor) -> Tensor:
        return self.scale * views @ F.normalize(class_features[0], dim=-1).t()


def make_tuner(
    model: Model,
    names: Sequence[str],
    prompt: Tensor,
    config: TuneConfig,
    loss: Callable[[Tensor, Tensor], Tensor] = lambda logits, _vectors: marginal_entropy(logits),
) -> Tuner:
    """Make a tuner with TPT's selection of views and, by default, TPT's loss. The arguments are those of `Tuner`."""
    return Tuner(model, names, prompt, config, lambda logits: most_confident(logits, config.confidence_ratio), loss)


def predictor(fitted: FittedMethod, names: Sequence[str], _template: str) -> Tuner:
    """Make a tuner whose initial prompt is the token embeddings of words."""
    return make_tuner(fitted.model, names, fitted.model.text.embed_words(fitted.config.words), fitted.config)


def predictor_from_coop(fitted: FittedMethod, names: Sequence[str], _template: str) -> Tuner:
    """Make a tuner whose initial prompt is CoOp's."""
    return make_tuner(fitted.model, names, fitted.tensors["context"], fitted.config)


def views(config: TuneConfig) -> list[ViewSpec]:
    """Return the image and its crops."""
    return image_and_crops(config.views, config.augmix)


def cost(config: TuneConfig) -> str:
    """Return the cost per image in addition to the views, such as "1 step"."""
    return f"{config.steps} step{'' if config.steps == 1 else 's'}"


TPT = Method(
    "tpt",
    TptConfig(),
    predictor,
    views=views,
    inputs="views",
    extra_cost=cost,
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
    extra_cost=cost,
)
