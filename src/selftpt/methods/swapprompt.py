"""SwapPrompt: a prompt learns from the unlabelled test pictures what its own moving average says of another crop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import ContrastConfig, PredictConfig, TrainConfig, at_least, setting
from selftpt.data.features import ViewSpec
from selftpt.errors import SelfTPTError
from selftpt.losses import cross_entropy
from selftpt.methods.method import Fitted, Job, Method, Predictor
from selftpt.models import Model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.prompt import initial_context
from selftpt.training import Losses, RunFiles, State, train


@dataclass(frozen=True)
class Settings(TrainConfig):
    """Of tuning on the test pictures."""

    epochs: int = setting(5, "epochs over the test pictures")
    shots: int | None = setting(16, "pictures of each class that get a pseudo-label; 0 labels all")
    crops: int | None = setting(4, "random crops of each picture, pairs of which are taken in turn")
    batch: int = setting(32, "pictures a step")
    swap: float = setting(1.0, "weight of the swapped prediction")
    pseudo: float = setting(1.0, "weight of the cross-entropy with pseudo-labels")
    decay: float = setting(0.99, "decay of the moving average that is the target prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "swap", "pseudo", "decay")
        if self.decay >= 1:
            raise SelfTPTError(f"decay must be below 1, not {self.decay}")
        if self.swap == self.pseudo == 0:
            raise SelfTPTError("both losses have weight 0: nothing to learn from")
        if self.crops is None or self.crops % 2:
            raise SelfTPTError(f"crops must be an even number, for they are taken in pairs, not {self.crops}")


def pseudo_labels(probabilities: Tensor, shots: int | None) -> Tensor:
    """The best class of the `shots` pictures surest of it, -1 for all others: [N, C] to [N]."""
    sure, best = probabilities.max(-1)
    labels = torch.full_like(best, -1)
    for label in best.unique().tolist():
        own = (best == label).nonzero()[:, 0]
        surest = sure[own].argsort(descending=True, stable=True)[:shots]
        labels[own[surest]] = label
    return labels


def swapped_prediction(first: Tensor, second: Tensor, online: Tensor, target: Tensor, scale: float) -> Tensor:
    """Each crop under the online prompt predicts the classes of the other under the target prompt.

    first, second: unit features of the two crops [B, D]; online, target: text features [C, D], the target's constant.
    """
    online, target = F.normalize(online, dim=-1), F.normalize(target, dim=-1)

    def predict(crop: Tensor, other: Tensor) -> Tensor:
        return F.cross_entropy(scale * crop @ online.t(), (scale * other @ target.t()).softmax(-1))

    return (predict(first, second) + predict(second, first)) / 2


def objective(online: Tensor, target: Tensor, pair: Tensor, labels: Tensor, scale: float, settings: Settings) -> Tensor:
    """The weighted sum of the swapped prediction and, for crops of pictures that have one, of the pseudo-label's loss.

    online, target: [C, D]; pair: unit features of two crops [B, 2, D]; labels: [B], -1 for none.
    """
    loss = settings.swap * swapped_prediction(pair[:, 0], pair[:, 1], online, target, scale)
    known = labels >= 0
    if settings.pseudo and known.any():
        both = labels[known].repeat_interleave(2)
        loss = loss + settings.pseudo * cross_entropy(pair[known].flatten(0, 1), online, both, scale)
    return loss


def tune(model: Model, encoder: TextEncoder, crops: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """The online prompt [M, d] after all epochs.

    crops: unit features [N, pairs, 2, D], of which each epoch takes the next pair; labels: [N], -1 for none.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    online = initial_context(model, settings.length, settings.words, generator).to(model.device)
    state = State.sgd([online], settings)
    target = online.clone()

    def step(chosen: Tensor, epoch: int, _number: int) -> tuple[Losses, Sequence[Tensor]]:
        target.lerp_(online, 1 - settings.decay)
        with torch.no_grad():
            taught = encoder(target)[0]
        pair = crops[chosen, epoch % crops.shape[1]]
        loss, gradients = prompt_gradient(
            encoder, online, lambda f: objective(f[0], taught, pair, labels[chosen], model.scale, settings)
        )
        return {"loss": loss.item()}, gradients

    train(state, step, len(labels), settings, RunFiles(None, "", model.id.meaningless))
    return online


def fit(job: Job, settings: Settings) -> Fitted:
    """Everything is learned from the test pictures."""
    model = job.model

    def predictor(names: Sequence[str], template: str) -> Predictor:
        tokens = class_tokens(model.text.tokenizer, names, settings.length, ContrastConfig(template=template))
        hand = F.normalize(encode_template(model.text, tokens, template, settings.chunk), dim=-1)
        encoder = TextEncoder(model.text, tokens, settings.length, ("end",), chunk=settings.chunk)

        def predict(shown: Tensor) -> Tensor:
            shown = shown.to(model.device)
            whole, crops = shown[:, 0], shown[:, 1:].unflatten(1, (-1, 2))
            labels = pseudo_labels((model.scale * whole @ hand.t()).softmax(-1), settings.shots)
            prompt = tune(model, encoder, crops, labels, settings)
            with torch.no_grad():
                classes = F.normalize(encoder(prompt)[0], dim=-1)
            return (model.scale * whole @ classes.t()).softmax(-1).cpu()

        return predict

    return predictor


def looks(settings: Settings) -> list[ViewSpec]:
    """The picture, and the crops."""
    limit = settings.max_megapixels
    return [ViewSpec(max_megapixels=limit), ViewSpec(settings.crops or 0, PredictConfig.seed, limit)]


SWAPPROMPT = Method(
    "swapprompt",
    "a prompt tuned on the test pictures by swapped prediction",
    "Ma et al., NeurIPS 2023",
    Settings(),
    fit,
    "5 views, and tuning",
    "all test pictures at once",
    looks,
    whole=True,
)
