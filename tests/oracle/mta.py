"""Reference implementation of MTA for one image: loops over views, and a stop at convergence."""

from __future__ import annotations

import math

from torch import Tensor


def distance(a: Tensor, b: Tensor) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a.tolist(), b.tolist(), strict=True)))


def bandwidths(features: Tensor) -> list[float]:
    """Return the bandwidth of each view, from its distances to the nearest 30 % of the other views."""
    count = int(0.3 * (len(features) - 1))
    found = []
    for p, f in enumerate(features):
        others = sorted(distance(f, other) ** 2 for q, other in enumerate(features) if q != p)
        found.append(math.sqrt(0.5 * sum(others[:count]) / count))
    return found


def mode(features: Tensor, probabilities: Tensor, affinity: float, spread: float) -> Tensor:
    """Return the mode of the views of one image, given features [V, D] and probabilities [V, C]."""
    views = len(features)
    widths = bandwidths(features)
    similarity = [[float(s @ t) for t in probabilities] for s in probabilities]
    y = [1 / views] * views
    m = features[0]

    def density(m: Tensor) -> list[float]:
        return [math.exp(-(distance(f, m) ** 2) / (2 * h**2)) for f, h in zip(features, widths, strict=True)]

    for _ in range(5):
        densities = density(m)
        for _ in range(5):
            old = y
            scores = [
                math.exp((densities[p] + affinity * sum(similarity[p][q] * old[q] for q in range(views))) / spread)
                for p in range(views)
            ]
            y = [score / sum(scores) for score in scores]
            if math.sqrt(sum((a - b) ** 2 for a, b in zip(old, y, strict=True))) < 1e-6:
                break
        for _ in range(5):
            before, current_densities = m, density(m)
            weights = [d * score for d, score in zip(current_densities, y, strict=True)]
            m = sum(w * f for w, f in zip(weights, features, strict=True)) / sum(weights)
            m = m / m.norm()
            if distance(before, m) < 1e-6:
                break
    return m
