"""Methods and their configurations as a user names them, and methods with a prompt that was learned before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from selftpt.config import change, kind_of
from selftpt.errors import SelfTPTError
from selftpt.methods import METHODS

if TYPE_CHECKING:
    from selftpt.methods import FittedMethod, Method
    from selftpt.models import Model
    from selftpt.prompt import Prompt


def find_method(name: str) -> Method:
    """Find a method by its name.

    Raises:
        SelfTPTError: There is no such method.
    """
    if name not in METHODS:
        raise SelfTPTError(f"no method is called {name!r}: choose one of {', '.join(METHODS)}")
    return METHODS[name]


def configure(method: Method, changes: Mapping[str, Any]) -> Any:
    """The configuration of a method with some settings changed.

    Args:
        method: The method.
        changes: Values by the name of the setting, such as `"learn.lr": 0.02`.

    Raises:
        SelfTPTError: There is no such setting, or it does not allow the value.
    """
    for key in changes:
        if kind_of(method.config, key.split(".")) is None:
            raise SelfTPTError(f"{method.name} has no setting {key!r}: `selftpt methods {method.name}` lists them")
    return change(method.config, changes)


def uses_prompt(method: Method) -> bool:
    """Whether what a method learns is a `Prompt`, so that it can use one that was learned before."""
    from selftpt.prompt import SCHEMA

    return method.tensors == SCHEMA.tensors


def check_uses_prompt(method: Method) -> None:
    """Refuse a method that cannot use a learned prompt.

    Raises:
        SelfTPTError: It cannot.
    """
    if not uses_prompt(method):
        able = [name for name, info in METHODS.info.items() if info.needs_labels and uses_prompt(METHODS[name])]
        raise SelfTPTError(
            f"{method.name} does not use a learned prompt: --prompt is for {', '.join(able)}; "
            "run other methods without it"
        )


def fit_prompt(method: Method, model: Model, prompt: Prompt, config: Any) -> FittedMethod:
    """Make a fitted method of a prompt that was learned before, instead of learning one.

    Args:
        method: A method that uses a prompt.
        model: The model of the prompt.
        prompt: The prompt.
        config: The configuration of the method; the length and the contrast settings are the prompt's.

    Raises:
        SelfTPTError: The method uses no prompt, or the prompt was learned for another model.
    """
    from selftpt.methods.method import FittedMethod

    check_uses_prompt(method)
    prompt.check(model)
    learn = dataclasses.replace(config.learn, length=len(prompt.context), contrast=prompt.contrast)
    tensors = {"context": prompt.context, **prompt.head._asdict()}
    data = dict(method.data(config)) | {"classes": list(prompt.origin.get("classes", ()))}
    config = dataclasses.replace(config, learn=learn)
    return FittedMethod(method, config, model.id, tensors, data).with_model(model)
