"""Checks and parsing of class names."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from selftpt.errors import SelfTPTError


def check_names(names: object) -> tuple[str, ...]:
    """Check class names.

    Args:
        names: A sequence of strings: a list, a tuple, or an object with `tolist()`, such as a NumPy array or a pandas
            column.

    Returns:
        The names, unchanged.

    Raises:
        SelfTPTError: `names` is not a sequence, or one of its items is not a string, cannot be encoded in UTF-8, or
            has control characters other than white space.
    """
    if isinstance(names, str):
        raise SelfTPTError(f"class names must be a list of strings, not the string {_shorten(names)}")
    listed = names.tolist() if hasattr(names, "tolist") else names
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes | bytearray | memoryview):
        kind = "None" if names is None else f"of type {type(names).__name__}"
        raise SelfTPTError(f"class names must be a list of strings, not {kind}: give a list or a tuple")
    for i, name in enumerate(listed, 1):
        place = f"class name {i} of {len(listed)}"
        if not isinstance(name, str):
            raise SelfTPTError(f"{place} must be a string, not {_shorten(name)} of type {type(name).__name__}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise SelfTPTError(f"{place} cannot be encoded in UTF-8: {_shorten(name)}") from None
        if any(unicodedata.category(char) == "Cc" and not char.isspace() for char in name):
            raise SelfTPTError(f"{place} has a control character: {_shorten(name)}")
    return tuple(map(str, listed))


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_names(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """Read class names, and descriptions of classes, from the lines of a text.

    A line is a class name, or `name: description`, split at the first ": ". Lines with the same name add descriptions
    to one class. If no line has a description, equal lines are different classes with equal names.

    Args:
        text: The lines; empty lines are ignored.

    Returns:
        The names in order of appearance, and the descriptions of each name that has some.
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
