"""Progress on standard error: a progress bar on a terminal, otherwise one line per minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

BAR_AFTER = 2.0  # seconds before the progress bar appears
LINE_EVERY = 60.0  # seconds between two lines


class ProgressLines:
    """Writes lines to standard error, at most one per interval. Thread-safe.

    Args:
        interval: Minimum number of seconds between two lines.
        clock: Returns the time in seconds.
    """

    def __init__(self, interval: float = LINE_EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self.interval, self.clock = interval, clock
        self._last = clock()
        self._lock = threading.Lock()

    def write(self, text: str, done: int, total: int | None) -> None:
        """Write a line about the progress, unless one was written within the interval.

        Args:
            text: What is being done.
            done: Number of completed steps.
            total: Total number of steps; None if it is not known.
        """
        with self._lock:
            now = self.clock()
            if now - self._last < self.interval:
                return
            self._last = now
        of = f" of {total} ({100 * done // total} %)" if total else ""
        print(f"note: {text}: {done}{of}", file=sys.stderr, flush=True)


LINES = ProgressLines()  # shared by all bars of the process, so that many short tasks do not write a line each


class Bar:
    """Shows the progress of a task: `with Bar("learning", total) as bar: bar.step()`.

    On a terminal, a progress bar appears after two seconds. Otherwise one line per minute is written.

    Args:
        text: What is being done.
        total: Total number of steps; None if it is not known.
        done: Number of steps that are already completed.
        lines: Writes the lines.
    """

    def __init__(self, text: str, total: int | None, done: int = 0, lines: ProgressLines = LINES) -> None:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._terminal = console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=not self._terminal)
        self._task = self._progress.add_task(text, total=total, completed=done)
        self._begin = time.monotonic()
        self._shown = False
        self._text, self._total, self._done, self._lines = text, total, done, lines

    def step(self, count: int = 1) -> None:
        """Count steps as completed."""
        self._done += count
        if not self._terminal:
            self._lines.write(self._text, self._done, self._total)
            return
        self._progress.advance(self._task, count)
        if not self._shown and time.monotonic() - self._begin > BAR_AFTER:
            self._progress.start()
            self._shown = True

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._shown:
            self._progress.stop()
