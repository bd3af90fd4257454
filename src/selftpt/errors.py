"""What a user is told."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class SelfTPTError(Exception):
    """A mistake a user can mend: its text says what is wrong, where, and what to do."""


class SelfTPTWarning(UserWarning):
    """Something a user should know, after which the work goes on."""


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """For scripts: a mistake ends them with its text and exit code 2."""
    try:
        yield
    except SelfTPTError as error:
        print("error:", *str(error).split(), file=sys.stderr)
        sys.exit(2)
