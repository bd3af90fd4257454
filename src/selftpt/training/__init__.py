"""Training on labelled images: data, optimisation loop, checkpoints."""

from __future__ import annotations

from selftpt.training.checkpoints import RunFiles
from selftpt.training.data import Crops, source_crops, source_features
from selftpt.training.loop import Losses, Training, batches, learning_rate, seeded
from selftpt.training.state import State

__all__ = [
    "Crops",
    "Losses",
    "RunFiles",
    "State",
    "Training",
    "batches",
    "learning_rate",
    "seeded",
    "source_crops",
    "source_features",
]
