"""`selftpt table`: show recorded runs beside the paper's numbers."""

from __future__ import annotations

import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from selftpt.cli.options import DATA, METHOD, OUTPUT, comma_separated, complete_method, complete_protocol


class Format(StrEnum):
    """The formats of tables."""

    text = "text"
    markdown = "markdown"
    csv = "csv"
    latex = "latex"


class Paper(StrEnum):
    """Which rows of the paper are shown."""

    same = "same"
    all = "all"
    none = "none"


def command(
    runs: Annotated[Path, typer.Argument(help="The folder that `selftpt bench` wrote.")],
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show only this protocol: base-to-new, cross-dataset or domain. By default all that have runs.",
            rich_help_panel=DATA,
            autocompletion=complete_protocol,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The metric. In base-to-new: base, new, harmonic, top5, ece, base-top5 or base-ece; by default base, "
            "new and harmonic. In the other protocols: test, top5 or ece; by default test.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    paper: Annotated[
        Paper,
        typer.Option(
            help="Which rows of the paper are shown: those of the same methods, all, or none.", rich_help_panel=OUTPUT
        ),
    ] = Paper.same,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Show only these methods, separated by commas.",
            rich_help_panel=METHOD,
            autocompletion=complete_method,
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="The format of the tables.", rich_help_panel=OUTPUT)] = Format.text,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write to this file instead of standard output.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Show recorded runs as tables, one per protocol, beside the paper's numbers."""
    from selftpt.evaluation.protocols import PROTOCOLS
    from selftpt.evaluation.runs import read_records
    from selftpt.evaluation.tables import make_table, render
    from selftpt.files import write_atomically

    records = read_records(runs)
    chosen_methods = comma_separated(methods or "")
    recorded = {record["protocol"] for record in records if not chosen_methods or record["method"] in chosen_methods}
    found = [name for name in PROTOCOLS if name in recorded] or [*PROTOCOLS]
    with_metric = [name for name in found if metric is None or metric in PROTOCOLS[name].metrics]
    shown = [protocol] if protocol else with_metric or found
    width = shutil.get_terminal_size().columns if out is None and sys.stdout.isatty() else None
    tables = [make_table(records, name, metric, paper.value, chosen_methods) for name in shown]
    texts = [render(table, format.value, width) for table in tables]
    if format is Format.csv:  # one header for all tables
        texts[1:] = [text.partition("\n")[2] for text in texts[1:]]
    text = ("" if format is Format.csv else "\n").join(texts)
    if out is None:
        print(text, end="")
        return
    write_atomically(out, text.encode())
