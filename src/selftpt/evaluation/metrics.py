"""Metrics of predictions, in percent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tables use the harmonic mean without torch
    from torch import Tensor


def accuracy(probabilities: Tensor, labels: Tensor, top: int = 1) -> float:
    """Compute the top-k accuracy.

    Args:
        probabilities: [N, C].
        labels: [N].
        top: k; a prediction is correct if the label is among the k most probable classes.
    """
    best = probabilities.topk(min(top, probabilities.shape[1])).indices
    return 100 * (best == labels[:, None]).any(1).float().mean().item()


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Compute the expected calibration error (ECE): the mean gap between confidence and accuracy.

    Args:
        probabilities: [N, C].
        labels: [N].
        bins: The number of bins of confidence, of equal width.
    """
    import torch

    confidence, predicted = probabilities.max(1)
    correct = (predicted == labels).to(confidence)
    bin = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gap = torch.zeros(bins, dtype=confidence.dtype).index_add(0, bin, correct - confidence)
    return 100 * gap.abs().sum().item() / len(labels)


def all_metrics(probabilities: Tensor, labels: Tensor) -> dict[str, float | int]:
    """Compute all metrics, and the numbers of images and classes they are over.

    Args:
        probabilities: [N, C].
        labels: [N].
    """
    return {
        "top1": accuracy(probabilities, labels),
        "top5": accuracy(probabilities, labels, 5),
        "ece": expected_calibration_error(probabilities, labels),
        "images": len(labels),
        "classes": probabilities.shape[1],
    }


def harmonic_mean(first: float, second: float) -> float:
    """Compute the harmonic mean of two numbers; 0 if both are 0."""
    return 2 * first * second / (first + second) if first + second else 0.0
