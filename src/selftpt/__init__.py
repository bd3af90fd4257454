"""Class names in, a better CLIP classifier out, at the price of zero-shot (Self-TPT)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from selftpt.config import AdaptConfig, ContrastConfig, LearnConfig, PredictConfig
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.version import __version__

if TYPE_CHECKING:
    from selftpt.adaptation import adapt, zero_shot
    from selftpt.classifier import Classifier, Prediction
    from selftpt.data.cache import Cache
    from selftpt.data.sources import Source
    from selftpt.learning import learn
    from selftpt.models import Model, list_models, load_model
    from selftpt.prompt import Prompt

__all__ = [
    "AdaptConfig",
    "Cache",
    "Classifier",
    "ContrastConfig",
    "LearnConfig",
    "Model",
    "PredictConfig",
    "Prediction",
    "Prompt",
    "SelfTPTError",
    "SelfTPTWarning",
    "Source",
    "__version__",
    "adapt",
    "learn",
    "list_models",
    "load_model",
    "zero_shot",
]

_HEAVY = {  # these need torch and open_clip, which take seconds to import: on first use
    "adapt": "adaptation",
    "Cache": "data.cache",
    "Classifier": "classifier",
    "Prediction": "classifier",
    "Source": "data.sources",
    "learn": "learning",
    "Model": "models",
    "list_models": "models",
    "load_model": "models",
    "Prompt": "prompt",
    "zero_shot": "adaptation",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module 'selftpt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"selftpt.{_HEAVY[name]}"), name)
