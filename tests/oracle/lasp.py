"""Reference implementation of LASP.

Images pass through open_clip's own image tower with replaced LayerNorm parameters, and prompts through the complete
text tower.
"""

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
    """Return L2-normalised features of uint8 pixels from the image tower with the given LayerNorm parameters."""
    config = small.clip.visual.preprocess_cfg
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    normalised = ((pixels.float() / 255 - mean) / std).to(small.embedding.dtype)
    return torch.stack([unit(x) for x in functional_call(small.clip.visual, dict(norms), (normalised,))])


def hand_crafted_embeddings(small: Small, names: Sequence[str], templates: Sequence[str]) -> list[list[Tensor]]:
    """Return the L2-normalised embedding of each class for each template."""
    no_prompt = small.embedding[:0]
    return [
        [unit(w) for w in reference.encode(small, "hand_crafted", names, no_prompt, template)] for template in templates
    ]


def cross_entropy(row: Sequence[Tensor], label: int) -> Tensor:
    """Return -log of the softmax at the label."""
    return torch.log(sum(torch.exp(x) for x in row)) - row[label]


def losses(
    small: Small,
    names: Sequence[str],
    context: Tensor,
    bias: Tensor,
    features: Tensor,
    labels: Tensor,
    hand_crafted: Sequence[Sequence[Tensor]],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of images and that of hand-crafted embeddings over the learned class vectors."""
    learned = [unit(w + bias[0]) for w in reference.encode(small, "end", names, context)]
    ce = sum(
        cross_entropy([scale * (z @ w) for w in learned], y) for z, y in zip(features, labels.tolist(), strict=True)
    )
    text_ce = sum(
        cross_entropy([scale * (w @ h) for w in learned], c)
        for sentence in hand_crafted
        for c, h in enumerate(sentence)
    )
    return ce / len(labels), text_ce / (len(hand_crafted) * len(names))


def clip(gradients: Sequence[Tensor], max_norm: float) -> list[Tensor]:
    """Scale all gradients by one factor if their total norm exceeds `max_norm`."""
    norm = torch.sqrt(sum((g * g).sum() for g in gradients))
    return [g * min(1.0, max_norm / (norm.item() + 1e-6)) for g in gradients]


def noise(hand_crafted: Sequence[Sequence[Tensor]], std: float, seed: str) -> list[list[Tensor]]:
    """Add noise to every coordinate; half of the seeds give no noise."""
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    if torch.rand((), generator=generator).item() >= 0.5:
        return [list(sentence) for sentence in hand_crafted]
    shape = len(hand_crafted), len(hand_crafted[0]), len(hand_crafted[0][0])
    drawn = torch.randn(shape, generator=generator)
    return [
        [h + std * drawn[t, c].to(h.dtype) for c, h in enumerate(sentence)] for t, sentence in enumerate(hand_crafted)
    ]
