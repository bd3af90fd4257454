"""`selftpt table`: recorded runs beside the paper's numbers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

PROTOCOL_HELP = "only this protocol: base-to-new, cross-dataset or domain; all that have runs by default"


class Format(StrEnum):
    text = "text"
    markdown = "markdown"
    csv = "csv"
    latex = "latex"


class Paper(StrEnum):
    same = "same"
    all = "all"
    none = "none"


def command(
    runs: Annotated[Path, typer.Argument(help="the folder in which runs were recorded")],
    protocol: Annotated[str | None, typer.Option(help=PROTOCOL_HELP)] = None,
    measure: Annotated[
        str | None,
        typer.Option(help="new, base, harmonic, base-top5, base-ece (base-to-new), test (others), top5, ece (all)"),
    ] = None,
    paper: Annotated[Paper, typer.Option(help="rows of the paper: of the same methods, all, or none")] = Paper.same,
    compare: Annotated[str | None, typer.Option(help="only these methods, separated by commas")] = None,
    format: Annotated[Format, typer.Option(help="how tables are written")] = Format.text,
    out: Annotated[Path | None, typer.Option(help="a file to write instead of standard output")] = None,
) -> None:
    """Show recorded runs as tables, one per protocol, beside the paper's numbers."""
    from selftpt.evaluation.protocols import PROTOCOLS
    from selftpt.evaluation.runs import read_records
    from selftpt.evaluation.tables import make_table, render
    from selftpt.files import write_whole

    records = read_records(runs)
    methods = [name.strip() for name in (compare or "").split(",") if name.strip()]
    recorded = {record["protocol"] for record in records if not methods or record["method"] in methods}
    found = [name for name in PROTOCOLS if name in recorded] or [*PROTOCOLS]
    with_measure = [name for name in found if measure is None or measure in PROTOCOLS[name].measures]
    wanted = [protocol] if protocol else with_measure or found
    texts = [render(make_table(records, name, measure, paper.value, methods), format.value) for name in wanted]
    if format is Format.csv:  # one header for all
        texts[1:] = [text.partition("\n")[2] for text in texts[1:]]
    answer = ("" if format is Format.csv else "\n").join(texts)
    if out is None:
        print(answer, end="")
        return
    write_whole(out, answer.encode())
