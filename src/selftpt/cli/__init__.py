"""The command line: one file a command, each thin."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import warnings
from typing import Annotated

import typer
from typer.exceptions import TyperException

from selftpt.cli import adapt, bench, cache, classify, datasets, demo, inspect, learn, methods, models, predict, table
from selftpt.config import RENAMED_SETTINGS, deprecated
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.version import __version__

INTERRUPTED = 130  # what typer makes of Ctrl-C

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Class names in, a better CLIP classifier out, at the price of zero-shot.",
    epilog="learn once (images with labels), adapt to any list of class names, predict: each has its own --help.",
)
for module in (demo, classify, learn, adapt, predict, models, datasets, methods, bench, table, cache, inspect):
    app.command(module.__name__.rpartition(".")[2])(module.command)


def _version(asked: bool) -> None:
    if asked:
        print(f"selftpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


def main() -> None:
    """Run the command line: an error that the user can fix is one line, with exit code 2."""
    warnings.showwarning = _note  # type: ignore[assignment]
    # torch's threads spin while they wait for each other, which on a busy machine takes many times longer than the work
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names need not be text
            stream.reconfigure(errors="surrogateescape")
    try:
        code = app([current_option(argument) for argument in sys.argv[1:]], standalone_mode=False)
        if code == INTERRUPTED:
            code = _fail(
                "interrupted: nothing half-written is left; learn goes on from what is done, bench with --resume"
            )
        sys.stdout.flush()
    except SelfTPTError as error:
        code = _fail(str(error))
    except TyperException as error:
        text = getattr(error, "format_message", error.__str__)()
        code = _fail(text) if text else 2  # the help was shown
    except OSError as error:  # what we write ourselves is a SelfTPTError: this is standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1 if error.errno == errno.EPIPE else _fail(f"cannot write the answer: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        code = _fail("out of memory: lower --chunk, or --batch of predict and classify")
    sys.exit(code)


def current_option(argument: str) -> str:
    """An argument of the command line, with a renamed option replaced by its current name."""
    option, equals, value = argument.partition("=")
    for former, name in RENAMED_SETTINGS.items():
        for prefix in ("--", "--no-"):
            if option == prefix + former.replace("_", "-"):
                current = prefix + name.replace("_", "-")
                deprecated(f"the option {option}", current)
                return current + equals + value
    return argument


def _fail(text: str) -> int:
    print(f"selftpt: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _note(message: Warning | str, category: type[Warning], *_: object) -> None:
    if issubclass(category, SelfTPTWarning):
        print(f"note: {message}", file=sys.stderr)
