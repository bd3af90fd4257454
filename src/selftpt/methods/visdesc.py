"""Classification by description: a class is scored by the mean cosine to sentences that name and describe it.

Descriptors are the user's: a JSON object, class name to a list of descriptors, or a folder of such files.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import AdaptConfig, Config, ContrastConfig, setting
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.methods.method import FittedMethod, Method
from selftpt.models import Model
from selftpt.models.text import encode_sentences
from selftpt.models.tokenizer import ClassTokens, class_tokens, clean_name

SHOWN = 5  # missing names that an error tells

Descriptors = dict[str, list[str]]  # by the key of a class name


@dataclass(frozen=True)
class VisDescConfig(Config):
    """Where the descriptors are."""

    descriptors: str = setting("", "a JSON file, class name to a list of descriptors, or a folder of them", local=True)


def key(name: str) -> str:
    """What equal class names have in common: case, `_` and white space do not count."""
    return clean_name(name).lower()


def relative_clause(descriptor: str) -> str:
    """The descriptor as the authors' code puts it after a class name, by the letters that it starts with."""
    if descriptor.startswith(("has", "often", "typically", "may", "can")):
        return f"which {descriptor}"
    return f"which {'is' if descriptor.startswith(('a', 'used')) else 'has'} {descriptor}"


def described(
    fitted: FittedMethod, names: Sequence[str], before: str, tails: Callable[[], Sequence[Sequence[str]]]
) -> Classifier:
    """The classifier of sentences that consist of `before`, a class name and one of its tails.

    Its class vectors are means of L2-normalised sentence features; `tails` gives some for each class [C], after the
    names are checked.
    """
    model = fitted.model
    classes = class_tokens(model.text.tokenizer, names, 0, ContrastConfig(template=f"{before}{{}}"))
    weights = mean_vectors(model, classes, before, tails())
    settings = dataclasses.asdict(fitted.config)
    return Classifier.of(model, classes.names, weights, stage=fitted.method.name, settings=settings)


@torch.no_grad()
def mean_vectors(model: Model, classes: ClassTokens, before: str, tails: Sequence[Sequence[str]]) -> Tensor:
    """The mean of the L2-normalised features of each class's sentences [C, D]: its product with an image's features is
    the mean cosine.

    A sentence that is too long for the model loses its end.
    """
    tokenizer = model.text.tokenizer
    for tail in {tail for some in tails for tail in some}:
        if tokenizer.special_ids & set(tokenizer.encode(tail)):
            raise SelfTPTError(f"the descriptor {tail!r} contains a mark that the tokenizer keeps for itself")
    ids = [
        tokenizer.encode(before + name + tail) for name, some in zip(classes.names, tails, strict=True) for tail in some
    ]
    if long := sum(len(sentence) > tokenizer.max_tokens for sentence in ids):
        text = f"{long} of {len(ids)} sentences lose their end: this model reads {tokenizer.context} tokens"
        warnings.warn(text, SelfTPTWarning, stacklevel=2)
    cut = [sentence[: tokenizer.max_tokens] for sentence in ids]
    features = F.normalize(encode_sentences(model.text, cut, AdaptConfig.chunk), dim=-1)
    return torch.stack([some.mean(0) for some in features.split([len(some) for some in tails])])


def read_descriptors(path: Path) -> Descriptors:
    """A file of descriptors."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SelfTPTError(f"cannot read the descriptors {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SelfTPTError(f"{path} is not JSON: {error}") from error
    return {key(name): some for name, some in check_descriptors(found, str(path)).items()}


def check_descriptors(value: Any, place: str) -> Descriptors:
    """Refuse what is not a mapping of class names to lists of descriptors."""
    if not isinstance(value, dict) or not all(
        isinstance(some, list) and all(isinstance(one, str) for one in some) for some in value.values()
    ):
        raise SelfTPTError(f"{place} must be a JSON object, class name to a list of descriptors")
    return value


def choose(files: Mapping[str, Descriptors], names: Sequence[str]) -> Descriptors:
    """The descriptors that have all names; of several, those of the fewest classes, then the first by path."""
    path = min(files, key=lambda path: (len(_missing(files[path], names)), len(files[path]), path))
    if missing := _missing(files[path], names):
        few = ", ".join(map(repr, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
        raise SelfTPTError(
            f"no file of descriptors has all {len(names)} class names; {path} comes nearest and lacks {few}"
        )
    return files[path]


def _missing(descriptors: Descriptors, names: Sequence[str]) -> list[str]:
    return [name for name in names if key(name) not in descriptors]


def read_all(config: VisDescConfig) -> dict[str, Descriptors]:
    """The descriptors of every file, by path."""
    if not config.descriptors:
        raise SelfTPTError("visdesc needs descriptors: --set descriptors=FILE_OR_FOLDER")
    place = Path(config.descriptors)
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not files:
        raise SelfTPTError(f"the folder {place} has no .json file of descriptors")
    return {str(path): read_descriptors(path) for path in files}


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Sentences of descriptors."""

    def tails() -> list[list[str]]:
        if not fitted.data:
            raise SelfTPTError("the fitted visdesc has no descriptors: fit it again")
        chosen = choose({path: check_descriptors(value, ascii(path)) for path, value in fitted.data.items()}, names)
        return [[f", {relative_clause(one)}" for one in chosen[key(name)] or [""]] for name in names]

    return described(fitted, names, "", tails)


VISDESC = Method(
    "visdesc",
    VisDescConfig(),
    classify,
    data=read_all,
)
