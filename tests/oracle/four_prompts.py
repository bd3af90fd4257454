"""Reference implementation of the four-prompt control.

Three prompts with different name positions are trained separately with cross-entropy. The class vector is the
direction of the mean of their embeddings and that of a hand-crafted template.
"""

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
    """Return the cross-entropy for each name position; the prompts are independent of each other."""
    return {
        place: reference.cross_entropy(images, reference.encode(small, place, names, contexts[place]), labels, tau)
        for place in PLACES
    }


def vectors(small: Small, names: Sequence[str], contexts: Mapping[str, Tensor], template: str) -> Tensor:
    """Return the L2-normalised sum [C, D] of four L2-normalised embeddings per class."""
    any_prompt = contexts["end"]
    of_place = [reference.encode(small, place, names, contexts[place]) for place in PLACES]
    of_place.append(reference.encode(small, "hand_crafted", names, any_prompt, template))
    rows = []
    for c in range(len(names)):
        total = sum(features[c] / features[c].norm() for features in of_place)
        rows.append(total / total.norm())
    return torch.stack(rows)
