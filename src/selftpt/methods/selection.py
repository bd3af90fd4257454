"""Methods and their configurations as a user names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selftpt.config import change, kind_of
from selftpt.errors import SelfTPTError
from selftpt.methods import METHODS, Method


def find_method(name: str) -> Method:
    """The method called `name`.

    Raises:
        SelfTPTError: There is none.
    """
    if name not in METHODS:
        raise SelfTPTError(f"no method is called {name!r}: choose one of {', '.join(METHODS)}")
    return METHODS[name]


def configure(method: Method, changes: Mapping[str, Any]) -> Any:
    """The configuration of a method with changes such as "learn.lr": 0.02.

    Raises:
        SelfTPTError: There is no such setting, or it does not allow the value.
    """
    for key in changes:
        if kind_of(method.config, key.split(".")) is None:
            raise SelfTPTError(f"{method.name} has no setting {key!r}: `selftpt methods --json` lists them")
    return change(method.config, changes)
