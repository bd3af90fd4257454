"""Class names to token ids, once: where a name ends, which names are equal, which are too long."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selftpt.config import ContrastConfig
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.names import check_names


class Tokenizer:
    """An open_clip tokenizer taken apart: the ids of bare words, and what it puts around a sentence.

    A sentence of token ids `ids` becomes `start + ids + end`, filled up with `pad` to `context` positions.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer = tokenizer
        self.context = context
        probe = self.encode("photo")
        whole = tokenizer(["photo"], context_length=context)[0].tolist()
        at = next((i for i in range(len(whole)) if whole[i : i + len(probe)] == probe), None)
        if not probe or at is None or at + len(probe) == len(whole):
            raise SelfTPTError(f"the tokenizer {type(tokenizer).__name__} does not keep a word's tokens together")
        rest = whole[at + len(probe) :]
        self.start: tuple[int, ...] = tuple(whole[:at])
        self.pad: int = rest[-1]
        self.end: tuple[int, ...] = tuple(rest[:1])
        for sentence in ("photo", "a photo of a cat"):
            if self.sentence(self.encode(sentence)) != tokenizer([sentence], context_length=context)[0].tolist():
                raise SelfTPTError(f"the tokenizer {type(tokenizer).__name__} frames sentences in an unknown way")
        inner = getattr(tokenizer, "tokenizer", tokenizer)
        unknown = getattr(inner, "unk_token_id", None)  # what a word it does not know becomes is no mark
        self.marks = {*self.start, *self.end, *getattr(inner, "all_special_ids", ())} - {unknown}

    def encode(self, text: str, after: str = "") -> list[int]:
        """Token ids of `text` where it follows `after`, without start, end or padding.

        Some tokenizers write the space before a word into its token, and one before a full stop that stands alone.
        """
        before, whole = self._encode(after), self._encode(after + text)
        return whole[len(before) :] if whole[: len(before)] == before else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if hasattr(self._tokenizer, "encode"):
            return list(self._tokenizer.encode(text))
        cleaned = self._tokenizer.clean_fn(text)
        return list(self._tokenizer.tokenizer(cleaned, add_special_tokens=False).input_ids)

    def sentence(self, ids: Sequence[int]) -> list[int]:
        """`ids` with start, end and padding: `context` token ids."""
        whole = [*self.start, *ids, *self.end]
        return whole + [self.pad] * (self.context - len(whole))

    @property
    def room(self) -> int:
        """How many token ids a sentence may have, without start and end."""
        return self.context - len(self.start) - len(self.end)

    def fitting(self, sentence: str) -> list[int]:
        """Token ids of a whole sentence.

        Raises:
            SelfTPTError: It is too long for the model, or it contains one of the tokenizer's own marks.
        """
        ids = self.encode(sentence)
        if self.marks & set(ids):
            raise SelfTPTError(f"the text {_shorten(sentence)!r} contains a mark that the tokenizer keeps for itself")
        if len(ids) > self.room:
            raise SelfTPTError(
                f"the text {_shorten(sentence)!r} is too long: {len(ids)} tokens, and this model reads {self.room}"
            )
        return ids


@dataclass(frozen=True)
class ClassTokens:
    """The class names of a task as token ids.

    names: as given, with `_` as a space and white space folded.
    ids: the token ids of each name alone.
    same: [C], for each class the first class whose name has the same tokens.
    """

    names: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    same: Tensor

    def __len__(self) -> int:
        return len(self.names)

    @property
    def repeated(self) -> list[str]:
        """Names that stand more than once in the list, each once."""
        return [self.names[i] for i, count in enumerate(self.same.bincount().tolist()) if count > 1]

    def subset(self, classes: Sequence[int]) -> ClassTokens:
        """The tokens of some classes, in the order given."""
        return ClassTokens(
            tuple(self.names[i] for i in classes),
            tuple(self.ids[i] for i in classes),
            _first_equal(self.same[torch.tensor(classes)].tolist()),
        )


def clean_name(name: str) -> str:
    """`_` as a space, white space folded."""
    return " ".join(name.replace("_", " ").split())


def tokenize(names: Sequence[str], tokenizer: Tokenizer, room: int) -> ClassTokens:
    """Token ids of class names; `room` is the number of positions a name may take.

    Raises SelfTPTError for an empty name, one without tokens, one with the tokenizer's own marks, one too long.
    """
    if not names:
        raise SelfTPTError("no class names: give at least two")
    cleaned, ids = [], []
    for i, name in enumerate(names):
        clean = clean_name(name)
        if not clean:
            raise SelfTPTError(f"class name {i + 1} of {len(names)} is empty")
        tokens = tuple(tokenizer.encode(clean, after="photo "))
        if not tokens:
            raise SelfTPTError(f"class name {name!r} has no token that this model knows: write it in words")
        if tokenizer.marks & {*tokens, *tokenizer.encode(name)}:
            raise SelfTPTError(f"class name {name!r} contains a mark that the tokenizer keeps for itself")
        if len(tokens) > room:
            raise _too_long(clean, len(tokens), room)
        cleaned.append(clean)
        ids.append(tokens)
    return ClassTokens(tuple(cleaned), tuple(ids), _first_equal(ids))


def end_ids(tokenizer: Tokenizer, names: Sequence[str], tail: str = ".", infix: str = "") -> list[list[int]]:
    """Token ids of what follows the prompt in the end view, `infix + name + tail`, tokenised together as CLIP does."""
    return [tokenizer.encode(infix + name + tail, after="photo " if infix or name else "photo") for name in names]


def class_tokens(tokenizer: Tokenizer, names: Sequence[str], length: int, contrast: ContrastConfig) -> ClassTokens:
    """The class names of a task, each with room for `length` prompt vectors and for the hand-crafted template."""
    names = check_names(names)
    if len(names) == 1:
        raise SelfTPTError(f"only one class name, {names[0]!r}: there is nothing to tell apart; give two at least")
    dot = len(tokenizer.encode(".", after="photo"))
    template = contrast.template if "hand_crafted" in contrast.views else None
    around = max(length + dot, len(tokenizer.encode(template.replace("{}", " "))) if template else 0)
    if tokenizer.room - around < 1:
        raise SelfTPTError(
            f"a prompt of {length} vectors or the template {contrast.template!r} leaves no room for a class name "
            f"in the {tokenizer.context} tokens of this model"
        )
    tokens = tokenize(names, tokenizer, tokenizer.room - length - dot)
    joint = [length + len(ids) for ids in end_ids(tokenizer, tokens.names)]
    if template:
        sentences = [len(tokenizer.encode(template.replace("{}", name))) for name in tokens.names]
        joint = [max(pair) for pair in zip(joint, sentences, strict=True)]
    for name, ids, size in zip(tokens.names, tokens.ids, joint, strict=True):
        if size > tokenizer.room:
            raise _too_long(name, len(ids), tokenizer.room - (size - len(ids)))
    if tokens.repeated:
        warnings.warn(f"equal class names: {', '.join(tokens.repeated)}", SelfTPTWarning, stacklevel=3)
    return tokens


def _too_long(name: str, tokens: int, room: int) -> SelfTPTError:
    return SelfTPTError(
        f"class name {_shorten(name)!r} is too long: {tokens} tokens, and this model with this prompt "
        f"has room for {room}"
    )


def _first_equal(keys: Sequence[Any]) -> Tensor:
    first: dict[Any, int] = {}
    return torch.tensor([first.setdefault(key, i) for i, key in enumerate(keys)])


def _shorten(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
