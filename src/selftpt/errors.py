"""Errors and warnings of selftpt."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class SelfTPTError(Exception):
    """An error that the user can fix. Its message says what is wrong, where, and what to do."""


class SelfTPTWarning(UserWarning):
    """A problem that the user should know about and that does not stop the program."""


def check_type(value: object, kind: type, name: str, hint: str = "") -> None:
    """Raise a `SelfTPTError` if an argument has the wrong type.

    Args:
        value: The argument.
        kind: The type that it must have.
        name: The name of the argument.
        hint: What to do, for the message.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        what = f"{name} must be {article} {kind.__name__}, not {type(value).__name__}"
        raise SelfTPTError(f"{what}: {hint}" if hint else what)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a `SelfTPTError` on one line and exit with code 2; for scripts."""
    try:
        yield
    except SelfTPTError as error:
        print("error:", *str(error).split(), file=sys.stderr)
        sys.exit(2)
