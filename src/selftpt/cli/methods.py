"""`selftpt methods`: what can be compared."""

from __future__ import annotations

import dataclasses
import json
import sys

from selftpt.cli.options import Json


def command(as_json: Json = False) -> None:
    """List the methods that `bench --methods` and `predict --method` take."""
    from selftpt.methods import METHODS

    if as_json:
        told = ("name", "summary", "reference", "needs", "trains_on", "cost", "whole", "learns", "draws")
        for_all = ({key: getattr(m, key) for key in told} for m in METHODS.values())
        settings = ({"settings": dataclasses.asdict(m.settings)} for m in METHODS.values())
        print(json.dumps([row | more for row, more in zip(for_all, settings, strict=True)]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("method", "what it does", "needs", "trains on", "cost of a picture", "reference"):
        table.add_column(column, overflow="fold", no_wrap=column == "method")
    for m in METHODS.values():
        table.add_row(m.name, m.summary, m.needs, m.trains_on, m.cost, m.reference)
    Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False, emoji=False).print(table)
