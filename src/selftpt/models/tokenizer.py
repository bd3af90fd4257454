"""Tokenization of class names, with checks for names that are empty, equal or too long."""

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
    """Wrapper of an open_clip tokenizer that separates the tokens of a text from the special tokens around it.

    The input of the text tower for the token ids `ids` is `start + ids + end`, padded with `pad` to `context` tokens.

    Args:
        tokenizer: The open_clip tokenizer.
        context: Context length of the text tower.

    Attributes:
        start: Id of the start token, as a tuple; empty if the tokenizer has none.
        end: Id of the end-of-text token, as a tuple.
        pad: Id of the padding token.
        special_ids: Ids that must not occur in a text.

    Raises:
        SelfTPTError: The special tokens cannot be determined.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer = tokenizer
        self.context = context
        probe = self.encode("photo")
        padded = tokenizer(["photo"], context_length=context)[0].tolist()
        at = next((i for i in range(len(padded)) if padded[i : i + len(probe)] == probe), None)
        if not probe or at is None or at + len(probe) == len(padded):
            raise SelfTPTError(
                f"the tokenizer {type(tokenizer).__name__} is not supported: it does not keep the tokens of a word "
                "together; choose another model"
            )
        rest = padded[at + len(probe) :]
        self.start: tuple[int, ...] = tuple(padded[:at])
        self.pad: int = rest[-1]
        self.end: tuple[int, ...] = tuple(rest[:1])
        for sentence in ("photo", "a photo of a cat"):
            if (
                self.add_special_tokens(self.encode(sentence))
                != tokenizer([sentence], context_length=context)[0].tolist()
            ):
                raise SelfTPTError(
                    f"the tokenizer {type(tokenizer).__name__} is not supported: its special tokens or its padding are "
                    "unusual; choose another model"
                )
        inner = getattr(tokenizer, "tokenizer", tokenizer)
        unknown = getattr(inner, "unk_token_id", None)  # an ordinary word may become the unknown token
        self.special_ids = {*self.start, *self.end, *getattr(inner, "all_special_ids", ())} - {unknown}

    def encode(self, text: str, after: str = "") -> list[int]:
        """Return the token ids of a text, without start, end and padding tokens.

        Args:
            text: The text.
            after: The text that precedes it. It matters for tokenizers whose tokens include the space before a word.

        Returns:
            The token ids of `text` only.
        """
        before, both = self._encode(after), self._encode(after + text)
        return both[len(before) :] if both[: len(before)] == before else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if hasattr(self._tokenizer, "encode"):
            return list(self._tokenizer.encode(text))
        cleaned = self._tokenizer.clean_fn(text)
        return list(self._tokenizer.tokenizer(cleaned, add_special_tokens=False).input_ids)

    def add_special_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with start, end and padding tokens: `context` token ids."""
        sentence = [*self.start, *ids, *self.end]
        return sentence + [self.pad] * (self.context - len(sentence))

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a sentence, without start and end tokens."""
        return self.context - len(self.start) - len(self.end)

    def encode_sentence(self, sentence: str) -> list[int]:
        """Return the token ids of a sentence, without start, end and padding tokens.

        Args:
            sentence: The sentence.

        Returns:
            At most `max_tokens` token ids.

        Raises:
            SelfTPTError: The sentence is too long for the model or contains a special token.
        """
        ids = self.encode(sentence)
        if self.special_ids & set(ids):
            raise SelfTPTError(f"the text {_shorten(sentence)!r} contains a special token of the tokenizer: remove it")
        if len(ids) > self.max_tokens:
            raise SelfTPTError(
                f"the text {_shorten(sentence)!r} is too long: it has {len(ids)} tokens, and this model accepts "
                f"{self.max_tokens}; shorten it"
            )
        return ids


@dataclass(frozen=True)
class ClassTokens:
    """Class names and their token ids.

    Attributes:
        names: C class names, after `clean_name`.
        ids: Token ids of each name on its own.
        name_ids: Name index of each class, [C]: the index of the first class whose name has the same tokens.
    """

    names: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    name_ids: Tensor

    def __len__(self) -> int:
        return len(self.names)

    @property
    def duplicates(self) -> list[str]:
        """Names that occur more than once in the list, without repetitions."""
        return [self.names[i] for i, count in enumerate(self.name_ids.bincount().tolist()) if count > 1]

    def subset(self, classes: Sequence[int]) -> ClassTokens:
        """Return the class names with the given indices, in that order."""
        return ClassTokens(
            tuple(self.names[i] for i in classes),
            tuple(self.ids[i] for i in classes),
            _first_equal(self.name_ids[torch.tensor(classes)].tolist()),
        )


def clean_name(name: str) -> str:
    """Replace underscores with spaces and collapse white space."""
    return " ".join(name.replace("_", " ").split())


def tokenize(names: Sequence[str], tokenizer: Tokenizer, max_tokens: int) -> ClassTokens:
    """Tokenize class names.

    Args:
        names: Class names.
        tokenizer: The tokenizer.
        max_tokens: Maximum number of tokens per name.

    Returns:
        The names after `clean_name`, and their token ids.

    Raises:
        SelfTPTError: A name is empty, has no tokens, contains a special token, or is too long.
    """
    if not names:
        raise SelfTPTError("there are no class names: give at least two")
    cleaned, ids = [], []
    for i, name in enumerate(names):
        clean = clean_name(name)
        if not clean:
            raise SelfTPTError(f"class name {i + 1} of {len(names)} is empty: give every class a name")
        tokens = tuple(tokenizer.encode(clean, after="photo "))
        if not tokens:
            raise SelfTPTError(f"class name {name!r} has no tokens in this model's vocabulary: write it in words")
        if tokenizer.special_ids & {*tokens, *tokenizer.encode(name)}:
            raise SelfTPTError(f"class name {name!r} contains a special token of the tokenizer: remove it")
        if len(tokens) > max_tokens:
            raise _too_long(clean, len(tokens), max_tokens)
        cleaned.append(clean)
        ids.append(tokens)
    return ClassTokens(tuple(cleaned), tuple(ids), _first_equal(ids))


def end_ids(tokenizer: Tokenizer, names: Sequence[str], tail: str = ".", infix: str = "") -> list[list[int]]:
    """Return the token ids of what follows the prompt in the end view.

    `infix + name + tail` is tokenised in one piece, as CLIP does.

    Args:
        tokenizer: The tokenizer.
        names: Class names.
        tail: Text after the name.
        infix: Text between prompt and name.

    Returns:
        Token ids for each name.
    """
    return [tokenizer.encode(infix + name + tail, after="photo " if infix or name else "photo") for name in names]


def class_tokens(tokenizer: Tokenizer, names: Sequence[str], length: int, contrast: ContrastConfig) -> ClassTokens:
    """Check and tokenize class names for use with a prompt and a template.

    Equal class names cause a warning.

    Args:
        tokenizer: The tokenizer.
        names: At least two class names.
        length: Number of prompt vectors.
        contrast: The views and the hand-crafted template.

    Returns:
        The names after `clean_name`, and their token ids.

    Raises:
        SelfTPTError: There are fewer than two names, or a name cannot be used, for example because it is too long to be
            encoded together with the prompt or the template.
    """
    names = check_names(names)
    if len(names) == 1:
        raise SelfTPTError(f"there is only one class name, {names[0]!r}: give at least two")
    dot = len(tokenizer.encode(".", after="photo"))
    template = contrast.template if "hand_crafted" in contrast.views else None
    around = max(length + dot, len(tokenizer.encode(template.replace("{}", " "))) if template else 0)
    if tokenizer.max_tokens - around < 1:
        raise SelfTPTError(
            f"a prompt of {length} vectors or the template {contrast.template!r} leaves no room for a class name "
            f"in the {tokenizer.context} tokens of this model: shorten it"
        )
    tokens = tokenize(names, tokenizer, tokenizer.max_tokens - length - dot)
    joint = [length + len(ids) for ids in end_ids(tokenizer, tokens.names)]
    if template:
        sentences = [len(tokenizer.encode(template.replace("{}", name))) for name in tokens.names]
        joint = [max(pair) for pair in zip(joint, sentences, strict=True)]
    for name, ids, size in zip(tokens.names, tokens.ids, joint, strict=True):
        if size > tokenizer.max_tokens:
            raise _too_long(name, len(ids), tokenizer.max_tokens - (size - len(ids)))
    if tokens.duplicates:
        warnings.warn(f"equal class names: {', '.join(tokens.duplicates)}", SelfTPTWarning, stacklevel=3)
    return tokens


def _too_long(name: str, tokens: int, max_tokens: int) -> SelfTPTError:
    return SelfTPTError(
        f"class name {_shorten(name)!r} is too long: it has {tokens} tokens, and this model accepts {max_tokens} with "
        "this prompt and template; shorten it"
    )


def _first_equal(keys: Sequence[Any]) -> Tensor:
    """Return, for each key, the index of the first key that is equal to it."""
    first: dict[Any, int] = {}
    return torch.tensor([first.setdefault(key, i) for i, key in enumerate(keys)])


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
