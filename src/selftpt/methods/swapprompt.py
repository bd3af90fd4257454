"""SwapPrompt: on the unlabelled test images, a prompt learns the predictions of its moving average for another crop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.config import ContrastConfig, TrainConfig, setting
from selftpt.data.views import ViewSpec, image_and_crops
from selftpt.errors import SelfTPTError
from selftpt.losses import cross_entropy
from selftpt.methods.method import FittedMethod, Method, StreamProbabilities
from selftpt.models import Model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.prompt import initial_context
from selftpt.training import Losses, RunFiles, State, Training


@dataclass(frozen=True)
class SwapPromptConfig(TrainConfig):
    """Tuning on the test images."""

    epochs: int = setting(5, "epochs over the test images")
    shots: int | None = setting(16, "images per class that get a pseudo-label; none labels all")
    crops: int | None = setting(4, "random crops of each image, an even number, which are used in pairs", above=0)
    batch: int = setting(32, "images per step")
    swap: float = setting(1.0, "weight of the swapped prediction", minimum=0)
    pseudo: float = setting(1.0, "weight of the cross-entropy with pseudo-labels", minimum=0)
    decay: float = setting(0.99, "decay of the moving average that is the target prompt", minimum=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.swap == self.pseudo == 0:
            raise SelfTPTError("both losses have weight 0: nothing to learn from")
        if self.crops is None or self.crops % 2:
            raise SelfTPTError(f"crops must be an even number, because they are used in pairs, not {self.crops}")


def pseudo_labels(probabilities: Tensor, shots: int | None) -> Tensor:
    """For each class the `shots` images most confident of it are labelled, all others are -1: [N, C] to [N]."""
    sure, best = probabilities.max(-1)
    labels = torch.full_like(best, -1)
    for label in best.unique().tolist():
        own = (best == label).nonzero()[:, 0]
        surest = sure[own].argsort(descending=True, stable=True)[:shots]
        labels[own[surest]] = label
    return labels


def swapped_prediction(first: Tensor, second: Tensor, online: Tensor, target: Tensor, scale: float) -> Tensor:
    """Each crop under the online prompt predicts the classes of the other under the target prompt.

    `first` and `second` are L2-normalised features of two crops [B, D], `online` and `target` text features [C, D].
    """
    online, target = F.normalize(online, dim=-1), F.normalize(target, dim=-1)

    def predict(crop: Tensor, other: Tensor) -> Tensor:
        return F.cross_entropy(scale * crop @ online.t(), (scale * other @ target.t()).softmax(-1))

    return (predict(first, second) + predict(second, first)) / 2


def objective(
    online: Tensor, target: Tensor, pair: Tensor, labels: Tensor, scale: float, config: SwapPromptConfig
) -> Tensor:
    """The weighted sum of the swapped prediction and, for images with a pseudo-label, of its cross-entropy.

    Args:
        online: Text features of the online prompt, [C, D].
        target: Text features of the target prompt, [C, D].
        pair: L2-normalised features of two crops, [B, 2, D].
        labels: Pseudo-labels [B], -1 for none.
        scale: 1 / τ.
        config: The weights.
    """
    loss = config.swap * swapped_prediction(pair[:, 0], pair[:, 1], online, target, scale)
    known = labels >= 0
    if config.pseudo and known.any():
        both = labels[known].repeat_interleave(2)
        loss = loss + config.pseudo * cross_entropy(pair[known].flatten(0, 1), online, both, scale)
    return loss


def tune(model: Model, encoder: TextEncoder, crops: Tensor, labels: Tensor, config: SwapPromptConfig) -> Tensor:
    """The online prompt [M, d] after all epochs.

    `crops` are L2-normalised features [N, pairs, 2, D], of which each epoch takes the next pair; `labels` [N] are -1
    for none.
    """
    generator = torch.Generator().manual_seed(config.seed)
    online = initial_context(model, config.length, config.words, generator).to(model.device)
    state = State.sgd([online], config)
    target = online.clone()

    def step(chosen: Tensor, epoch: int, _number: int) -> tuple[Losses, Sequence[Tensor]]:
        target.lerp_(online, 1 - config.decay)
        with torch.no_grad():
            targets = encoder(target)[0]
        pair = crops[chosen, epoch % crops.shape[1]]
        loss, gradients = prompt_gradient(
            encoder, online, lambda f: objective(f[0], targets, pair, labels[chosen], model.scale, config)
        )
        return {"loss": loss.item()}, gradients

    Training(["context"], state, step, len(labels), config).run(RunFiles(None, "", model.id.random_init))
    return online


def predictor(fitted: FittedMethod, names: Sequence[str], template: str) -> StreamProbabilities:
    """Everything is learned from the test images."""
    model, config = fitted.model, fitted.config
    tokens = class_tokens(model.text.tokenizer, names, config.length, ContrastConfig(template=template))
    hand_crafted = F.normalize(encode_template(model.text, tokens, template, config.chunk), dim=-1)
    encoder = TextEncoder(model.text, tokens, config.length, ("end",), chunk=config.chunk)

    def probabilities(blocks: Iterable[Tensor]) -> Tensor:
        views = torch.cat(list(blocks)).to(model.device)
        images, crops = views[:, 0], views[:, 1:].unflatten(1, (-1, 2))
        labels = pseudo_labels((model.scale * images @ hand_crafted.t()).softmax(-1), config.shots)
        prompt = tune(model, encoder, crops, labels, config)
        with torch.no_grad():
            classes = F.normalize(encoder(prompt)[0], dim=-1)
        return (model.scale * images @ classes.t()).softmax(-1)

    return probabilities


def views(config: SwapPromptConfig) -> list[ViewSpec]:
    """The image and the crops."""
    assert config.crops is not None
    return image_and_crops(config.crops + 1, max_megapixels=config.max_megapixels)


def cost(_config: SwapPromptConfig) -> str:
    return "tuning"


SWAPPROMPT = Method(
    "swapprompt",
    SwapPromptConfig(),
    predictor,
    views=views,
    inputs="views",
    transductive=True,
    uses_seed=True,
    more_cost=cost,
)
