"""Reference implementation of ZERO, one image and one view at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence


def entropy(p: Sequence[float]) -> float:
    return -sum(value * math.log(value) for value in p if value > 0)


def best(p: Sequence[float]) -> int:
    return p.index(max(p))


def predict(views: Sequence[Sequence[float]], confidence_ratio: float) -> tuple[int, list[int]]:
    """Return the predicted class and the votes of an image, given the probabilities of its views.

    The views that did not vote break a tie, most confident first. If all views voted, the last voter breaks it.
    """
    by_entropy = sorted(views, key=entropy)
    count = max(1, int(len(views) * confidence_ratio))
    votes = [0] * len(views[0])
    for view in by_entropy[:count]:
        votes[best(view)] += 1
    ties = [c for c, number in enumerate(votes) if number == max(votes)]
    if len(ties) == 1:
        return ties[0], votes
    rest = by_entropy[count:] or by_entropy[-1:]
    for view in rest:
        if best(view) in ties:
            return best(view), votes
    return max(ties, key=lambda c: rest[0][c]), votes
