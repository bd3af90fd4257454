"""A progress bar for what takes longer than two seconds, on a terminal only."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE = 2.0


class Bar:
    """`with Bar("learning", total) as bar: bar.step()`, on standard error."""

    def __init__(self, text: str, total: int | None, done: int = 0) -> None:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(text, total=total, completed=done)
        self._begin = time.monotonic()
        self._shown = False

    def step(self, count: int = 1) -> None:
        """So much more is done."""
        self._progress.advance(self._task, count)
        if not self._shown and time.monotonic() - self._begin > PATIENCE:
            self._progress.start()
            self._shown = True

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._shown:
            self._progress.stop()
