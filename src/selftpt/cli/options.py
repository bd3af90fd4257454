"""Options that several commands share, configuration classes as options, and the layout of `--help`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from selftpt.config import CacheMode, Config, Precision, none_for_zero, setting
from selftpt.errors import SelfTPTError
from selftpt.names import check_names, parse_names

if TYPE_CHECKING:
    from selftpt.data.cache import Cache
    from selftpt.models import Model, ModelId
    from selftpt.prompt import Prompt

DATA, METHOD, MODEL, OUTPUT, CACHE, OTHER = "Data", "Method", "Model", "Output", "Cache", "Other"
HUB = "Hugging Face hub"
PANELS = {  # the panel of each configuration class
    "ModelOptions": MODEL,
    "LearnConfig": "Learning (stage 1)",
    "ContrastConfig": "Contrastive prompt tuning",
    "AdaptConfig": "Adaptation (stage 2)",
    "PredictConfig": "Prediction (stage 3)",
    "BenchConfig": DATA,
    "CacheOptions": CACHE,
}
PANEL_ORDER = (
    *(DATA, METHOD, MODEL, "Learning (stage 1)", "Contrastive prompt tuning", "Adaptation (stage 2)"),
    *("Prediction (stage 3)", HUB, OUTPUT, CACHE, OTHER),
)
OPTION_PANELS = {  # the panel of each option that declares none
    **dict.fromkeys(("source", "data", "datasets", "protocol", "names", "names_file"), DATA),
    **dict.fromkeys(("methods", "method", "set", "seeds", "compare"), METHOD),
    **dict.fromkeys(("out", "format", "as_json", "metric", "paper", "resume", "dry_run"), OUTPUT),
}
METAVARS = {  # for fields of configuration classes
    "model": "NAME|FOLDER",
    "pretrained": "NAME|FILE",
    "device": "DEVICE",
    "template": "TEMPLATE",
    "cache_gb": "GB|none",
}
EMBEDDED_PROMPT = "embedded"
TYPE_METAVARS = {"int": "INT", "float": "FLOAT", "str": "TEXT", "path": "PATH", "list[str]": "TEXT"}


class HelpfulCommand(TyperCommand):
    """A command whose `--help` groups the options in panels, in the same order for all commands."""

    _formats_help = False

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters sorted by panel. Within a panel they keep the order of their declaration."""
        params = super().get_params(ctx)
        for param in params:
            _tidy(param, ctx)
            if isinstance(param, TyperOption):
                param.rich_help_panel = param.rich_help_panel or OPTION_PANELS.get(str(param.name), OTHER)
        params = sorted(params, key=_panel_rank)
        return list(map(_without_opposite, params)) if self._formats_help else params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self._formats_help = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._formats_help = False


class HelpfulGroup(TyperGroup):
    """The group of all commands, with the same `--help`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        params = super().get_params(ctx)
        for param in params:
            _tidy(param, ctx)
        return params


def _without_opposite(param: Any) -> Any:
    """Return a copy of a flag for the help, in which `--no-flag` is part of the help text.

    Typer gives `--no-flag` a column of its own, which at 80 columns leaves too little room for the help texts.
    """
    if not param.secondary_opts:
        return param
    shown = copy.copy(param)
    (name,), (opposite,) = param.opts, param.secondary_opts
    shown.secondary_opts = []
    if opposite == f"--no-{name[2:]}":
        shown.help = f"{param.help} The opposite is {opposite}."
        shown.default, shown.is_bool_flag = "on" if param.default else "off", False
    else:
        shown.opts = [f"{name}/{opposite}"]
    return shown


def _tidy(param: Any, ctx: Any) -> None:
    """Give a parameter a metavar instead of a Python type, and make its help text a sentence."""
    param.help = f"{param.help[:1].upper()}{param.help[1:].rstrip('.')}." if param.help else None
    if param.metavar is not None:
        pass
    elif not isinstance(param, TyperOption):
        param.metavar = str(param.name).upper()
    elif param.is_flag:
        param.metavar = ""
    else:
        kind = param.display_type(ctx).strip("<>")
        param.metavar = TYPE_METAVARS.get(kind, kind)
    if not isinstance(param, TyperOption):
        usage = f"{param.metavar}{'' if param.nargs == 1 else '...'}"
        param.display_type_rich = lambda ctx: None  # noqa: ARG005  # an argument is described by its name
        param.get_usage_pieces = lambda ctx: [usage if param.required else f"[{usage}]"]  # noqa: ARG005


def _panel_rank(param: Any) -> int:
    if not isinstance(param, TyperOption):
        return -1
    return PANEL_ORDER.index(param.rich_help_panel) if param.rich_help_panel in PANEL_ORDER else len(PANEL_ORDER)


@dataclass(frozen=True)
class ModelOptions(Config):
    """The model, its device and its precision."""

    model: str | None = setting(
        None,
        "A model of open_clip (see `selftpt models`), hf-hub:ORG/REPO, or a folder. By default the model of the prompt "
        "or classifier file; without a file, the embedded model.",
    )
    pretrained: str | None = setting(
        None,
        "The weights: a published name, a checkpoint file, or random. Predictions with random weights are meaningless.",
    )
    device: str | None = setting(None, "The device: cpu, cuda or mps. By default the best one that is available.")
    precision: Precision = setting("fp32", "Precision of the image tower.")

    def load(self, made_with: ModelId | None = None, what: str = "the file") -> Model:
        """Load the model that the options name, else the model that a file was made with, else the embedded model.

        Args:
            made_with: The model that a file names. A folder or a repository is loaded only if --model names it.
            what: The file, for error messages.

        Raises:
            SelfTPTError: The model cannot be loaded.
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
            note("the weights are random: the predictions are meaningless")
        return model

    def prompt(self, file: Path | None) -> Prompt:
        """Load a prompt.

        Args:
            file: A file, or `hub:USER/REPO`. None, or `embedded`, is the prompt of the embedded model.

        Raises:
            SelfTPTError: The prompt cannot be loaded, or belongs to another model than --model.
        """
        from selftpt.hub import resolve
        from selftpt.models import EMBEDDED
        from selftpt.models.loading import find_source
        from selftpt.prompt import Prompt

        if file is not None and str(file) != EMBEDDED_PROMPT:
            return Prompt.load(resolve(file, "prompt"))
        if self.model not in (None, EMBEDDED):
            find_source(str(self.model), self.pretrained)
            raise SelfTPTError(
                f"no prompt comes with the model {self.model!r}: give --prompt FILE, which `selftpt learn` writes, or "
                "use `classify --zero-shot`, which needs none"
            )
        return Prompt.embedded()


