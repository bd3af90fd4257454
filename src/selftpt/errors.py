"""What a user is told."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class SelfTPTError(Exception):
    """A mistake a user can mend: its text says what is wrong, where, and what to do."""


class SelfTPTWarning(UserWarning):
    """Something a user should know, after which the work goes on."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a `SelfTPTError` on one line and exit with code 2; for scripts."""
    try:
        yield
    except SelfTPTError as error:
        print("error:", *str(error).split(), file=sys.stderr)
        sys.exit(2)
