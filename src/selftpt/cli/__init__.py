"""The command line: one module per command."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import warnings
from types import ModuleType
from typing import Annotated

import typer
from typer.exceptions import TyperException

from selftpt.cli import (
    adapt,
    bench,
    cache,
    classify,
    datasets,
    demo,
    info,
    inspect,
    learn,
    methods,
    models,
    predict,
    push,
    table,
)
from selftpt.cli.options import HelpfulCommand, HelpfulGroup, note
from selftpt.config import RENAMED_SETTINGS, deprecated
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.version import __version__

INTERRUPTED = 130  # Typer's exit code for Ctrl-C
RENAMED_OPTIONS = {"--measure": "--metric", "--compare": "--methods"}
USE, EVALUATE, LIST = "Classify images", "Benchmark", "Information"
COMMANDS: dict[ModuleType, tuple[str, str]] = {  # the panel and the example of each command
    demo: (USE, "selftpt demo --out demo.png"),
    classify: (USE, "selftpt classify photos/ --names 'tabby cat, parrot, bicycle'"),
    learn: (USE, "selftpt learn labelled-photos/ --out prompt.safetensors"),
    adapt: (USE, "selftpt adapt --names 'tabby cat, parrot' --out pets.safetensors"),
    predict: (USE, "selftpt predict photos/ --classifier pets.safetensors --json"),
    push: (USE, "selftpt push prompt.safetensors alice/my-prompt"),
    bench: (EVALUATE, "selftpt bench cross-dataset --data data/ --source caltech101 --out runs/"),
    table: (EVALUATE, "selftpt table runs/ --format markdown"),
    methods: (LIST, "selftpt methods"),
    models: (LIST, "selftpt models ViT-B"),
    datasets: (LIST, "selftpt datasets --data data/"),
    inspect: (LIST, "selftpt inspect prompt.safetensors"),
    cache: (LIST, "selftpt cache classifiers --prune"),
    info: (LIST, "selftpt info --json"),
}

app = typer.Typer(
    cls=HelpfulGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    help="Class names in, a better CLIP classifier out, at the inference cost of zero-shot. Learn a prompt once from "
    "labelled images, adapt it to any list of class names, and predict.",
    epilog="Example:\n\nselftpt classify photos/ --names 'tabby cat, parrot, bicycle'",
)
for module, (panel, example) in COMMANDS.items():
    name = module.__name__.rpartition(".")[2]
    app.command(name, cls=HelpfulCommand, rich_help_panel=panel, epilog=f"Example:\n\n{example}")(module.command)


def _version(requested: bool) -> None:
    if requested:
        print(f"selftpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line.

    An error that the user can fix is printed on one line, and the exit code is 2.
    """
    warnings.showwarning = _print_warning  # type: ignore[assignment]
    # By default the threads of torch wait in a busy loop, which on a loaded machine takes longer than the work itself.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name may be invalid UTF-8
            stream.reconfigure(errors="surrogateescape")
    arguments = sys.argv[1:]
    if len(arguments) == 2 and arguments[0] == "--show-completion":  # Typer takes no shell here, it detects it
        os.environ["_SELFTPT_COMPLETE"] = f"source_{arguments[1]}"
    try:
        code = app([current_option(one) for one in arguments], prog_name="selftpt", standalone_mode=False)
        if code == INTERRUPTED:
            code = _fail(
                "interrupted: no incomplete file was written; to continue, repeat `learn`, or `bench` with --resume"
            )
        sys.stdout.flush()
    except SelfTPTError as error:
        code = _fail(str(error))
    except TyperException as error:
        text = getattr(error, "format_message", error.__str__)()
        code = _fail(text) if text else 2  # without a text, Typer has printed the help
    except OSError as error:  # from standard output: for other files, a SelfTPTError is raised
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1 if error.errno == errno.EPIPE else _fail(f"cannot write the output: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        code = _fail("out of memory: lower --chunk or --batch, or the setting chunk of a method with --set")
    sys.exit(code)


def current_option(argument: str) -> str:
    """Replace a renamed option with its current name, and warn that the old name is deprecated."""
    option, equals, value = argument.partition("=")
    if option in RENAMED_OPTIONS:
        deprecated(f"the option {option}", RENAMED_OPTIONS[option])
        return RENAMED_OPTIONS[option] + equals + value
    for former, current in RENAMED_SETTINGS.items():
        for prefix in ("--", "--no-"):
            if option == prefix + former.replace("_", "-"):
                replacement = prefix + current.replace("_", "-")
                deprecated(f"the option {option}", replacement)
                return replacement + equals + value
    return argument


def _fail(text: str) -> int:
    print(f"selftpt: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _print_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    if issubclass(category, SelfTPTWarning):
        note(str(message))
