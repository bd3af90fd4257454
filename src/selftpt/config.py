"""Configuration: frozen dataclasses that check their fields.

Every output is saved with its configuration. The options of the command line are generated from the fields. `None`
means "no limit", in Python and on the command line (`none`). This module does not import torch, so that
`selftpt --help` and errors about options appear immediately.
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
CptView = Literal["end", "front", "middle", "hand_crafted"]  # Eq. 7 and Eq. 8
Reduction = Literal["mean", "sum"]
Matching = Literal["cosine", "mse"]
Guard = Literal["none", "floor", "limit", "normalize", "gate"]
ClassVectors = Literal["end", "mean"]
Precision = Literal["fp32", "bf16", "fp16"]
CacheMode = Literal["on", "off", "read-only"]

# Names that earlier versions used. They are still accepted in files and, with a deprecation warning, from users.
RENAMED_SETTINGS = {"confident": "confidence_ratio", "equal_apart": "duplicates_as_negatives"}
RENAMED_VIEWS = {"hand": "hand_crafted"}

INT_LIMIT = 2**31  # all libraries and random generators in use accept integers below this
LIMITS = {"above": "above {:g}", "minimum": "{:g} or more", "maximum": "at most {:g}", "below": "below {:.10g}"}


def setting(default: Any, text: str, *, local: bool = False, **limits: float) -> Any:
    """Declare a field of a `Config`.

    Args:
        default: The default value.
        text: The help text on the command line.
        local: Whether the value names a file, folder or repository. Such a value is never taken from a file, because
            the file may come from someone else.
        limits: The range of a number: `above`, `minimum`, `maximum`, `below`. A subclass that declares the field again
            with another default inherits the limits that it does not specify.
    """
    assert limits.keys() <= LIMITS.keys()
    return field(default=default, metadata={"help": text, **limits} | ({"local": True} if local else {}))


@dataclass(frozen=True)
class Config:
    """Base class of all configurations. It checks each field against its annotation and its limits.

    A field is annotated with `int`, `float`, `bool`, `str`, a `Literal` of strings, `tuple[X, ...]` of one of these,
    another `Config`, or one of them `| None`. An `int` is converted to a `float` where the annotation is `float`, a
    NumPy scalar to its Python value, and a list to a tuple; nothing else is converted. A subclass with its own checks
    calls `super().__post_init__()` first, which guarantees the types:

        @dataclass(frozen=True)
        class Settings(Config):
            views: int = setting(64, "views of an image", above=0)
            share: float = setting(0.1, "share of the views that is kept", above=0, maximum=1)

            def __post_init__(self) -> None:
                super().__post_init__()
                if self.views * self.share < 1:
                    raise SelfTPTError(f"share {self.share:g} keeps none of the {self.views} views")

    Raises:
        SelfTPTError: A field does not allow its value.
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
        """Return the metadata of each field, including inherited metadata."""
        metadata: dict[str, dict[str, Any]] = {}
        for base in reversed(cls.__mro__):
            for name, declared in getattr(base, "__dataclass_fields__", {}).items():
                metadata[name] = {**metadata.get(name, {}), **declared.metadata}
        return metadata


def _convert(kind: Any, limits: Mapping[str, Any], value: Any) -> Any:
    """Convert a value to the type of its annotation.

    Raises:
        ValueError: The annotation or the limits do not allow the value.
    """
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
    """Describe the values that a field allows, for the error message about `value`."""
    inner = get_args(kind)
    if _optional(kind):
        return f"{_describe(inner[0], limits, value)}, or none"
    if get_origin(kind) is tuple:
        return f"a list in which each item is {_describe(inner[0], limits, value)}"
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
    """Check that a template has exactly one {} for the class name.

    Raises:
        SelfTPTError: It has none or several.
    """
    if template.count("{}") != 1:
        raise SelfTPTError(f"the template {template!r} must have one {{}} where the class name goes")


