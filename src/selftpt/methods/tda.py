"""TDA: test pictures come one after the other, and two caches of earlier ones correct the answers to later ones."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selftpt.adaptation import zero_shot
from selftpt.config import PredictConfig, above, at_least, setting
from selftpt.errors import SelfTPTError
from selftpt.methods.method import Fitted, Job, Method, Predictor
from selftpt.methods.views import choose_views, confident_views, entropy, views_of

BLOCK = 512  # pictures that are compared with the caches at once
CONFIDENT = 0.1  # the share of the views that is averaged, if there are several


@dataclass(frozen=True)
class Settings:
    """Of the caches; the defaults are the authors' for ImageNet."""

    positive_shots: int = setting(3, "pictures of a class that the positive cache keeps")
    positive_weight: float = setting(2.0, "weight of the positive cache, α")
    positive_sharpness: float = setting(5.0, "sharpness of the positive cache, β")
    negative_shots: int = setting(2, "pictures of a class that the negative cache keeps")
    negative_weight: float = setting(0.117, "weight of the negative cache, α")
    negative_sharpness: float = setting(1.0, "sharpness of the negative cache, β")
    unsure_above: float = setting(0.2, "least entropy of what may enter the negative cache, as a part of log2 C")
    unsure_below: float = setting(0.5, "largest entropy of what may enter the negative cache, as a part of log2 C")
    possible_above: float = setting(0.03, "probability above which the negative cache speaks against a class")
    views: int = setting(1, "looks at a picture; of several, the confident tenth is averaged")
    augmix: bool = setting(True, "whether AugMix is applied to the crops, if there are any")
    seed: int = setting(1, "seed of the order in which the pictures come")

    def __post_init__(self) -> None:
        PredictConfig(views=self.views, seed=self.seed)
        above(0, self, "positive_shots", "negative_shots")
        at_least(0, self, "positive_weight", "negative_weight", "positive_sharpness", "negative_sharpness")
        at_least(0, self, "unsure_above", "possible_above")
        if not self.unsure_below > self.unsure_above:
            raise SelfTPTError(f"unsure_below must be above unsure_above, {self.unsure_above:g}")


class Stream(NamedTuple):
    """Pictures in the order they come: features [N, D], logits [N, C], probabilities [N, C], entropies [N]."""

    features: Tensor
    logits: Tensor
    probabilities: Tensor
    entropies: Tensor


def look(shown: Tensor, weights: Tensor, scale: float) -> Stream:
    """Zero-shot of pictures' views [N, V, D], merged: features and logits are means, as probabilities are."""
    logits = scale * shown @ weights.t()
    probabilities = logits.softmax(-1)
    if shown.shape[1] > 1:
        chosen = confident_views(probabilities, CONFIDENT)
        shown, logits, probabilities = (choose_views(values, chosen) for values in (shown, logits, probabilities))
    merged = probabilities.mean(1)
    return Stream(shown.mean(1), logits.mean(1), merged, entropy(merged))


class Cache(NamedTuple):
    """What a cache holds, when: pictures [E] by their place in the stream, each from `entered` to before `left` [E]."""

    entered: Tensor
    left: Tensor


def keep(times: Sequence[int], classes: Sequence[int], entropies: Sequence[float], shots: int, end: int) -> Cache:
    """Of each class the `shots` pictures of least entropy so far; of equal ones those that came first.

    times: places in the stream of those that may enter, ascending; classes and entropies: theirs. end: of the stream.
    """
    kept: dict[int, list[tuple[float, int]]] = {}
    left: dict[int, int] = {}
    for time, label, unsure in zip(times, classes, entropies, strict=True):
        queue = kept.setdefault(label, [])
        if len(queue) == shots:
            if unsure >= queue[-1][0]:
                continue
            left[queue.pop()[1]] = time
        bisect.insort(queue, (unsure, time))
        left[time] = end
    return Cache(torch.tensor(list(left), dtype=torch.long), torch.tensor(list(left.values()), dtype=torch.long))


def recall(features: Tensor, cache: Cache, values: Tensor, sharpness: float) -> Tensor:
    """What a cache says of each picture [N, C] at its time: Σ exp(-β (1 - f · f_e)) v_e over what is in it then.

    A picture that enters is in it when it is asked about. features: [N, D]; values: v [N, C], which are 0 or 1.
    """
    said = []
    for start in range(0, len(features), BLOCK):
        asking = features[start : start + BLOCK]
        times = torch.arange(start, start + len(asking))[:, None]
        there = (cache.entered < start + len(asking)) & (cache.left > start)
        entered, left = cache.entered[there], cache.left[there]
        near = (-sharpness * (1 - asking @ features[entered].t())).exp()
        said.append((near * ((entered <= times) & (times < left))) @ values[entered].to(near.dtype))
    return torch.cat(said)


def adapted_logits(stream: Stream, settings: Settings) -> Tensor:
    """CLIP's logits, plus what the positive cache says, minus what the negative one says: [N, C]."""
    features, logits, probabilities, entropies = stream
    count, classes = logits.shape
    best = logits.argmax(-1)
    positive = keep(range(count), best.tolist(), entropies.tolist(), settings.positive_shots, count)
    told_for = recall(features, positive, best[:, None] == torch.arange(classes), settings.positive_sharpness)

    part = entropies / math.log2(classes)
    unsure = ((settings.unsure_above < part) & (part < settings.unsure_below)).nonzero()[:, 0]
    negative = keep(unsure.tolist(), best[unsure].tolist(), entropies[unsure].tolist(), settings.negative_shots, count)
    told_against = recall(features, negative, probabilities > settings.possible_above, settings.negative_sharpness)
    return logits + settings.positive_weight * told_for - settings.negative_weight * told_against


def fit(job: Job, settings: Settings) -> Fitted:
    """Zero-shot class vectors; the caches are empty at the beginning of every stream."""

    def predictor(names: Sequence[str], template: str) -> Predictor:
        classifier = zero_shot(job.model, names, template)

        def predict(shown: Tensor) -> Tensor:
            parts = [look(some, classifier.weights.to(shown), classifier.scale) for some in shown.split(BLOCK)]
            order = torch.randperm(len(shown), generator=torch.Generator().manual_seed(settings.seed))
            stream = Stream(*(torch.cat(part)[order] for part in zip(*parts, strict=True)))
            answers = adapted_logits(stream, settings).softmax(-1)
            return answers[order.argsort()]

        return predict

    return predictor


TDA = Method(
    "tda",
    "caches of earlier test pictures",
    "Karmanov et al., CVPR 2024",
    Settings(),
    fit,
    "1 view and the caches",
    "the test pictures as a stream",
    lambda settings: views_of(settings.views, settings.augmix),
    whole=True,
)