@dataclass(frozen=True)
class CacheOptions(Config):
    """Options of the cache on disk."""

    cache_mode: CacheMode = setting(
        "on", "Whether results are cached on disk. With read-only, cached results are used and none is added."
    )
    cache_gb: float | None = setting(
        20.0,
        "Size limit of the cache in GB; none is no limit. Beyond it, the least recently used results are deleted.",
        above=0,
    )

    def cache(self) -> Cache:
        """Open the cache."""
        from selftpt.data.cache import Cache

        return Cache(self.cache_mode, self.cache_gb)


def note(text: str) -> None:
    """Print a note on standard error."""
    print(f"note: {text}", file=sys.stderr)


def _number_or_none(number: type[int] | type[float], name: str, value: str | float) -> float | None:
    if value == "none":
        return None
    try:
        return none_for_zero(name, int(value)) if number is int else number(value)
    except ValueError:
        raise ValueError(f"{value!r} is neither a number of type {number.__name__} nor none") from None


def with_settings(**groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that the fields of configuration classes become its options.

    Args:
        groups: The configuration class of each parameter of the command that is a configuration.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name not in groups]
        added = [parameter for group in groups.values() for parameter in _parameters(group)]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            configs = {name: _make_config(group, values) for name, group in groups.items()}
            command(**{p.name: values[p.name] for p in own}, **configs)

        run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return run

    return decorate


def _parameters(group: type[Any]) -> Iterator[inspect.Parameter]:
    """Yield an option for each field of a configuration class and of its nested classes.

    On the command line, the items of a tuple are separated by commas.
    """
    hints = get_type_hints(group)
    panel = PANELS.get(group.__name__)
    for field in dataclasses.fields(group):
        kind, default = hints[field.name], field.default
        if dataclasses.is_dataclass(kind):
            yield from _parameters(cast("type[Any]", kind))
            continue
        more: dict[str, Any] = {"metavar": METAVARS.get(field.name)}
        if number := {int, float} & {*get_args(kind)}:
            (number_type,) = number
            parse = functools.partial(_number_or_none, number_type, f"--{field.name.replace('_', '-')}")
            more = {"parser": parse, "metavar": METAVARS.get(field.name, f"{TYPE_METAVARS[number_type.__name__]}|none")}
            default = "none" if default is None else default
        elif get_origin(kind) is tuple:
            kind, default, more = str, ",".join(cast("tuple[str, ...]", default)), {"metavar": "LIST"}
        if field.name == "model":
            more["autocompletion"] = complete_model
        option = typer.Option(help=field.metadata["help"], rich_help_panel=panel, **more)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )


