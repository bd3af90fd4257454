"""The table of one protocol and measure, from records and the paper's numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from selftpt.errors import SelfTPTError
from selftpt.evaluation.protocols import Protocol, chosen_protocol
from selftpt.evaluation.records import Record
from selftpt.evaluation.tables.aggregate import (
    cut_paper_row,
    latest_records,
    make_row,
    mark_best,
    source_of,
    split_rows,
    value,
    with_average,
)
from selftpt.evaluation.tables.notes import average_notes, marks_of, paper_notes, source_footer, source_notes
from selftpt.evaluation.tables.paper import method_order, paper, paper_rows
from selftpt.evaluation.tables.table import AVERAGE, Row, Table, in_paper_order

PaperRows = Literal["same", "all", "none"]


def make_table(
    records: Sequence[Record],
    protocol: str,
    measure: str | None = None,
    paper: PaperRows = "same",
    methods: Collection[str] = (),
) -> Table:
    """The table of one protocol: its columns are the datasets that have runs.

    A row's average is over its datasets without its source. Methods without a source, and the paper's rows, are
    averaged over the same datasets as the others if those have one source, else without the protocol's source.

    Args:
        records: Records of runs, as `read_records` gives them.
        protocol: The name of the protocol.
        measure: The name of one of its measures; None for the paper's.
        paper: Which rows of the paper are shown: those of the same methods, all, or none.
        methods: The methods to show; all if empty.

    Raises:
        SelfTPTError: If there is no such protocol, measure or method, or nothing to show.
    """
    by_name = chosen_protocol(protocol)
    measure = measure or by_name.paper_measure
    if measure not in by_name.measures:
        raise SelfTPTError(f"{protocol} has no measure {measure!r}: choose one of {', '.join(by_name.measures)}")
    shown = by_name.measures[measure]
    names = {*method_order(), *(record["method"] for record in records)}
    if unknown := set(methods) - names:
        raise SelfTPTError(f"no method is called {min(unknown)!r}: choose one of {', '.join(sorted(names))}")
    runs: dict[str, list[Record]] = {}
    for record in records:
        wanted = record["protocol"] == protocol and (not methods or record["method"] in methods)
        if wanted and value(record, shown.path) is not None:
            runs.setdefault(record["method"], []).append(record)
    if not runs:
        raise SelfTPTError(f"nothing to show: no run of {protocol} with the measure {measure!r} is recorded")

    datasets = in_paper_order({record["dataset"] for members in runs.values() for record in members})
    sources = {source for members in runs.values() for source in map(source_of, members) if source}
    default_source = next(iter(sources)) if len(sources) == 1 else by_name.source

    rows = []
    for method, members in runs.items():
        for name, of_row in split_rows(method, members):
            latest = latest_records(of_row)
            row = make_row(name, latest, shown)
            excluded = row.source or default_source
            columns = [dataset for dataset in datasets if dataset != excluded]
            row = with_average(row, columns, latest, shown)
            source = source_notes(row, by_name.source, sources, excluded)
            notes = [*source, *paper_notes(latest), *average_notes(row, columns)]
            rows.append(replace(row, notes=tuple(notes)))
    if paper != "none" and measure == by_name.paper_measure:
        columns = [dataset for dataset in datasets if dataset != default_source]
        for method, printed in paper_rows(by_name).items():
            row = cut_paper_row(printed, datasets, columns)
            if row.cells and (method in methods if methods else paper == "all" or method in runs):
                rows.append(replace(row, notes=(*row.notes, *average_notes(row, columns))))
    order = method_order()
    rows.sort(key=lambda row: order.index(row.method) if row.method in order else len(order))
    rows = mark_best(rows, shown)

    notes = []
    if any(cell.std is not None for row in rows for cell in row.cells.values()):
        notes.append("±: sample standard deviation over seeds; ours have the same crops of an image in all seeds")
    notes += source_footer(datasets, by_name.source, sources)
    if absent := [method for method in methods if method not in {row.method for row in rows}]:
        notes.append(f"no run of {', '.join(absent)}")
    notes += _paper_footer(rows, by_name, measure, paper)
    title = f"{protocol}: {shown.title}"
    return Table(protocol, measure, title, (*datasets, AVERAGE), tuple(rows), marks_of(rows), tuple(notes))


def _paper_footer(rows: Sequence[Row], protocol: Protocol, measure: str, wanted: PaperRows) -> list[str]:
    if any(row.paper for row in rows):
        return [f"(paper): {paper()['title']}, {protocol.paper_table}; averages are over the columns shown"]
    if wanted != "none" and measure != protocol.paper_measure:
        return ["the paper does not print this measure"]
    return []
