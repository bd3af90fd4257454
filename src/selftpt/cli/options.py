"""Options that several commands share, and settings as options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer

from selftpt.config import CacheMode, Config, Precision, none_for_zero, setting
from selftpt.errors import SelfTPTError
from selftpt.names import check_names

if TYPE_CHECKING:
    from selftpt.data.cache import Cache
    from selftpt.models import Model, ModelId
    from selftpt.prompt import Prompt


@dataclass(frozen=True)
class ModelOptions(Config):
    """Which model, where and how."""

    model: str | None = setting(
        None, "a model of open_clip (`selftpt models`), hf-hub:ORG/REPO or a folder; else the published one of the file"
    )
    pretrained: str | None = setting(None, "its weights: a name, a checkpoint file, or random (answers mean nothing)")
    device: str | None = setting(None, "cpu, cuda or mps; the best there is by default")
    precision: Precision = setting("fp32", "of the image tower")

    def load(self, made_with: ModelId | None = None, what: str = "the file") -> Model:
        """Load the model that the options name, else the one that a file was made with, else the embedded one.

        Args:
            made_with: The model that a file names. Only --model makes selftpt load a folder or a repository.
            what: The file, for error messages.
        """
        from selftpt.models import EMBEDDED, list_models, load_model, load_recorded_model

        if self.model is None and made_with is not None and self.pretrained is None:
            model = load_recorded_model(made_with, what, device=self.device, precision=self.precision)
        else:
            name = self.model if self.model is not None else made_with.name if made_with else EMBEDDED
            if self.model is None and name.replace("/", "-") not in list_models():
                raise SelfTPTError(f"--pretrained needs --model: {what} was made with {name!r}")
            model = load_model(name, self.pretrained, device=self.device, precision=self.precision)
        if model.id.random_init:
            print("note: random weights: the answers mean nothing", file=sys.stderr)
        return model

    def prompt(self, file: Path | None) -> Prompt:
        """The prompt of a file, or else the one that comes with the embedded model."""
        from selftpt.models import EMBEDDED
        from selftpt.prompt import Prompt

        if file is not None:
            return Prompt.load(file)
        if self.model not in (None, EMBEDDED):
            raise SelfTPTError(
                f"no prompt comes with the model {self.model!r}: give --prompt FILE, which `selftpt learn` makes; "
                "`classify --zero-shot` does without"
            )
        return Prompt.embedded()


@dataclass(frozen=True)
class CacheOptions(Config):
    """The cache on disk."""

    cache_mode: CacheMode = setting("on", "whether results are cached: on, off or read-only")
    cache_gb: float | None = setting(20.0, "size limit in GB; the least recently used results are deleted", above=0)

    def cache(self) -> Cache:
        """The cache."""
        from selftpt.data.cache import Cache

        return Cache(self.cache_mode, self.cache_gb)


def _number_or_none(number: type[int] | type[float], name: str, value: str | float) -> float | None:
    if value == "none":
        return None
    try:
        return none_for_zero(name, int(value)) if number is int else number(value)
    except ValueError:
        raise ValueError(f"{value!r} is neither a number of type {number.__name__} nor none") from None


def with_settings(**groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of settings dataclasses as options, and the settings themselves as arguments."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name not in groups]
        added = [parameter for group in groups.values() for parameter in _parameters(group)]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            settings = {name: _settings(group, given) for name, group in groups.items()}
            command(**{p.name: given[p.name] for p in own}, **settings)

        run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return run

    return decorate


def _parameters(group: type[Any]) -> Iterator[inspect.Parameter]:
    """The fields of a configuration class as options, also those of a nested one; a tuple is written with commas."""
    hints = get_type_hints(group)
    panel = (group.__doc__ or "").partition(".")[0]
    for field in dataclasses.fields(group):
        kind, default = hints[field.name], field.default
        if dataclasses.is_dataclass(kind):
            yield from _parameters(hints[field.name])
            continue
        more: dict[str, Any] = {}
        if number := {int, float} & {*get_args(kind)}:
            (number_type,) = number
            read = functools.partial(_number_or_none, number_type, f"--{field.name.replace('_', '-')}")
            more = {"parser": read, "metavar": f"<{number_type.__name__}|none>"}
            default = "none" if default is None else default
        elif get_origin(kind) is tuple:
            kind, default = str, ",".join(cast("tuple[str, ...]", default))
        option = typer.Option(help=field.metadata["help"], rich_help_panel=panel, **more)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )


def _settings(group: type[Any], given: dict[str, Any]) -> Any:
    """Settings from what the options gave."""
    hints = get_type_hints(group)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            values[field.name] = _settings(hints[field.name], given)
        elif get_origin(kind) is tuple:
            values[field.name] = tuple(part.strip() for part in given[field.name].split(",") if part.strip())
        else:
            values[field.name] = given[field.name]
    return group(**values)


Names = Annotated[str | None, typer.Option("--names", help="class names, with commas between them")]
NamesFile = Annotated[
    Path | None, typer.Option("--names-file", help="a file with a class name a line, or a JSON list of them")
]
Images = Annotated[
    list[str], typer.Argument(help="images, folders, patterns such as 'photos/*.jpg'; - reads paths, one a line")
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt", help="a prompt that `selftpt learn` made; the embedded model has one")
]
Changes = Annotated[list[str] | None, typer.Option("--set", help="a setting of a method: learn.lr=0.02")]
Json = Annotated[bool, typer.Option("--json", help="for programs: JSON")]


def read_names(names: str | None, file: Path | None) -> list[str]:
    """Class names from one of the two options."""
    if (names is None) == (file is None):
        raise SelfTPTError("give the class names either with --names 'cat, dog' or with --names-file FILE")
    if names is not None:
        return [name.strip() for name in names.split(",") if name.strip()]
    assert file is not None
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SelfTPTError(f"cannot read class names from {file}: {error}") from error
    if not text.lstrip().startswith("["):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise SelfTPTError(f"{file} looks like JSON and is not: {error}") from error
    try:
        return list(check_names(listed))
    except SelfTPTError as error:
        raise SelfTPTError(f"{file} must be a JSON list of strings: {error}") from error


def parse_setting(text: str) -> tuple[str, Any]:
    """A setting and its value, which is `none`, JSON or else a text."""
    key, given, value = text.partition("=")
    if not given:
        raise SelfTPTError(f"--set takes a setting with its value, such as learn.lr=0.02, not {text!r}")
    try:
        return key.strip(), None if value.strip() == "none" else json.loads(value)
    except ValueError:
        return key.strip(), value
