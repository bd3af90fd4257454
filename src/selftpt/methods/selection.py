"""Find and configure methods by name, and build fitted methods from an existing prompt."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
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
        SelfTPTError: There is no method with this name.
    """
    if name not in METHODS:
        raise SelfTPTError(
            f"no method is called {name!r}: {did_you_mean(name, METHODS)}choose one of {', '.join(METHODS)}"
        )
    return METHODS[name]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest corrections of a misspelled name: names that differ only in case and punctuation, or else similar names.

    Args:
        name: The misspelled name.
        known: All names.

    Returns:
        A question that ends with a space, such as "did you mean self-tpt? ", or "" if no name is similar.
    """
    simple = {one: "".join(filter(str.isalnum, one.lower())) for one in known}
    wanted = "".join(filter(str.isalnum, name.lower()))
    near = [one for one, text in simple.items() if text == wanted]
    near = near or difflib.get_close_matches(name.lower(), simple, n=3, cutoff=0.8)
    return f"did you mean {' or '.join(near)}? " if near else ""


def setting_names(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings of a configuration, such as `learn.lr`."""
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from setting_names(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def did_you_mean_setting(key: str, configs: Iterable[Any]) -> str:
    """Suggest existing settings for `key`: those with the same last part, or else similar names.

    Returns:
        A question that ends with a space, or "" if no setting is similar.
    """
    names = list(dict.fromkeys(name for config in configs for name in setting_names(config)))
    last = key.lower().replace("-", "_").rpartition(".")[2]
    same = [name for name in names if name.rpartition(".")[2] == last]
    return f"did you mean {' or '.join(same)}? " if same else did_you_mean(key, names)


def configure(method: Method, changes: Mapping[str, Any]) -> Any:
    """Return the configuration of a method with some settings changed.

    Args:
        method: The method.
        changes: New values by the name of the setting, such as `{"learn.lr": 0.02}`.

    Raises:
        SelfTPTError: A setting does not exist, or does not allow the value.
    """
    for key in changes:
        if kind_of(method.config, key.split(".")) is None:
            hint = did_you_mean_setting(key, [method.config])
            raise SelfTPTError(
                f"{method.name} has no setting {key!r}: {hint}`selftpt methods {method.name}` lists its settings"
            )
    return change(method.config, changes)


def uses_prompt(method: Method) -> bool:
    """Return whether the learned parameters of a method are those of a `Prompt`, so that it can use an existing one."""
    from selftpt.prompt import SCHEMA

    return method.tensors == SCHEMA.tensors


def check_uses_prompt(method: Method) -> None:
    """Check that a method can use an existing prompt.

    Raises:
        SelfTPTError: The method cannot use one.
    """
    if not uses_prompt(method):
        usable = [name for name, info in METHODS.info.items() if info.needs_labels and uses_prompt(METHODS[name])]
        raise SelfTPTError(
            f"{method.name} cannot use a learned prompt: remove --prompt, or choose one of {', '.join(usable)}"
        )


def fit_prompt(method: Method, model: Model, prompt: Prompt, config: Any) -> FittedMethod:
    """Make a fitted method from an existing prompt instead of learning one.

    Args:
        method: A method that uses a prompt.
        model: The model of the prompt.
        prompt: The prompt.
        config: The configuration of the method. Its length and contrast settings are replaced by those of the prompt.

    Raises:
        SelfTPTError: The method cannot use a prompt, or the prompt was learned for another model.
    """
    from selftpt.methods.method import FittedMethod

    check_uses_prompt(method)
    prompt.check(model)
    learn = dataclasses.replace(config.learn, length=len(prompt.context), contrast=prompt.contrast)
    tensors = {"context": prompt.context, **prompt.head._asdict()}
    data = dict(method.data(config)) | {"classes": list(prompt.origin.get("classes", ()))}
    config = dataclasses.replace(config, learn=learn)
    return FittedMethod(method, config, model.id, tensors, data).with_model(model)
