"""SwapPrompt: a prompt tuned on unlabelled test images to predict what its moving average predicts for another crop."""

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
from selftpt.methods.method import FittedMethod, Method, StreamPredictFunction
from selftpt.models import Model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.prompt import initial_context
from selftpt.training import Losses, RunFiles, State, Training


@dataclass(frozen=True)
class SwapPromptConfig(TrainConfig):
    """Settings of the tuning on the test images."""

    epochs: int = setting(5, "epochs over the test images")
    shots: int | None = setting(16, "images per class that get a pseudo-label; none labels all")
    crops: int | None = setting(4, "random crops of each image, used in pairs; an even number", above=0)
    batch: int = setting(32, "images per step")
    swap: float = setting(1.0, "weight of the swapped prediction", minimum=0)
    pseudo: float = setting(1.0, "weight of the cross-entropy with pseudo-labels", minimum=0)
    decay: float = setting(0.99, "decay of the moving average that is the target prompt", minimum=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.swap == self.pseudo == 0:
            raise SelfTPTError("swap and pseudo are both 0, so there is no loss: set at least one of them above 0")
        if self.crops is None or self.crops % 2:
            raise SelfTPTError(f"crops must be an even number, because crops are used in pairs, but is {self.crops}")


def pseudo_labels(probabilities: Tensor, shots: int | None) -> Tensor:
    """Give pseudo-labels to the most confident images of each predicted class.

    Args:
        probabilities: Zero-shot probabilities, [N, C].
        shots: The number of images per class; None means all.

    Returns:
        Labels [N], -1 for an image without a pseudo-label.
    """
    confidence, best = probabilities.max(-1)
    labels = torch.full_like(best, -1)
    for label in best.unique().tolist():
        images = (best == label).nonzero()[:, 0]
        most_confident = confidence[images].argsort(descending=True, stable=True)[:shots]
        labels[images[most_confident]] = label
    return labels


def swapped_prediction(first: Tensor, second: Tensor, online: Tensor, target: Tensor, scale: float) -> Tensor:
    """Compute the loss of swapped prediction, averaged over both directions.

    The online prompt with one crop predicts the class probabilities of the target prompt with the other crop.

    Args:
        first: L2-normalised features of one crop, [B, D].
        second: L2-normalised features of another crop, [B, D].
        online: Text features of the online prompt, [C, D].
        target: Text features of the target prompt, [C, D].
        scale: 1 / τ.
    """
    online, target = F.normalize(online, dim=-1), F.normalize(target, dim=-1)

    def predict(crop: Tensor, other: Tensor) -> Tensor:
        return F.cross_entropy(scale * crop @ online.t(), (scale * other @ target.t()).softmax(-1))

    return (predict(first, second) + predict(second, first)) / 2


def objective(
    online: Tensor, target: Tensor, pair: Tensor, labels: Tensor, scale: float, config: SwapPromptConfig
) -> Tensor:
    """Compute the weighted sum of the swapped prediction and the cross-entropy of images with a pseudo-label.

    Args:
        online: Text features of the online prompt, [C, D].
        target: Text features of the target prompt, [C, D].
        pair: L2-normalised features of two crops, [B, 2, D].
        labels: Pseudo-labels [B], -1 for an image without one.
        scale: 1 / τ.
        config: The weights.
    """
    loss = config.swap * swapped_prediction(pair[:, 0], pair[:, 1], online, target, scale)
    known = labels >= 0
    if config.pseudo and known.any():
        crop_labels = labels[known].repeat_interleave(2)
        loss = loss + config.pseudo * cross_entropy(pair[known].flatten(0, 1), online, crop_labels, scale)
    return loss


def tune(model: Model, encoder: TextEncoder, crops: Tensor, labels: Tensor, config: SwapPromptConfig) -> Tensor:
    """Tune the online prompt on all test images.

    Args:
        model: The frozen model.
        encoder: The encoder of the class names.
        crops: L2-normalised features of pairs of crops, [N, pairs, 2, D]; each epoch uses the next pair.
        labels: Pseudo-labels [N], -1 for an image without one.
        config: The configuration.

    Returns:
        The online prompt, [M, d].
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


def predictor(fitted: FittedMethod, names: Sequence[str], template: str) -> StreamPredictFunction:
    """Make a function that tunes a prompt on all test images and classifies them."""
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
    """Return the image and the crops."""
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
    extra_cost=cost,
)
