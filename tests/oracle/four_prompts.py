"""Prompts at three places, each by its own cross-entropy, and a hand-written sentence; their mean direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference

PLACES = ("end", "front", "middle")


def losses(
    small: Small, names: Sequence[str], contexts: Mapping[str, Tensor], images: Tensor, labels: Tensor, tau: float
) -> dict[str, Tensor]:
    """The cross-entropy of each place, which knows nothing of the others."""
    return {
        place: reference.cross_entropy(images, reference.encode(small, place, names, contexts[place]), labels, tau)
        for place in PLACES
    }


def vectors(small: Small, names: Sequence[str], contexts: Mapping[str, Tensor], template: str) -> Tensor:
    """For each class the direction of the sum of four unit vectors [C, D]."""
    some = contexts["end"]
    of_place = [reference.encode(small, place, names, contexts[place]) for place in PLACES]
    of_place.append(reference.encode(small, "hand_crafted", names, some, template))
    rows = []
    for c in range(len(names)):
        total = sum(features[c] / features[c].norm() for features in of_place)
        rows.append(total / total.norm())
    return torch.stack(rows)
