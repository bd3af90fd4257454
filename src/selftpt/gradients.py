"""Gradients that work in every gradient mode of the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def with_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that needs gradients, so that it can be called in `torch.no_grad()` or `inference_mode()`."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.enable_grad():
            return function(*args, **kwargs)

    return wrapped


def differentiable(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd accepts: the tensor itself, or a copy if it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor
