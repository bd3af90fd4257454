"""`selftpt.fit`, which fits any method by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from selftpt.config import ContrastConfig
from selftpt.data.cache import Cache
from selftpt.data.decoding import ImageError, warn_of
from selftpt.data.sources import Source, SourceLike
from selftpt.errors import check_type
from selftpt.methods.method import FitContext, FittedMethod
from selftpt.methods.selection import configure, find_method
from selftpt.models import Model


def fit(
    method: str,
    model: Model,
    source: Source | SourceLike | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    cache: Cache | None = None,
    initial: Mapping[str, Tensor] | None = None,
    on_error: Callable[[ImageError], None] = warn_of,
    template: str = ContrastConfig.template,
) -> FittedMethod:
    """Fit a method of `METHODS`.

    Args:
        method: The name of the method, such as "coop"; `selftpt.METHODS` lists all.
        model: The frozen model.
        source: Labelled images, for a method that learns from them: a `Source`, or anything that `Source.read`
            accepts. Other methods ignore it.
        settings: Settings to change, such as `{"learn.lr": 0.01}`; `METHODS[method].config` has the defaults.
        folder: The folder of learned parameters and checkpoints; by default they are in the cache.
        cache: The cache of image features; by default the user's cache folder.
        initial: Initial values of learned parameters, by name.
        on_error: Called for every image that cannot be used; the image is then left out.
        template: The template of the dataset, with {} for the class name, for methods that use it while they learn.

    Returns:
        The fitted method. `for_classes(names)` makes a predictor for a list of class names.

    Raises:
        SelfTPTError: There is no such method or setting, the source is missing or invalid, or the method has no
            parameters that `initial` could initialise.

    Example:
        >>> import numpy as np, selftpt
        >>> model = selftpt.load_model(device="cpu")
        >>> fitted = selftpt.fit("tpt", model, settings={"views": 8})
        >>> predictor = fitted.for_classes(["night sky", "snow"])
        >>> predictor.predict(np.zeros((32, 32, 3), np.uint8)).name
        'night sky'
    """
    check_type(method, str, "method", "the arguments are fit(method, model, source)")
    check_type(model, Model, "model")
    check_type(settings or {}, Mapping, "settings", 'give a dictionary such as {"learn.lr": 0.01}')
    chosen = find_method(method)
    config = configure(chosen, settings or {})
    context = FitContext(
        model,
        None if source is None else Source.read(source),
        None if folder is None else Path(folder),
        Cache() if cache is None else cache,
        initial or {},
        on_error,
        template,
    )
    return chosen.fit(context, config)
