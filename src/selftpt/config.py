"""Settings of the three stages: frozen, checked when made, saved with every output, and the CLI's options.

None is what the command line calls 0. They import nothing heavy, so that `selftpt --help` and a wrong option are
answered at once.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from selftpt.errors import SelfTPTError

View = Literal["end", "front", "middle"]
VIEWS: tuple[View, ...] = ("end", "front", "middle")  # Eq. 7, in its order
CptView = Literal["end", "front", "middle", "hand"]  # and Eq. 8
Reduction = Literal["mean", "sum"]
Matching = Literal["cosine", "mse"]
ClassVectors = Literal["end", "mean"]
Precision = Literal["fp32", "bf16", "fp16"]


def setting(default: Any, text: str) -> Any:
    """A field with its default and its help."""
    return field(default=default, metadata={"help": text})


def above(low: float, settings: Any, *names: str) -> None:
    """Refuse settings of which one of these is not above `low`; None is what is not set."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > low:
            raise SelfTPTError(f"{name} must be above {low:g}, not {value}")


def at_least(low: float, settings: Any, *names: str) -> None:
    """Refuse settings of which one of these is below `low`."""
    for name in names:
        if not getattr(settings, name) >= low:
            raise SelfTPTError(f"{name} must be {low:g} or more, not {getattr(settings, name)}")


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise SelfTPTError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise SelfTPTError(f"seed must be 0 or more and below 2147483648, not {seed}")


@dataclass(frozen=True)
class ContrastConfig:
    """Contrastive prompt tuning. Eq. 7 to 9; a prompt keeps it, and stage 2 follows it."""

    views: tuple[CptView, ...] = setting(("end", "front", "middle", "hand"), "views that CPT contrasts")
    template: str = setting("a photo of a {}.", "sentence of the hand-written view")
    temperature: float = setting(0.07, "temperature of CPT")
    reduction: Reduction = setting("mean", "mean or sum over the terms of Eq. 9")
    normalize: bool = setting(True, "bring projected features to unit length")
    equal_apart: bool = setting(False, "count classes of equal names as negatives of each other")

    def __post_init__(self) -> None:
        for view in self.views:
            one_of("view", view, get_args(CptView))
        if len(self.views) < 2 or len(set(self.views)) != len(self.views):
            raise SelfTPTError(f"CPT needs two or more different views, not {' '.join(self.views) or 'none'}")
        if self.template.count("{}") != 1:
            raise SelfTPTError(f"the template {self.template!r} must have one {{}} where the class name goes")
        one_of("reduction", self.reduction, get_args(Reduction))
        above(0, self, "temperature")

    @property
    def learned(self) -> tuple[View, ...]:
        """Those of the views that have soft prompts."""
        return tuple(view for view in VIEWS if view in self.views)


PROMPT_ALONE = ContrastConfig(views=VIEWS)  # for what has no hand-written sentence: names need no room for one


@dataclass(frozen=True)
class TrainConfig:
    """Learning a prompt from labelled pictures, as all methods of CoOp's family do. The defaults are the paper's."""

    length: int = setting(4, "number of context vectors, M")
    words: str = setting("a photo of a", "words the context starts from")
    epochs: int = setting(10, "epochs")
    shots: int | None = setting(16, "pictures a class; 0 takes all")
    crops: int | None = setting(None, "random crops of each picture, taken in turn; 0 makes a new one for every epoch")
    batch: int = setting(4, "pictures a step")
    lr: float = setting(0.002, "learning rate")
    warmup_lr: float = setting(1e-5, "learning rate of the first epoch")
    momentum: float = setting(0.9, "momentum of SGD")
    weight_decay: float = setting(5e-4, "weight decay of SGD")
    chunk: int | None = setting(256, "classes walked at once, longer lists in parts; 0 walks all at once")
    seed: int = setting(1, "seed of all that is drawn")
    max_megapixels: float = setting(80, "larger pictures are refused")

    def __post_init__(self) -> None:
        above(0, self, "length", "epochs", "batch", "lr", "warmup_lr", "max_megapixels")
        above(0, self, "shots", "crops", "chunk")
        at_least(0, self, "momentum", "weight_decay")
        _check_seed(self.seed)
        if self.momentum >= 1:
            raise SelfTPTError(f"momentum must be below 1, not {self.momentum}")


