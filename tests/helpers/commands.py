"""Helpers for tests of the command line: the result of a command, and a check for error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Answer]


def refused(answer: Answer, *words: str) -> None:
    """Check that a command failed with exit code 2, one line with the given words on stderr, and an empty stdout."""
    assert answer.code == 2, answer
    lines = [line for line in answer.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1, answer.err
    assert lines[0].startswith("selftpt: ")
    assert "Traceback" not in answer.err
    assert answer.out == ""
    for word in words:
        assert word in answer.err, answer.err