def _make_config(group: type[Any], options: dict[str, Any]) -> Any:
    """Make a configuration from the values of the options."""
    hints = get_type_hints(group)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            values[field.name] = _make_config(cast("type[Any]", kind), options)
        elif get_origin(kind) is tuple:
            values[field.name] = comma_separated(options[field.name])
        elif kind == str | None and options[field.name] == "none":
            values[field.name] = None
        else:
            values[field.name] = options[field.name]
    try:
        return group(**values)
    except SelfTPTError as error:
        as_option = re.sub(rf"^{group.__name__}\.(\w+)", lambda found: f"--{found[1].replace('_', '-')}", str(error))
        raise SelfTPTError(as_option) from error


def comma_separated(text: str) -> tuple[str, ...]:
    """Split a text at its commas, without empty parts."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


# These repeat the keys of DATASETS and PROTOCOLS, whose modules take too long to import for shell completion. A test
# checks that they agree.
DATASET_NAMES = (
    *("imagenet", "caltech101", "oxford_pets", "stanford_cars", "oxford_flowers", "food101", "fgvc_aircraft"),
    *("sun397", "dtd", "eurosat", "ucf101", "imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r"),
)
PROTOCOL_NAMES = ("base-to-new", "cross-dataset", "domain")


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a model, from the file names of open_clip's configurations."""
    names = ["selftpt-tiny"]
    spec = importlib.util.find_spec("open_clip")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        names += sorted(path.stem for path in Path(place, "model_configs").glob("*.json"))
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete_method(incomplete: str) -> list[str]:
    """Complete the name of a method, or the last name of a comma-separated list."""
    from selftpt.methods import METHODS

    return _complete_last(incomplete, METHODS)


def complete_dataset(incomplete: str) -> list[str]:
    """Complete the name of a dataset, or the last name of a comma-separated list."""
    return _complete_last(incomplete, DATASET_NAMES)


def complete_protocol(incomplete: str) -> list[str]:
    """Complete the name of a protocol."""
    return _complete_last(incomplete, PROTOCOL_NAMES)


def _complete_last(incomplete: str, names: Any) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


Names = Annotated[
    str | None,
    typer.Option("--names", metavar="NAMES", help="Class names, separated by commas.", rich_help_panel=DATA),
]
NamesFile = Annotated[
    Path | None,
    typer.Option(
        "--names-file",
        metavar="FILE",
        help="A file with one class name per line, or a JSON list of names. Lines `name: description`, or a JSON "
        "object from names to lists of descriptions, also describe the classes, for methods that use descriptions.",
        rich_help_panel=DATA,
    ),
]
Images = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGES",
        help="Image files, folders, or quoted patterns such as 'photos/*.jpg'. A dash (-) reads paths from standard "
        "input, one per line.",
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt",
        metavar="FILE",
        help="A prompt that `selftpt learn` wrote, hub:USER/REPO, or embedded: the prompt of the embedded model, which "
        "is the default.",
        rich_help_panel=MODEL,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Change a setting of the method, such as learn.lr=0.02. Repeat the option for more settings.",
        rich_help_panel=METHOD,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)]


class Classes(NamedTuple):
    """Class names in their order, and descriptions of some of them."""

    names: list[str]
    descriptions: dict[str, list[str]]

    def note_unused(self, method: str) -> None:
        """Print a note if there are descriptions, which the method does not use."""
        if self.descriptions:
            note(f"{method} does not use the descriptions of the names file; `predict --method visdesc` does")


def read_classes(names: str | None, file: Path | None) -> Classes:
    """Read class names, and descriptions if there are any, from --names or --names-file.

    Raises:
        SelfTPTError: Neither or both options are given, or the file cannot be read.
    """
    if (names is None) == (file is None):
        raise SelfTPTError("give the class names either with --names 'cat, dog' or with --names-file FILE")
    if names is not None:
        return Classes(list(check_names(comma_separated(names))), {})
    assert file is not None
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SelfTPTError(f"cannot read class names from {file}: {error}") from error
    if not text.lstrip().startswith(("[", "{")):
        found, descriptions = parse_names(text)
        return Classes(list(check_names(found)), descriptions)
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise SelfTPTError(f"{file} starts like JSON but is not valid JSON: {error}") from error
    if isinstance(listed, dict):
        return Classes(list(check_names(list(listed))), listed)
    try:
        return Classes(list(check_names(listed)), {})
    except SelfTPTError as error:
        raise SelfTPTError(f"{file} must be a JSON list of strings: {error}") from error


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`. The value is `none`, JSON, or else a string.

    Raises:
        SelfTPTError: There is no value.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise SelfTPTError(f"--set takes a setting with its value, such as learn.lr=0.02, not {text!r}")
    try:
        return key.strip(), None if value.strip() == "none" else json.loads(value)
    except ValueError:
        return key.strip(), value
