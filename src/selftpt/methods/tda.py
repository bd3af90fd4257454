"""TDA: test images are a stream, and two caches of earlier images correct the logits of each image."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selftpt.adaptation import zero_shot
from selftpt.classifier import confident_views, entropy, select_views
from selftpt.config import INT_LIMIT, Config, setting
from selftpt.data.views import ViewSpec, image_and_crops
from selftpt.errors import SelfTPTError
from selftpt.methods.method import FittedMethod, Method, StreamPredictFunction

BLOCK = 512  # images that are compared with the caches at once
CONFIDENT = 0.1  # share of the views that is averaged, if there are several


@dataclass(frozen=True)
class TdaConfig(Config):
    """Settings of the caches. The defaults are the authors' for ImageNet."""

    positive_shots: int = setting(3, "images per class that the positive cache keeps", above=0)
    positive_weight: float = setting(2.0, "weight of the positive cache, α", minimum=0)
    positive_sharpness: float = setting(5.0, "sharpness of the positive cache, β", minimum=0)
    negative_shots: int = setting(2, "images per class that the negative cache keeps", above=0)
    negative_weight: float = setting(0.117, "weight of the negative cache, α", minimum=0)
    negative_sharpness: float = setting(1.0, "sharpness of the negative cache, β", minimum=0)
    unsure_above: float = setting(
        0.2, "minimum entropy of images that enter the negative cache, as a fraction of log2 C", minimum=0
    )
    unsure_below: float = setting(
        0.5, "maximum entropy of images that enter the negative cache, as a fraction of log2 C"
    )
    possible_above: float = setting(
        0.03, "probability above which the negative cache counts against a class", minimum=0
    )
    views: int = setting(1, "views of an image: itself and random crops; the most confident tenth is averaged", above=0)
    augmix: bool = setting(True, "whether AugMix is applied to the crops, if there are any")
    seed: int = setting(1, "seed of the order of the test images", minimum=0, below=INT_LIMIT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.unsure_below > self.unsure_above:
            raise SelfTPTError(
                f"unsure_below must be above unsure_above, {self.unsure_above:g}, but is {self.unsure_below:g}"
            )


class Stream(NamedTuple):
    """Images in the order of the stream: features [N, D], logits [N, C], probabilities [N, C], entropies [N]."""

    features: Tensor
    logits: Tensor
    probabilities: Tensor
    entropies: Tensor


def merge(views: Tensor, weights: Tensor, scale: float) -> Stream:
    """Classify the views of images by zero-shot, and average the most confident ones.

    Args:
        views: L2-normalised features of views, [N, V, D].
        weights: Zero-shot class vectors, [C, D].
        scale: 1 / τ.
    """
    logits = scale * views @ weights.t()
    probabilities = logits.softmax(-1)
    if views.shape[1] > 1:
        chosen = confident_views(probabilities, CONFIDENT)
        views, logits, probabilities = (select_views(values, chosen) for values in (views, logits, probabilities))
    merged = probabilities.mean(1)
    return Stream(views.mean(1), logits.mean(1), merged, entropy(merged))


class Cache(NamedTuple):
    """The content of a cache over time.

    Entry e is image `entered[e]` of the stream. It is in the cache until image `left[e]` arrives.

    Attributes:
        entered: Positions in the stream, [E].
        left: Positions in the stream, [E].
    """

    entered: Tensor
    left: Tensor


def keep(times: Sequence[int], classes: Sequence[int], entropies: Sequence[float], shots: int, end: int) -> Cache:
    """Compute the content of a cache that keeps, for each class, the images with the lowest entropy so far.

    Of images with equal entropy, the earlier ones are kept.

    Args:
        times: Positions in the stream of the images that may enter, ascending.
        classes: The predicted class of each of these images.
        entropies: The entropy of each of these images.
        shots: The number of images per class.
        end: The length of the stream.
    """
    kept: dict[int, list[tuple[float, int]]] = {}
    left: dict[int, int] = {}
    for time, label, entropy_value in zip(times, classes, entropies, strict=True):
        queue = kept.setdefault(label, [])
        if len(queue) == shots:
            if entropy_value >= queue[-1][0]:
                continue
            left[queue.pop()[1]] = time
        bisect.insort(queue, (entropy_value, time))
        left[time] = end
    return Cache(torch.tensor(list(left), dtype=torch.long), torch.tensor(list(left.values()), dtype=torch.long))


def recall(features: Tensor, cache: Cache, values: Tensor, sharpness: float) -> Tensor:
    """Compute the contribution of a cache to the logits, Σ_e exp(-β (1 - f · f_e)) v_e.

    The sum is over the entries e that are in the cache when the image with the feature f arrives. An image that enters
    the cache is in it when its own logits are computed.

    Args:
        features: Image features f, [N, D].
        cache: The cache.
        values: The classes v to which each image contributes, [N, C], 0 or 1.
        sharpness: β.

    Returns:
        Logits, [N, C].
    """
    logits = []
    all_entered, all_left = (times.to(features.device) for times in cache)
    for start in range(0, len(features), BLOCK):
        queries = features[start : start + BLOCK]
        times = torch.arange(start, start + len(queries), device=features.device)[:, None]
        present = (all_entered < start + len(queries)) & (all_left > start)
        entered, left = all_entered[present], all_left[present]
        affinity = (-sharpness * (1 - queries @ features[entered].t())).exp()
        logits.append((affinity * ((entered <= times) & (times < left))) @ values[entered].to(affinity.dtype))
    return torch.cat(logits)


def adapted_logits(stream: Stream, config: TdaConfig) -> Tensor:
    """Compute CLIP's logits [N, C], plus those of the positive cache, minus those of the negative cache."""
    features, logits, probabilities, entropies = stream
    count, classes = logits.shape
    best = logits.argmax(-1)
    positive = keep(range(count), best.tolist(), entropies.tolist(), config.positive_shots, count)
    one_hot = best[:, None] == torch.arange(classes, device=best.device)
    positive_logits = recall(features, positive, one_hot, config.positive_sharpness)

    relative = entropies / math.log2(classes)
    unsure = ((config.unsure_above < relative) & (relative < config.unsure_below)).nonzero()[:, 0]
    negative = keep(unsure.tolist(), best[unsure].tolist(), entropies[unsure].tolist(), config.negative_shots, count)
    negative_logits = recall(features, negative, probabilities > config.possible_above, config.negative_sharpness)
    return logits + config.positive_weight * positive_logits - config.negative_weight * negative_logits


def predictor(fitted: FittedMethod, names: Sequence[str], template: str) -> StreamPredictFunction:
    """Make a function that classifies a stream of images, starting with empty caches."""
    classifier, config = zero_shot(fitted.model, names, template), fitted.config

    def probabilities(blocks: Iterable[Tensor]) -> Tensor:
        parts = [merge(views, classifier.weights.to(views), classifier.scale) for views in blocks]
        stream = Stream(*(torch.cat(part) for part in zip(*parts, strict=True)))
        order = torch.randperm(len(stream.features), generator=torch.Generator().manual_seed(config.seed))
        order = order.to(stream.features.device)
        return adapted_logits(Stream(*(part[order] for part in stream)), config).softmax(-1)[order.argsort()]

    return probabilities


def views(config: TdaConfig) -> list[ViewSpec]:
    return image_and_crops(config.views, config.augmix)


def cost(_config: TdaConfig) -> str:
    return "cache lookup"


TDA = Method(
    "tda",
    TdaConfig(),
    predictor,
    views=views,
    transductive=True,
    uses_seed=True,
    extra_cost=cost,
)
