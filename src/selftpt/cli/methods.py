"""`selftpt methods`: what can be compared."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from selftpt.cli.options import Json


def command(as_json: Json = False) -> None:
    """List the methods that `bench --methods` and `predict --method` take."""
    from selftpt.methods import METHODS

    if as_json:
        keys = ("name", "summary", "reference", "needs", "trains_on", "inputs", "requires")
        flags = ("needs_labels", "transductive", "stochastic")
        rows = [
            {key: getattr(m, key) for key in (*keys, *flags)} | {"cost": m.cost(m.config)} | _settings(m.config)
            for m in METHODS.values()
        ]
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("method", "what it does", "needs", "trains on", "cost per image", "reference"):
        table.add_column(column, overflow="fold", no_wrap=column == "method")
    for m in METHODS.values():
        table.add_row(m.name, m.summary, m.needs, m.trains_on, m.cost(m.config), m.reference)
    Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False, emoji=False).print(table)


def _settings(settings: Any, before: str = "") -> dict[str, dict[str, Any]]:
    """The settings of a method and what each is, by the names that --set takes."""
    told: dict[str, dict[str, Any]] = {"settings": {}, "help": {}}
    for field in dataclasses.fields(settings):
        name, value = before + field.name, getattr(settings, field.name)
        inner = {"settings": {name: value}, "help": {name: field.metadata.get("help")}}
        if dataclasses.is_dataclass(value):
            inner = _settings(value, f"{name}.")
        for part, more in inner.items():
            told[part] |= more
    return told
