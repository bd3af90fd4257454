"""LASP written out: open_clip's own image tower with other LayerNorms, every prompt through the whole walk."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from tests.helpers.models import Small
from tests.oracle import reference


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum())


def images(small: Small, norms: Mapping[str, Tensor], pixels: Tensor) -> Tensor:
    """Unit features of uint8 pixels by the model's own tower, with these LayerNorms in place of its own."""
    config = small.clip.visual.preprocess_cfg
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    shown = ((pixels.float() / 255 - mean) / std).to(small.embedding.dtype)
    return torch.stack([unit(x) for x in functional_call(small.clip.visual, dict(norms), (shown,))])


def hand_written(small: Small, names: Sequence[str], templates: Sequence[str]) -> list[list[Tensor]]:
    """For each sentence, the L2-normalised embedding of each class."""
    nothing = small.embedding[:0]
    return [
        [unit(w) for w in reference.encode(small, "hand_crafted", names, nothing, template)] for template in templates
    ]


def choose(row: Sequence[Tensor], right: int) -> Tensor:
    """-log of the softmax at the right place."""
    return torch.log(sum(torch.exp(x) for x in row)) - row[right]


def losses(
    small: Small,
    names: Sequence[str],
    context: Tensor,
    bias: Tensor,
    features: Tensor,
    labels: Tensor,
    hand: Sequence[Sequence[Tensor]],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of images, and that of hand-written classes among learned ones."""
    learned = [unit(w + bias[0]) for w in reference.encode(small, "end", names, context)]
    ce = sum(choose([scale * (z @ w) for w in learned], y) for z, y in zip(features, labels.tolist(), strict=True))
    told = sum(choose([scale * (w @ h) for w in learned], c) for sentence in hand for c, h in enumerate(sentence))
    return ce / len(labels), told / (len(hand) * len(names))


def clip(gradients: Sequence[Tensor], most: float) -> list[Tensor]:
    """All made shorter by one factor if they are longer than `most` together."""
    norm = torch.sqrt(sum((g * g).sum() for g in gradients))
    return [g * min(1.0, most / (norm.item() + 1e-6)) for g in gradients]


def noise(hand: Sequence[Sequence[Tensor]], deviation: float, seed: str) -> list[list[Tensor]]:
    """Noise on every coordinate, or in half of the steps none."""
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    if torch.rand((), generator=generator).item() >= 0.5:
        return [list(sentence) for sentence in hand]
    shape = len(hand), len(hand[0]), len(hand[0][0])
    drawn = torch.randn(shape, generator=generator)
    return [
        [h + deviation * drawn[t, c].to(h.dtype) for c, h in enumerate(sentence)] for t, sentence in enumerate(hand)
    ]
