"""Frozen vision-language models: loading, tokenizer, text tower and image tower."""

from __future__ import annotations

from selftpt.models.blocks import LayerPrompts
from selftpt.models.loading import (
    EMBEDDED,
    EMBEDDED_FILES,
    best_device,
    list_models,
    load_model,
    load_recorded_model,
)
from selftpt.models.model import PRECISIONS, RANDOM, Model, ModelId

__all__ = [
    "EMBEDDED",
    "EMBEDDED_FILES",
    "PRECISIONS",
    "RANDOM",
    "LayerPrompts",
    "Model",
    "ModelId",
    "best_device",
    "list_models",
    "load_model",
    "load_recorded_model",
]
