"""Reference implementation of TDA: a loop over the stream, with two dictionaries as caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Item:
    feature: Tensor
    entropy: float
    probabilities: Tensor


@dataclass(frozen=True)
class Hyper:
    shots: tuple[int, int] = (3, 2)  # positive cache, negative cache
    alpha: tuple[float, float] = (2.0, 0.117)
    beta: tuple[float, float] = (5.0, 1.0)
    entropies: tuple[float, float] = (0.2, 0.5)
    mask: float = 0.03


def entropy(p: Tensor) -> float:
    return -sum(value * math.log(value) for value in p.tolist() if value > 0)


def softmax(logits: Tensor) -> Tensor:
    powers = torch.exp(logits - logits.max())
    return powers / powers.sum()


def summarise_views(views: Tensor, weights: Tensor, scale: float) -> tuple[Item, Tensor]:
    """Summarise an image by its confident views of [V, D]; return the cache item and the logits [C]."""
    logits = torch.stack([scale * torch.stack([w @ f for w in weights]) for f in views])
    chosen = list(range(len(views)))
    if len(views) > 1:
        by_entropy = sorted(chosen, key=lambda v: entropy(softmax(logits[v])))
        chosen = by_entropy[: max(1, int(0.1 * len(views)))]
    p = sum(softmax(logits[v]) for v in chosen) / len(chosen)
    feature = sum(views[v] for v in chosen) / len(chosen)
    return Item(feature, entropy(p), p), sum(logits[v] for v in chosen) / len(chosen)


def store(cache: dict[int, list[Item]], label: int, item: Item, shots: int) -> None:
    items = cache.setdefault(label, [])
    if len(items) < shots:
        items.append(item)
    elif item.entropy < items[-1].entropy:
        items[-1] = item
    items.sort(key=lambda kept: kept.entropy)


def run(images: Sequence[Tensor], weights: Tensor, scale: float, hyper: Hyper) -> list[Tensor]:
    """Return the logits of each image of a stream, given the views of each image."""
    classes = len(weights)
    positive: dict[int, list[Item]] = {}
    negative: dict[int, list[Item]] = {}
    answers = []
    for views in images:
        item, logits = summarise_views(views, weights, scale)
        label = logits.tolist().index(max(logits.tolist()))
        store(positive, label, item, hyper.shots[0])
        if hyper.entropies[0] < item.entropy / math.log2(classes) < hyper.entropies[1]:
            store(negative, label, item, hyper.shots[1])
        answer = logits.clone()
        for kept_label, items in positive.items():
            for kept in items:
                affinity = math.exp(-hyper.beta[0] * (1 - float(item.feature @ kept.feature)))
                answer[kept_label] += hyper.alpha[0] * affinity
        for items in negative.values():
            for kept in items:
                affinity = math.exp(-hyper.beta[1] * (1 - float(item.feature @ kept.feature)))
                for c in range(classes):
                    if kept.probabilities[c] > hyper.mask:
                        answer[c] -= hyper.alpha[1] * affinity
        answers.append(answer)
    return answers