@dataclass(frozen=True)
class LearnConfig(TrainConfig):
    """Stage 1. The defaults are the paper's where it says; docs/method.md tells what it leaves open."""

    ce: float = setting(1.0, "weight of cross-entropy")
    cpt: float = setting(1.0, "weight of contrastive prompt tuning")
    gm: float = setting(1.0, "weight of gradient matching")
    matching: Matching = setting("cosine", "how gradients are matched: cosine or mse")
    decay: float = setting(0.9, "decay of the moving average of gradients; 0 takes none")
    hidden: int | None = setting(None, "hidden width of the head; 0 takes the features' own")
    projection: int = setting(128, "output width of the head")
    classes_per_step: int | None = setting(None, "classes drawn for each step; 0 takes all, which is exact")
    contrast: ContrastConfig = field(default_factory=ContrastConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, self, "projection", "hidden")
        above(1, self, "classes_per_step")
        at_least(0, self, "ce", "cpt", "gm", "decay")
        one_of("matching", self.matching, get_args(Matching))
        if self.decay >= 1:
            raise SelfTPTError(f"decay must be below 1, not {self.decay}")
        if self.ce == self.cpt == self.gm == 0:
            raise SelfTPTError("all three losses have weight 0: nothing to learn from")

    @property
    def contrasts(self) -> bool:
        """Whether CPT is needed: as a loss, or for its gradient."""
        return self.cpt > 0 or self.gm > 0


@dataclass(frozen=True)
class AdaptConfig:
    """Stage 2. The defaults are the paper's where it says; docs/method.md tells what it leaves open."""

    steps: int = setting(10, "steps of SGD")
    lr: float = setting(0.1, "learning rate")
    momentum: float = setting(0.0, "momentum of SGD")
    weight_decay: float = setting(0.0, "weight decay of SGD")
    vectors: ClassVectors = setting("end", "class vectors: of the end view, or the mean of the learned views")
    chunk: int | None = setting(256, "classes walked at once, longer lists in parts; 0 walks all at once")

    def __post_init__(self) -> None:
        at_least(0, self, "steps", "momentum", "weight_decay")
        above(0, self, "lr", "chunk")
        one_of("vectors", self.vectors, get_args(ClassVectors))


@dataclass(frozen=True)
class PredictConfig:
    """Stage 3. With `views` above 1 it is Self-TPT-v: the picture and random crops of it, merged."""

    top: int = setting(5, "classes named for each picture")
    views: int = setting(1, "looks at a picture: itself and random crops; 64 is Self-TPT-v")
    confident: float = setting(1.0, "share of the views that is merged, the most confident ones")
    seed: int = setting(0, "seed of the random crops")
    batch: int = setting(32, "pictures or views the image tower takes at once")
    max_megapixels: float = setting(80, "larger pictures are refused")

    def __post_init__(self) -> None:
        above(0, self, "top", "views", "confident", "batch", "max_megapixels")
        _check_seed(self.seed)
        if self.confident > 1:
            raise SelfTPTError(f"confident is a share of the views, at most 1, not {self.confident}")


@dataclass(frozen=True)
class BenchConfig:
    """How much of the data a benchmark takes. The defaults are the paper's."""

    shots: int | None = setting(16, "pictures of a class to learn from; 0 takes all")
    share: float = setting(1.0, "of these pictures, how much is used: 0.25, 0.5, 0.75")
    source_classes: int | None = setting(None, "classes to learn from, drawn by the seed; 0 takes all")
    limit: int | None = setting(
        None, "test pictures of each set (in base-to-new of each half), balanced over classes; 0 takes all"
    )

    def __post_init__(self) -> None:
        above(0, self, "shots", "share", "limit")
        above(1, self, "source_classes")
        if self.share > 1:
            raise SelfTPTError(f"share is a part of the pictures, at most 1, not {self.share}")


def kind_of(settings: Any, path: Sequence[str]) -> Any:
    """The type of the field at `path` of settings, or None if they have no such field."""
    name, *rest = path
    if name not in {field.name for field in dataclasses.fields(settings)}:
        return None
    if dataclasses.is_dataclass(value := getattr(settings, name)):
        return kind_of(value, rest) if rest else None
    return None if rest else get_type_hints(type(settings))[name]


def change(settings: Any, path: Sequence[str], value: Any) -> Any:
    """Settings with the field at `path`, which they have, changed to a value of JSON; refused if it is of no use."""
    name, *rest = path
    if rest:
        return dataclasses.replace(settings, **{name: change(getattr(settings, name), rest, value)})
    kind = get_type_hints(type(settings))[name]
    allowed: Any = {tuple: (str, list), Literal: str}.get(get_origin(kind), kind)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif value == 0 and value is not False and isinstance(kind, types.UnionType):
        value = None
    whole = not isinstance(value, list) or all(isinstance(part, str) for part in value)
    if not whole or not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise SelfTPTError(f"the setting {name} is of type {getattr(kind, '__name__', kind)}, it cannot be {value!r}")
    if get_origin(kind) is tuple:
        value = tuple(value.split(",") if isinstance(value, str) else value)
    return dataclasses.replace(settings, **{name: value})
