"""Self-TPT: image classifiers from class names, by tuning a CLIP prompt, at the inference cost of zero-shot."""

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
    from selftpt.methods import METHODS
    from selftpt.methods.fitting import fit
    from selftpt.methods.method import FittedMethod, Predictor
    from selftpt.models import Model, list_models, load_model
    from selftpt.prompt import Prompt

__all__ = [
    "METHODS",
    "AdaptConfig",
    "Cache",
    "Classifier",
    "ContrastConfig",
    "FittedMethod",
    "LearnConfig",
    "Model",
    "PredictConfig",
    "Prediction",
    "Predictor",
    "Prompt",
    "SelfTPTError",
    "SelfTPTWarning",
    "Source",
    "__version__",
    "adapt",
    "fit",
    "learn",
    "list_models",
    "load_model",
    "zero_shot",
]

_LAZY = {  # imported on first use, because torch and open_clip take seconds to import
    "METHODS": "methods",
    "Cache": "data.cache",
    "Classifier": "classifier",
    "FittedMethod": "methods.method",
    "Model": "models",
    "Prediction": "classifier",
    "Predictor": "methods.method",
    "Prompt": "prompt",
    "Source": "data.sources",
    "adapt": "adaptation",
    "fit": "methods.fitting",
    "learn": "learning",
    "list_models": "models",
    "load_model": "models",
    "zero_shot": "adaptation",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'selftpt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"selftpt.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
