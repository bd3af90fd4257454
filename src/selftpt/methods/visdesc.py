"""Classification by description: a class is scored by the mean cosine to sentences that name it and what it looks like.

Descriptors are the user's: a JSON object, class name to a list of descriptors, or a folder of such files.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import AdaptConfig, ContrastConfig, setting
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.methods.method import Fitted, Job, Method
from selftpt.models import Model
from selftpt.models.text import encode_sentences
from selftpt.models.tokenizer import ClassTokens, class_tokens, clean_name

SHOWN = 5  # missing names that an error tells

Descriptors = dict[str, list[str]]  # by the key of a class name


@dataclass(frozen=True)
class Settings:
    """Where the descriptors are."""

    descriptors: str = setting("", "a JSON file, class name to a list of descriptors, or a folder of them")


def key(name: str) -> str:
    """What equal class names have in common: case, `_` and white space do not count."""
    return clean_name(name).lower()


def relative_clause(descriptor: str) -> str:
    """The descriptor as the authors' code puts it after a class name, by the letters that it starts with."""
    if descriptor.startswith(("has", "often", "typically", "may", "can")):
        return f"which {descriptor}"
    return f"which {'is' if descriptor.startswith(('a', 'used')) else 'has'} {descriptor}"


def described(
    model: Model,
    names: Sequence[str],
    before: str,
    tails: Callable[[Sequence[str]], Sequence[Sequence[str]]],
    stage: str,
    settings: Any,
) -> Classifier:
    """The classifier of sentences: `before`, a class name, one of its tails. Its weights are means of unit vectors.

    tails: from clean names, some for each. stage, settings: what the classifier says of its origin.
    """
    classes = class_tokens(model.text.tokenizer, names, 0, ContrastConfig(template=f"{before}{{}}"))
    weights = mean_vectors(model, classes, before, tails(classes.names))
    return Classifier.of(model, classes.names, weights, stage=stage, settings=dataclasses.asdict(settings))


@torch.no_grad()
def mean_vectors(model: Model, classes: ClassTokens, before: str, tails: Sequence[Sequence[str]]) -> Tensor:
    """The mean of the L2-normalised features of each class's sentences [C, D]: its product with an image's features is
    the mean cosine.

    A sentence that is too long for the model loses its end.
    """
    tokenizer = model.text.tokenizer
    for tail in {tail for some in tails for tail in some}:
        if tokenizer.marks & set(tokenizer.encode(tail)):
            raise SelfTPTError(f"the descriptor {tail!r} contains a mark that the tokenizer keeps for itself")
    ids = [
        tokenizer.encode(before + name + tail) for name, some in zip(classes.names, tails, strict=True) for tail in some
    ]
    if long := sum(len(sentence) > tokenizer.room for sentence in ids):
        text = f"{long} of {len(ids)} sentences lose their end: this model reads {tokenizer.context} tokens"
        warnings.warn(text, SelfTPTWarning, stacklevel=2)
    cut = [sentence[: tokenizer.room] for sentence in ids]
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
    if not isinstance(found, dict) or not all(
        isinstance(some, list) and all(isinstance(one, str) for one in some) for some in found.values()
    ):
        raise SelfTPTError(f"{path} must be a JSON object, class name to a list of descriptors")
    return {key(name): some for name, some in found.items()}


def choose(files: dict[Path, Descriptors], names: Sequence[str]) -> Descriptors:
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


def reads(settings: Settings) -> list[Path]:
    """The files of descriptors."""
    if not settings.descriptors:
        raise SelfTPTError("visdesc needs descriptors: --set descriptors=FILE_OR_FOLDER")
    place = Path(settings.descriptors)
    return sorted(place.glob("*.json")) if place.is_dir() else [place]


def fit(job: Job, settings: Settings) -> Fitted:
    """Sentences of descriptors."""
    files = {path: read_descriptors(path) for path in reads(settings)}
    if not files:
        raise SelfTPTError(f"the folder {settings.descriptors} has no .json file of descriptors")

    def tails(names: Sequence[str]) -> list[list[str]]:
        chosen = choose(files, names)
        return [[f", {relative_clause(one)}" for one in chosen[key(name)] or [""]] for name in names]

    return lambda names, _template: described(job.model, names, "", tails, "visdesc", settings)


VISDESC = Method(
    "visdesc",
    "mean of sentences with descriptors of each class",
    "Menon and Vondrick, ICLR 2023",
    Settings(),
    fit,
    needs="features, descriptors",
    reads=reads,
)
