"""How good predictions are, in percent."""

from __future__ import annotations

import torch
from torch import Tensor


def top(probabilities: Tensor, labels: Tensor, count: int) -> float:
    """Top-k accuracy.

    Args:
        probabilities: [N, C].
        labels: [N].
        count: k, the number of most probable classes among which the label counts as right.
    """
    best = probabilities.topk(min(count, probabilities.shape[1])).indices
    return 100 * (best == labels[:, None]).any(1).float().mean().item()


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: how far confidence is from accuracy, over bins of equal width of confidence.

    Args:
        probabilities: [N, C].
        labels: [N].
        bins: The number of bins.
    """
    confidence, chosen = probabilities.max(1)
    right = (chosen == labels).to(confidence)
    bin = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gap = torch.zeros(bins, dtype=confidence.dtype).index_add(0, bin, right - confidence)
    return 100 * gap.abs().sum().item() / len(labels)


def measure(probabilities: Tensor, labels: Tensor) -> dict[str, float | int]:
    """All measures, and the numbers of images and classes they are over.

    Args:
        probabilities: [N, C].
        labels: [N].
    """
    return {
        "top1": top(probabilities, labels, 1),
        "top5": top(probabilities, labels, 5),
        "ece": calibration_error(probabilities, labels),
        "images": len(labels),
        "classes": probabilities.shape[1],
    }


def harmonic(first: float, second: float) -> float:
    """The harmonic mean of two numbers; 0 if both are 0."""
    return 2 * first * second / (first + second) if first + second else 0.0
