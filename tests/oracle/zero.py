"""ZERO by its description, one picture and one view at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence


def entropy(p: Sequence[float]) -> float:
    return -sum(value * math.log(value) for value in p if value > 0)


def best(p: Sequence[float]) -> int:
    return p.index(max(p))


def predict(views: Sequence[Sequence[float]], confident: float) -> tuple[int, list[int]]:
    """The class, and the votes, of a picture whose views have these probabilities."""
    voters = sorted(range(len(views)), key=lambda v: entropy(views[v]))[: max(1, int(len(views) * confident))]
    votes = [0] * len(views[0])
    for v in voters:
        votes[best(views[v])] += 1
    ties = [c for c, count in enumerate(votes) if count == max(votes)]
    if len(ties) == 1:
        return ties[0], votes
    rest = views[len(voters) :] or views[-1:]
    for view in rest:
        if best(view) in ties:
            return best(view), votes
    return max(ties, key=lambda c: rest[0][c]), votes
