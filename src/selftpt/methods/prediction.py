"""Any method on a user's own pictures and class names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from selftpt.classifier import Prediction, best
from selftpt.config import ContrastConfig, change, kind_of
from selftpt.data.decoding import ImageError, warn_of
from selftpt.data.sources import read_folder
from selftpt.errors import SelfTPTError
from selftpt.files import cache_folder
from selftpt.methods import METHODS, Eyes, Job, Method
from selftpt.models import Model
from selftpt.names import check_names


def chosen_method(name: str) -> Method:
    """The method of this name."""
    if name not in METHODS:
        raise SelfTPTError(f"no method is called {name!r}: choose of {', '.join(METHODS)}")
    return METHODS[name]


def chosen_settings(method: Method, changes: Mapping[str, Any]) -> Any:
    """The settings of a method with changes such as "learn.lr": 0.02."""
    settings = method.settings
    for key, value in changes.items():
        if kind_of(settings, key.split(".")) is None:
            raise SelfTPTError(f"{method.name} has no setting {key!r}: `selftpt methods --json` tells them")
        settings = change(settings, key.split("."), value)
    return settings


class MethodPredictor:
    """A method that knows its class names, ready to classify pictures.

    source: for a method that learns, a folder with a folder a class. What it learns is kept in the cache.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        settings: Any,
        names: Sequence[str],
        template: str = ContrastConfig.template,
        source: str | Path | None = None,
        on_error: Callable[[ImageError], None] = warn_of,
    ) -> None:
        self.model, self.method, self.settings, self.names = model, method, settings, check_names(names)
        job = Job(model, None if source is None else read_folder(source), cache_folder() / "learned", on_error)
        self.predictor = method.fit(job, settings)(self.names, template)

    def predict(
        self, paths: Sequence[Path], top: int = 5, on_error: Callable[[ImageError], None] = warn_of
    ) -> Iterator[Prediction]:
        """Classify pictures, in order; those that cannot be used are left out, which `on_error` is told."""
        for usable, shown in Eyes(self.model, on_error)(self.method, self.settings, paths):
            yield from best(self.predictor(shown), self.names, [str(paths[i]) for i in usable.tolist()], top)