@dataclass(frozen=True)
class ContrastConfig(Config):
    """Configuration of contrastive prompt tuning, CPT (Eq. 7 to 9). It is saved with a prompt, and stage 2 uses it."""

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
        """The views that contain prompt vectors: all but the hand-crafted one."""
        return tuple(view for view in VIEWS if view in self.views)


# For methods without a hand-crafted view: the length of class names is then not limited by a template.
PROMPT_ALONE = ContrastConfig(views=VIEWS)


@dataclass(frozen=True)
class TrainConfig(Config):
    """Configuration of learning from labelled images, shared by all such methods. The defaults are the paper's."""

    length: int = setting(4, "number of context vectors, M", above=0)
    words: str = setting("a photo of a", "words whose token embeddings initialise the context")
    epochs: int = setting(10, "epochs", above=0)
    shots: int | None = setting(16, "images per class; none takes all", above=0)
    crops: int | None = setting(
        None, "random crops of each image, used in turn; none makes a new crop for every epoch", above=0
    )
    batch: int = setting(4, "images per step", above=0)
    lr: float = setting(0.002, "learning rate", above=0)
    warmup_lr: float = setting(1e-5, "learning rate of the warm-up, which is the first epoch", above=0)
    momentum: float = setting(0.9, "momentum of SGD", minimum=0, below=1)
    weight_decay: float = setting(5e-4, "weight decay of SGD", minimum=0)
    chunk: int | None = setting(256, "classes encoded at once; none encodes all at once", above=0)
    seed: int = setting(1, "random seed", minimum=0, below=INT_LIMIT)
    max_megapixels: float = setting(80.0, "maximum size of an image; larger images are rejected", above=0)


