"""Configuration: frozen dataclasses whose fields are checked when an object is made.

Every output is saved with its configuration, and the fields are the options of the command line. `None` means "no
limit", in Python and on the command line (`none`). This module imports nothing heavy, so that `selftpt --help` and a
wrong option are answered at once.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from selftpt.errors import SelfTPTError, SelfTPTWarning

View = Literal["end", "front", "middle"]
VIEWS: tuple[View, ...] = ("end", "front", "middle")  # Eq. 7, in its order
CptView = Literal["end", "front", "middle", "hand_crafted"]  # and Eq. 8
Reduction = Literal["mean", "sum"]
Matching = Literal["cosine", "mse"]
ClassVectors = Literal["end", "mean"]
Precision = Literal["fp32", "bf16", "fp16"]
CacheMode = Literal["on", "off", "read-only"]

# Names that earlier versions used. They are still accepted in files and, with a deprecation warning, where a user types
# them.
RENAMED_SETTINGS = {"confident": "confidence_ratio", "equal_apart": "duplicates_as_negatives"}
RENAMED_VIEWS = {"hand": "hand_crafted"}

INT_LIMIT = 2**31  # what every library and generator underneath takes
LIMITS = {"above": "above {:g}", "minimum": "{:g} or more", "maximum": "at most {:g}", "below": "below {:.10g}"}


def setting(default: Any, text: str, *, local: bool = False, **limits: float) -> Any:
    """A field of a `Config`.

    Args:
        default: its default value.
        text: its help on the command line.
        local: whether it names a file, folder or repository, which a file from someone else must not decide.
        limits: the range of a number, by `above`, `minimum`, `maximum` and `below`. A subclass that declares the field
            again with another default inherits the limits that it does not give.
    """
    assert limits.keys() <= LIMITS.keys()
    return field(default=default, metadata={"help": text, **limits} | ({"local": True} if local else {}))


@dataclass(frozen=True)
class Config:
    """Base class of every configuration: each field is checked against its annotation and its limits.

    A field is annotated with `int`, `float`, `bool`, `str`, a `Literal` of strings, `tuple[X, ...]` of one of these,
    another `Config`, or one of them `| None`. An `int` is accepted for a `float` and converted, NumPy scalars become
    their Python values, a list becomes a tuple; nothing else is converted. A subclass with checks of its own calls
    `super().__post_init__()` first, after which the types are known:

        @dataclass(frozen=True)
        class Settings(Config):
            views: int = setting(64, "views of an image", above=0)
            share: float = setting(0.1, "share of the views that is kept", above=0, maximum=1)

            def __post_init__(self) -> None:
                super().__post_init__()
                if self.views * self.share < 1:
                    raise SelfTPTError(f"share {self.share:g} keeps none of the {self.views} views")

    Raises:
        SelfTPTError: a value is not what its field allows.
    """

    def __post_init__(self) -> None:
        kinds, limits = get_type_hints(type(self)), self._limits()
        for name, kind in kinds.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, _convert(kind, limits[name], value))
            except ValueError:
                expected, shown = _describe(kind, limits[name], value), repr(value)
                shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
                raise SelfTPTError(f"{type(self).__name__}.{name} must be {expected}, not {shown}") from None

    @classmethod
    def _limits(cls) -> dict[str, dict[str, Any]]:
        """The metadata of each field, with what it inherits."""
        metadata: dict[str, dict[str, Any]] = {}
        for base in reversed(cls.__mro__):
            for name, declared in getattr(base, "__dataclass_fields__", {}).items():
                metadata[name] = {**metadata.get(name, {}), **declared.metadata}
        return metadata


def _convert(kind: Any, limits: Mapping[str, Any], value: Any) -> Any:
    """A value as its annotation has it; ValueError if the annotation or the limits do not allow it."""
    if getattr(value, "shape", None) == ():  # a NumPy scalar
        value = value.item()
    inner = get_args(kind)
    if _optional(kind):
        return None if value is None else _convert(inner[0], limits, value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_convert(inner[0], limits, part) for part in value)
    if get_origin(kind) is Literal and isinstance(value, str) and value in inner:
        return str(value)
    if kind is str and isinstance(value, str):
        value.encode()  # UnicodeEncodeError is a ValueError
        return str(value)
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
    elif kind is int and isinstance(value, int) and abs(value) < INT_LIMIT and _within(limits, value):
        return int(value)
    elif kind is float and isinstance(value, int | float) and _within(limits, value):
        return float(value)
    elif isinstance(kind, type) and issubclass(kind, Config) and isinstance(value, kind):
        return value
    raise ValueError


def _within(limits: Mapping[str, Any], value: float) -> bool:
    return (
        abs(value) <= sys.float_info.max  # neither infinite nor NaN
        and not ("above" in limits and value <= limits["above"])
        and not ("minimum" in limits and value < limits["minimum"])
        and not ("maximum" in limits and value > limits["maximum"])
        and not ("below" in limits and value >= limits["below"])
    )


def _describe(kind: Any, limits: Mapping[str, Any], value: Any) -> str:
    """What a field allows, for the error message about `value`."""
    inner = get_args(kind)
    if _optional(kind):
        return f"{_describe(inner[0], limits, value)}, or none"
    if get_origin(kind) is tuple:
        return f"a list of which each item is {_describe(inner[0], limits, value)}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(inner)}"
    if kind is int and isinstance(value, int) and abs(value) >= INT_LIMIT:
        limits = {"below": INT_LIMIT, **limits}
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string that UTF-8 can encode"}
    bounds = " and ".join(text.format(limits[limit]) for limit, text in LIMITS.items() if limit in limits)
    return f"{names.get(kind) or f'a {kind.__name__}'} {bounds}".rstrip()


def _optional(kind: Any) -> bool:
    return isinstance(kind, types.UnionType)


def check_template(template: str) -> None:
    """Refuse a template without exactly one {} for the class name."""
    if template.count("{}") != 1:
        raise SelfTPTError(f"the template {template!r} must have one {{}} where the class name goes")


@dataclass(frozen=True)
class ContrastConfig(Config):
    """Contrastive prompt tuning. Eq. 7 to 9; a prompt keeps it, and stage 2 follows it."""

    views: tuple[CptView, ...] = setting(("end", "front", "middle", "hand_crafted"), "views that CPT contrasts")
    template: str = setting("a photo of a {}.", "template of the hand-crafted view")
    temperature: float = setting(0.07, "temperature of CPT", above=0)
    reduction: Reduction = setting("mean", "mean or sum over the terms of Eq. 9")
    normalize: bool = setting(True, "L2-normalise the projected features")
    duplicates_as_negatives: bool = setting(False, "treat classes with the same name as negatives of each other")

    def __post_init__(self) -> None:
        if isinstance(self.views, list | tuple):
            object.__setattr__(self, "views", tuple(RENAMED_VIEWS.get(view, view) for view in self.views))
        super().__post_init__()
        if len(self.views) < 2 or len(set(self.views)) != len(self.views):
            raise SelfTPTError(f"CPT needs two or more different views, not {' '.join(self.views) or 'none'}")
        check_template(self.template)

    @property
    def learned(self) -> tuple[View, ...]:
        """Those of the views that have soft prompts."""
        return tuple(view for view in VIEWS if view in self.views)


PROMPT_ALONE = ContrastConfig(views=VIEWS)  # without a hand-crafted view: class names need no room for a template


@dataclass(frozen=True)
class TrainConfig(Config):
    """Learning a prompt from labelled images, as all methods of CoOp's family do. The defaults are the paper's."""

    length: int = setting(4, "number of context vectors, M", above=0)
    words: str = setting("a photo of a", "words the context starts from")
    epochs: int = setting(10, "epochs", above=0)
    shots: int | None = setting(16, "images per class; none takes all", above=0)
    crops: int | None = setting(
        None, "random crops of each image, taken in turn; none makes a new one for every epoch", above=0
    )
    batch: int = setting(4, "images per step", above=0)
    lr: float = setting(0.002, "learning rate", above=0)
    warmup_lr: float = setting(1e-5, "learning rate of the first epoch", above=0)
    momentum: float = setting(0.9, "momentum of SGD", minimum=0, below=1)
    weight_decay: float = setting(5e-4, "weight decay of SGD", minimum=0)
    chunk: int | None = setting(256, "classes encoded at once; none encodes all at once", above=0)
    seed: int = setting(1, "random seed", minimum=0, below=INT_LIMIT)
    max_megapixels: float = setting(80.0, "larger images are refused", above=0)


@dataclass(frozen=True)
class LearnConfig(TrainConfig):
    """Stage 1. The defaults are the paper's where it says; docs/method.md lists what it leaves open."""

    ce: float = setting(1.0, "weight of cross-entropy", minimum=0)
    cpt: float = setting(1.0, "weight of contrastive prompt tuning", minimum=0)
    gm: float = setting(1.0, "weight of gradient matching", minimum=0)
    matching: Matching = setting("cosine", "how gradients are matched: cosine or mse")
    decay: float = setting(0.9, "decay of the moving average of gradients; 0 turns it off", minimum=0, below=1)
    hidden: int | None = setting(None, "hidden width of the head; none takes that of the features", above=0)
    projection: int = setting(128, "output width of the head", above=0)
    classes_per_step: int | None = setting(
        None, "classes drawn for each step; none takes all, which is exact", minimum=2
    )
    contrast: ContrastConfig = field(default_factory=ContrastConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ce == self.cpt == self.gm == 0:
            raise SelfTPTError("all three losses have weight 0: nothing to learn from")

    @property
    def contrasts(self) -> bool:
        """Whether CPT is needed: as a loss, or for its gradient."""
        return self.cpt > 0 or self.gm > 0


@dataclass(frozen=True)
class AdaptConfig(Config):
    """Stage 2. The defaults are the paper's where it says; docs/method.md lists what it leaves open."""

    steps: int = setting(10, "steps of SGD", minimum=0)
    lr: float = setting(0.1, "learning rate", above=0)
    momentum: float = setting(0.0, "momentum of SGD", minimum=0)
    weight_decay: float = setting(0.0, "weight decay of SGD", minimum=0)
    template: str | None = setting(
        None, "template of the hand-crafted view, with {} for the class name; none takes the prompt's"
    )
    vectors: ClassVectors = setting("end", "class vectors: of the end view, or the mean of the learned views")
    chunk: int | None = setting(256, "classes encoded at once; none encodes all at once", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None:
            check_template(self.template)


@dataclass(frozen=True)
class PredictConfig(Config):
    """Stage 3. With `views` above 1 it is Self-TPT-v: the image and random crops of it, merged."""

    top: int = setting(5, "classes named for each image", above=0)
    views: int = setting(1, "views of an image: itself and random crops; 64 is Self-TPT-v", above=0)
    confidence_ratio: float = setting(
        1.0, "share of the views that are merged: those with the lowest entropy", above=0, maximum=1
    )
    seed: int = setting(0, "seed of the random crops", minimum=0, below=INT_LIMIT)
    batch: int = setting(32, "images or views that the image tower encodes at once", above=0)
    max_megapixels: float = setting(80.0, "larger images are refused", above=0)


@dataclass(frozen=True)
class BenchConfig(Config):
    """How much of the data a benchmark takes. The defaults are the paper's."""

    shots: int | None = setting(16, "images per class to learn from; none takes all", above=0)
    share: float = setting(1.0, "share of these images that is used: 0.25, 0.5, 0.75", above=0, maximum=1)
    source_classes: int | None = setting(None, "classes to learn from, drawn by the seed; none takes all", minimum=2)
    limit: int | None = setting(
        None,
        "test images of each dataset (in base-to-new of each half), balanced over classes; none takes all",
        above=0,
    )


def kind_of(settings: Any, path: Sequence[str]) -> Any:
    """The annotation of the field at `path`, or None if there is no such field."""
    name, *rest = path
    name = RENAMED_SETTINGS.get(name, name)
    if name not in {field.name for field in dataclasses.fields(settings)}:
        return None
    if dataclasses.is_dataclass(value := getattr(settings, name)):
        return kind_of(value, rest) if rest else None
    return None if rest else get_type_hints(type(settings))[name]


def change(settings: Any, changes: Mapping[str, Any]) -> Any:
    """Replace fields, all at once, because the values of one may decide which values another may have.

    Args:
        settings: A configuration.
        changes: Values by the dotted names of fields, which must exist: `{"learn.lr": 0.02}`. A value is one of JSON,
            as `--set` gives it; for a tuple also a string with commas.

    Raises:
        SelfTPTError: A field does not allow its value.
    """
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        if name in RENAMED_SETTINGS:
            deprecated(f"the setting {name}", name := RENAMED_SETTINGS[name])
        if rest:
            nested.setdefault(name, {})[rest] = value
            continue
        kind = kind_of(settings, [name])
        if get_origin(kind) is tuple and isinstance(value, str):
            value = value.split(",")
        elif _optional(kind) and type(value) is int:
            value = none_for_zero(name, value)
        own[name] = value
    own |= {name: change(getattr(settings, name), inner) for name, inner in nested.items()}
    return dataclasses.replace(settings, **own)


def restore(default: Any, values: Mapping[str, Any]) -> Any:
    """A configuration from what `dataclasses.asdict` made of it, after a round trip through JSON.

    Args:
        default: A configuration of the same classes.
        values: Its fields; all must be there, and no others.

    Raises:
        SelfTPTError: The fields are others, or do not allow the values.
    """
    fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    if isinstance(values, Mapping):
        values = current_names(values)
    if not isinstance(values, Mapping) or values.keys() != fields.keys():
        raise SelfTPTError(
            f"{type(default).__name__} of another version of selftpt: it has the fields {', '.join(fields)}"
        )
    return dataclasses.replace(
        default,
        **{
            name: restore(own, values[name]) if dataclasses.is_dataclass(own) else values[name]
            for name, own in fields.items()
        },
    )


def current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that an earlier version wrote, under the names of this version."""
    return {RENAMED_SETTINGS.get(name, name): value for name, value in values.items()}


def deprecated(what: str, instead: str) -> None:
    """Warn that `what` is deprecated and will be removed in the next release."""
    warnings.warn(f"{what} is deprecated: write {instead}", SelfTPTWarning, stacklevel=3)


def without_places(default: Any) -> dict[str, Any]:
    """The default values of the fields of a configuration that name files, folders or repositories."""
    return {
        field.name: getattr(default, field.name) for field in dataclasses.fields(default) if "local" in field.metadata
    }


def none_for_zero(name: str, value: int) -> int | None:
    """The value of a setting that may be None, for which the command line took 0 before: deprecated."""
    if value == 0:
        deprecated(f"0 for {name}", "none")
    return value or None
