"""Gradients whatever mode the caller is in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def with_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it also works under `torch.no_grad()` and `torch.inference_mode()`."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.enable_grad():
            return function(*args, **kwargs)

    return wrapped


def differentiable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made in inference mode, which autograd refuses."""
    return tensor.clone() if tensor.is_inference() else tensor
