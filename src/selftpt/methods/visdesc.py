"""VisDesc: the score of a class is the mean cosine between the image and sentences that describe the class.

The user provides the descriptors: a JSON file that maps class names to lists of descriptors, a folder of such files, or
a text file with lines `name: descriptor`.
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
from selftpt.names import parse_names

SHOWN = 5  # maximum number of missing class names in an error message

Descriptors = dict[str, list[str]]  # the descriptors of each class, by `key` of its name


@dataclass(frozen=True)
class VisDescConfig(Config):
    """The location of the descriptors."""

    descriptors: str = setting(
        "",
        "JSON file that maps class names to lists of descriptors, a folder of such files, or a text file with lines "
        "`name: descriptor`",
        local=True,
    )


def key(name: str) -> str:
    """Normalise a class name for comparison: case, `_` and repeated white space are ignored."""
    return clean_name(name).lower()


def relative_clause(descriptor: str) -> str:
    """Turn a descriptor into a relative clause by its first letters, as in the authors' code."""
    if descriptor.startswith(("has", "often", "typically", "may", "can")):
        return f"which {descriptor}"
    return f"which {'is' if descriptor.startswith(('a', 'used')) else 'has'} {descriptor}"


def described(
    fitted: FittedMethod, names: Sequence[str], before: str, tails: Callable[[], Sequence[Sequence[str]]]
) -> Classifier:
    """Make a classifier from sentences that consist of `before`, a class name and a tail.

    A class vector is the mean of the L2-normalised features of the sentences of a class.

    Args:
        fitted: The fitted method.
        names: Class names, [C].
        before: The text before the class name.
        tails: Returns the texts after the class name, one or more per class [C]. It is called after the class names
            have been checked.
    """
    model = fitted.model
    classes = class_tokens(model.text.tokenizer, names, 0, ContrastConfig(template=f"{before}{{}}"))
    weights = mean_vectors(model, classes, before, tails())
    settings = dataclasses.asdict(fitted.config)
    return Classifier.of(model, classes.names, weights, stage=fitted.method.name, settings=settings)


@torch.no_grad()
def mean_vectors(model: Model, classes: ClassTokens, before: str, tails: Sequence[Sequence[str]]) -> Tensor:
    """Average the L2-normalised features of the sentences of each class.

    The dot product of such a mean with an image feature is the mean cosine. A sentence that is too long for the model
    is truncated, with a warning.

    Args:
        model: The frozen model.
        classes: The class names, [C].
        before: The text before the class name.
        tails: The texts after the class name, one or more per class, [C].

    Returns:
        Class vectors, [C, D].
    """
    tokenizer = model.text.tokenizer
    for tail in {tail for class_tails in tails for tail in class_tails}:
        if tokenizer.special_ids & set(tokenizer.encode(tail)):
            raise SelfTPTError(f"the descriptor {tail!r} contains a special token of the tokenizer: remove it")
    ids = [
        tokenizer.encode(before + name + tail)
        for name, class_tails in zip(classes.names, tails, strict=True)
        for tail in class_tails
    ]
    if long := sum(len(sentence) > tokenizer.max_tokens for sentence in ids):
        message = f"{long} of {len(ids)} sentences are truncated: this model reads {tokenizer.context} tokens"
        warnings.warn(message, SelfTPTWarning, stacklevel=2)
    truncated = [sentence[: tokenizer.max_tokens] for sentence in ids]
    features = F.normalize(encode_sentences(model.text, truncated, AdaptConfig.chunk), dim=-1)
    counts = [len(class_tails) for class_tails in tails]
    return torch.stack([class_features.mean(0) for class_features in features.split(counts)])


def read_descriptors(path: Path) -> Descriptors:
    """Read a file of descriptors: JSON if it starts with `{` or `[`, and otherwise lines `name: descriptor`.

    Returns:
        The descriptors of each class.

    Raises:
        SelfTPTError: The file cannot be read, or is not a valid file of descriptors.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_json = text.lstrip().startswith(("{", "["))
        found: Any = json.loads(text) if is_json else parse_names(text)[1]
    except OSError as error:
        raise SelfTPTError(f"cannot read the descriptors {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SelfTPTError(f"{path} must be a text file in UTF-8: {error}") from error
    except ValueError as error:
        raise SelfTPTError(f"{path} is not a valid JSON file: {error}") from error
    if not found and not is_json:
        raise SelfTPTError(f"{path} has no descriptors: give a JSON object, or lines `name: descriptor`")
    return {key(name): descriptors for name, descriptors in check_descriptors(found, str(path)).items()}


def check_descriptors(value: Any, place: str) -> Descriptors:
    """Check that a value maps class names to lists of descriptors, and return it.

    Args:
        value: The value.
        place: Its origin, for the error message.

    Raises:
        SelfTPTError: The value is something else.
    """
    if not isinstance(value, dict) or not all(
        isinstance(descriptors, list) and all(isinstance(descriptor, str) for descriptor in descriptors)
        for descriptors in value.values()
    ):
        raise SelfTPTError(f"{place} must be a JSON object that maps each class name to a list of descriptors")
    return value


def choose(files: Mapping[str, Descriptors], names: Sequence[str]) -> Descriptors:
    """Choose the file that has all class names; of several, the one with the fewest classes, then the first by path.

    Args:
        files: The descriptors of each file, by path.
        names: Class names, [C].

    Raises:
        SelfTPTError: No file has all class names.
    """
    path = min(files, key=lambda path: (len(_missing(files[path], names)), len(files[path]), path))
    if missing := _missing(files[path], names):
        listed = ", ".join(map(repr, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
        raise SelfTPTError(
            f"no file of descriptors has all {len(names)} class names: add those that the closest file, {path}, "
            f"lacks: {listed}"
        )
    return files[path]


def _missing(descriptors: Descriptors, names: Sequence[str]) -> list[str]:
    return [name for name in names if key(name) not in descriptors]


def read_all(config: VisDescConfig) -> dict[str, Descriptors]:
    """Read all files of descriptors.

    Returns:
        The descriptors of each file, by path.

    Raises:
        SelfTPTError: No descriptors are configured, or a file is not valid.
    """
    if not config.descriptors:
        raise SelfTPTError("visdesc needs descriptors: --set descriptors=FILE_OR_FOLDER")
    place = Path(config.descriptors)
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not files:
        raise SelfTPTError(
            f"the folder {place} contains no .json file of descriptors: set descriptors to another folder or file"
        )
    return {str(path): read_descriptors(path) for path in files}


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Make a classifier from sentences with the descriptors of each class."""

    def tails() -> list[list[str]]:
        if not fitted.data:
            raise SelfTPTError("the fitted visdesc has no descriptors: fit it again")
        chosen = choose({path: check_descriptors(value, ascii(path)) for path, value in fitted.data.items()}, names)
        return [[f", {relative_clause(descriptor)}" for descriptor in chosen[key(name)] or [""]] for name in names]

    return described(fitted, names, "", tails)


VISDESC = Method(
    "visdesc",
    VisDescConfig(),
    classify,
    data=read_all,
)
