"""The table of one protocol and measure, from records and the paper's numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from selftpt.errors import SelfTPTError
from selftpt.evaluation.protocols import Measure, Protocol, chosen_protocol
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
    chosen = chosen_protocol(protocol)
    measure = measure or chosen.paper_measure
    if measure not in chosen.measures:
        raise SelfTPTError(f"{protocol} has no measure {measure!r}: choose one of {', '.join(chosen.measures)}")
    shown = chosen.measures[measure]
    order = method_order()
    names = {*order, *(record["method"] for record in records)}
    if unknown := set(methods) - names:
        raise SelfTPTError(f"no method is called {min(unknown)!r}: choose one of {', '.join(sorted(names))}")
    runs = [
        record
        for record in records
        if record["protocol"] == protocol
        and (not methods or record["method"] in methods)
        and value(record, shown.path) is not None
    ]
    if not runs:
        raise SelfTPTError(f"nothing to show: no run of {protocol} with the measure {measure!r} is recorded")

    datasets = in_paper_order({record["dataset"] for record in runs})
    rows = _our_rows(runs, chosen, shown, datasets)
    if paper != "none" and measure == chosen.paper_measure:
        ours = {row.method for row in rows}
        rows += [
            row
            for row in _paper_rows(chosen, datasets, default_source(runs, chosen))
            if (row.method in methods if methods else paper == "all" or row.method in ours)
        ]
    rows.sort(key=lambda row: order.index(row.method) if row.method in order else len(order))
    rows = mark_best(rows, shown)

    notes = []
    if any(cell.std is not None for row in rows for cell in row.cells.values()):
        notes.append("±: sample standard deviation over seeds; ours have the same crops of an image in all seeds")
    notes += source_footer(datasets, chosen.source, sources_of(runs))
    if absent := [method for method in methods if method not in {row.method for row in rows}]:
        notes.append(f"no run of {', '.join(absent)}")
    notes += _paper_footer(rows, chosen, measure, paper)
    title = f"{protocol}: {shown.title}"
    return Table(protocol, measure, title, (*datasets, AVERAGE), tuple(rows), marks_of(rows), tuple(notes))


def sources_of(records: Sequence[Record]) -> set[str]:
    """The datasets that runs learned from."""
    return {source for source in map(source_of, records) if source}


def default_source(records: Sequence[Record], protocol: Protocol) -> str | None:
    """The source that the averages of rows without a source leave out: that of all other rows, or the protocol's."""
    sources = sources_of(records)
    return sources.pop() if len(sources) == 1 else protocol.source


def _our_rows(records: Sequence[Record], protocol: Protocol, measure: Measure, datasets: Sequence[str]) -> list[Row]:
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record["method"], []).append(record)
    default, rows = default_source(records, protocol), []
    for method, of_method in by_method.items():
        for name, of_row in split_rows(method, of_method):
            latest = latest_records(of_row)
            row = make_row(name, latest, measure)
            excluded = row.source or default
            columns = [dataset for dataset in datasets if dataset != excluded]
            row = with_average(row, columns, latest, measure)
            notes = source_notes(row, protocol.source, sources_of(records), excluded)
            notes += [*paper_notes(latest), *average_notes(row, columns)]
            rows.append(replace(row, notes=tuple(notes)))
    return rows


def _paper_rows(protocol: Protocol, datasets: Sequence[str], excluded: str | None) -> list[Row]:
    """The paper's rows in the columns shown, without those that have none of them."""
    columns = [dataset for dataset in datasets if dataset != excluded]
    cut = [cut_paper_row(row, datasets, columns) for row in paper_rows(protocol).values()]
    return [replace(row, notes=(*row.notes, *average_notes(row, columns))) for row in cut if row.cells]


def _paper_footer(rows: Sequence[Row], protocol: Protocol, measure: str, wanted: PaperRows) -> list[str]:
    if any(row.paper for row in rows):
        return [f"(paper): {paper()['title']}, {protocol.paper_table}; averages are over the columns shown"]
    if wanted != "none" and measure != protocol.paper_measure:
        return ["the paper does not print this measure"]
    return []
