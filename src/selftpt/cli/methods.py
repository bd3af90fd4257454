"""`selftpt methods`: list the methods, or the settings of one method."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer

from selftpt.cli.options import Json, complete_method

WIDE = 140  # columns of a terminal that has room for the references
INFO_FIELDS = (
    *("summary", "reference", "needs", "trains_on", "inputs", "requires", "needs_labels", "transductive"),
    *("stochastic", "cost"),
)


def command(
    method: Annotated[
        str | None, typer.Argument(help="Show the settings of this method.", autocompletion=complete_method)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods that `bench --methods` and `predict --method` accept, or the settings of one method."""
    from selftpt.methods import METHODS

    if method is not None:
        _show_settings(method, as_json)
        return
    if as_json:
        print(json.dumps([_row(name) for name in METHODS]))
        return
    columns: dict[str, str] = {
        "method": "name",
        "what it does": "summary",
        "needs": "needs",
        "trains on": "trains_on",
        "cost per image": "cost",
    }
    if not sys.stdout.isatty() or shutil.get_terminal_size().columns >= WIDE:
        columns["reference"] = "reference"
    rows = ([_row(name)[key] for key in columns.values()] for name in METHODS)
    _print_table(list(columns), rows)


def _row(name: str) -> dict[str, Any]:
    from selftpt.methods import METHODS

    info = METHODS.info[name]
    return {"name": name} | {key: getattr(info, key) for key in INFO_FIELDS}


def _show_settings(name: str, as_json: bool) -> None:
    from selftpt.methods.selection import find_method

    settings = list(_settings(find_method(name).config))
    if as_json:
        values = {setting: value for setting, value, _ in settings}
        print(json.dumps(_row(name) | {"settings": values, "help": {setting: text for setting, _, text in settings}}))
        return
    if not settings:
        print(f"{name} has no settings")
        return
    shown = ((setting, "none" if value is None else _text(value), text or "") for setting, value, text in settings)
    _print_table(["setting", "default", "description"], shown)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str | None]]:
    """Yield each setting of a method: its name as --set takes it, its default and its help text."""
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{name}.")
        else:
            yield name, value, field.metadata.get("help")


def _print_table(columns: list[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False, emoji=False).print(table)