@dataclass(frozen=True)
class LearnConfig(TrainConfig):
    """Configuration of stage 1. The defaults are the paper's, where it gives them; docs/method.md lists the others."""

    ce: float = setting(1.0, "weight of cross-entropy", minimum=0)
    cpt: float = setting(1.0, "weight of contrastive prompt tuning", minimum=0)
    gm: float = setting(1.0, "weight of gradient matching", minimum=0)
    matching: Matching = setting("cosine", "how gradients are matched: cosine or mse")
    decay: float = setting(0.9, "decay of the moving average of gradients; 0 turns it off", minimum=0, below=1)
    guard: Guard = setting(
        "none", "how gradient matching is kept from dominating: none (the paper), floor, limit, normalize or gate"
    )
    guard_ratio: float = setting(0.1, "ratio of norms at which the guard takes effect", above=0)
    hidden: int | None = setting(None, "hidden width of the head; none takes the dimension of the features", above=0)
    projection: int = setting(128, "output width of the head", above=0)
    classes_per_step: int | None = setting(
        None, "classes sampled for each step; none takes all, which is exact", minimum=2
    )
    contrast: ContrastConfig = field(default_factory=ContrastConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ce == self.cpt == self.gm == 0:
            raise SelfTPTError("all three losses have weight 0: nothing to learn from")

    @property
    def contrasts(self) -> bool:
        """Whether CPT is computed, as a loss or for gradient matching."""
        return self.cpt > 0 or self.gm > 0


@dataclass(frozen=True)
class AdaptConfig(Config):
    """Configuration of stage 2. The defaults are the paper's, where it gives them; docs/method.md lists the others."""

    steps: int = setting(10, "steps of SGD", minimum=0)
    lr: float = setting(0.1, "learning rate", above=0)
    momentum: float = setting(0.0, "momentum of SGD", minimum=0)
    weight_decay: float = setting(0.0, "weight decay of SGD", minimum=0)
    template: str | None = setting(
        None, "template of the hand-crafted view, with {} for the class name; none takes the prompt's"
    )
    vectors: ClassVectors = setting("end", "class vectors: those of the end view, or the mean over the learned views")
    chunk: int | None = setting(256, "classes encoded at once; none encodes all at once", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None:
            check_template(self.template)


@dataclass(frozen=True)
class PredictConfig(Config):
    """Configuration of stage 3. With several views, predictions are averaged over them; 64 views are Self-TPT-v."""

    top: int = setting(5, "classes listed for each image", above=0)
    views: int = setting(1, "views of an image: the image and random crops of it; 64 is Self-TPT-v", above=0)
    confidence_ratio: float = setting(
        1.0, "share of the views that are averaged: those with the lowest entropy", above=0, maximum=1
    )
    seed: int = setting(0, "seed of the random crops", minimum=0, below=INT_LIMIT)
    batch: int = setting(32, "images or views that the image tower encodes at once", above=0)
    max_megapixels: float = setting(80.0, "maximum size of an image; larger images are rejected", above=0)


@dataclass(frozen=True)
class BenchConfig(Config):
    """How much data a benchmark uses. The defaults are the paper's."""

    shots: int | None = setting(16, "images per class to learn from; none takes all", above=0)
    share: float = setting(1.0, "share of these images that is used: 0.25, 0.5, 0.75", above=0, maximum=1)
    source_classes: int | None = setting(
        None, "classes to learn from, sampled with the seed; none takes all", minimum=2
    )
    limit: int | None = setting(
        None,
        "test images per dataset (in base-to-new, per half), balanced over classes; none takes all",
        above=0,
    )


def kind_of(settings: Any, path: Sequence[str]) -> Any:
    """Return the annotation of the field at `path`, or None if there is no such field."""
    name, *rest = path
    name = RENAMED_SETTINGS.get(name, name)
    if name not in {field.name for field in dataclasses.fields(settings)}:
        return None
    if dataclasses.is_dataclass(value := getattr(settings, name)):
        return kind_of(value, rest) if rest else None
    return None if rest else get_type_hints(type(settings))[name]


def change(settings: Any, changes: Mapping[str, Any]) -> Any:
    """Replace fields of a configuration.

    All fields are replaced at once, because the values that one field allows may depend on another.

    Args:
        settings: The configuration.
        changes: New values by the dotted names of existing fields: `{"learn.lr": 0.02}`. Values are JSON values, as
            `--set` passes them. A tuple may also be a string of items separated by commas.

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
    """Restore a configuration from the output of `dataclasses.asdict`, after a round trip through JSON.

    Args:
        default: A configuration of the same class.
        values: The values of exactly its fields.

    Raises:
        SelfTPTError: A field is missing or unknown, or does not allow its value.
    """
    fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    if isinstance(values, Mapping):
        values = current_names(values)
    if not isinstance(values, Mapping) or values.keys() != fields.keys():
        raise SelfTPTError(
            f"{type(default).__name__} comes from another version of selftpt: its fields must be {', '.join(fields)}"
        )
    return dataclasses.replace(
        default,
        **{
            name: restore(own, values[name]) if dataclasses.is_dataclass(own) else values[name]
            for name, own in fields.items()
        },
    )


def current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the fields of a configuration that an earlier version wrote to their present names."""
    return {RENAMED_SETTINGS.get(name, name): value for name, value in values.items()}


def deprecated(what: str, instead: str) -> None:
    """Warn that `what` is deprecated and will be removed in the next release."""
    warnings.warn(f"{what} is deprecated: write {instead}", SelfTPTWarning, stacklevel=3)


def without_places(default: Any) -> dict[str, Any]:
    """Return the default values of those fields of a configuration that name files, folders or repositories."""
    return {
        field.name: getattr(default, field.name) for field in dataclasses.fields(default) if "local" in field.metadata
    }


def none_for_zero(name: str, value: int) -> int | None:
    """Return None for 0, with a deprecation warning: earlier versions accepted 0 for "no limit"."""
    if value == 0:
        deprecated(f"0 for {name}", "none")
    return value or None
