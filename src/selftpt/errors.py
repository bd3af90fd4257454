"""Errors and warnings of selftpt."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class SelfTPTError(Exception):
    """An error that the user can fix. Its message says what is wrong, where, and what to do."""


class SelfTPTWarning(UserWarning):
    """A problem that the user should know about and that does not stop the program."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a `SelfTPTError` on one line and exit with code 2; for scripts."""
    try:
        yield
    except SelfTPTError as error:
        print("error:", *str(error).split(), file=sys.stderr)
        sys.exit(2)
