"""Class names as they are given: which are accepted."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from selftpt.errors import SelfTPTError


def check_names(names: object) -> tuple[str, ...]:
    """Check class names.

    Args:
        names: an ordered sequence of strings: a list, a tuple, or what has `tolist()`, as arrays of NumPy and columns
            of pandas have.

    Returns:
        The names as they are given.

    Raises:
        SelfTPTError: this is no ordered sequence, or one of its items is not a string, cannot be encoded in UTF-8, or
            has control characters other than white space.
    """
    if isinstance(names, str):
        raise SelfTPTError(f"class names are a list of strings, not the string {_shown(names)}")
    listed = names.tolist() if hasattr(names, "tolist") else names
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes | bytearray | memoryview):
        kind = "None" if names is None else f"of type {type(names).__name__}"
        raise SelfTPTError(f"class names are a list of strings, not {kind}: give a list or a tuple")
    for i, name in enumerate(listed, 1):
        place = f"class name {i} of {len(listed)}"
        if not isinstance(name, str):
            raise SelfTPTError(f"{place} must be a string, not {_shown(name)} of type {type(name).__name__}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise SelfTPTError(f"{place} cannot be encoded in UTF-8: {_shown(name)}") from None
        if any(unicodedata.category(char) == "Cc" and not char.isspace() for char in name):
            raise SelfTPTError(f"{place} has a control character: {_shown(name)}")
    return tuple(map(str, listed))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_names(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """Read class names, and descriptions of classes, from the lines of a text.

    A line is a class name, or `name: description`, split at the first ": ". Lines with the same name add descriptions
    to one class. In a text without descriptions equal lines are different classes with equal names.

    Args:
        text: The lines; empty lines are ignored.

    Returns:
        The names in order of appearance, and lists of descriptions by name, without the names that have none.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    descriptions: dict[str, list[str]] = {}
    names = []
    for line in lines:
        name, found, description = line.partition(": ")
        names.append(name.strip())
        if found:
            descriptions.setdefault(name.strip(), []).append(description.strip())
    return (list(dict.fromkeys(names)) if descriptions else names), descriptions
