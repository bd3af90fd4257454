"""What the tests of commands share: an answer, and how a refusal looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Answer]


def refused(answer: Answer, *words: str) -> None:
    """One line that says it, exit code 2, nothing on standard output."""
    assert answer.code == 2, answer
    lines = [line for line in answer.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1, answer.err
    assert lines[0].startswith("selftpt: ")
    assert "Traceback" not in answer.err
    assert answer.out == ""
    for word in words:
        assert word in answer.err, answer.err
