"""Helpers for tests of the command line: the result of a command, and a check for error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., CommandResult]


def refused(answer: CommandResult, *words: str) -> None:
    """Assert that a command failed with exit code 2, an empty stdout and, apart from notes, one line on stderr.

    The line contains the given words.
    """
    assert answer.code == 2, answer
    lines = [line for line in answer.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1, answer.err
    assert lines[0].startswith("selftpt: ")
    assert "Traceback" not in answer.err
    assert answer.out == ""
    for word in words:
        assert word in lines[0], answer.err
