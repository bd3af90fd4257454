"""The table of one protocol, from records and the paper's numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from selftpt.errors import SelfTPTError
from selftpt.evaluation.protocols import Metric, Protocol, find_protocol
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
from selftpt.evaluation.tables.table import AVERAGE, Block, Row, Table, in_paper_order
from selftpt.methods.selection import did_you_mean

PaperRows = Literal["same", "all", "none"]


def make_table(
    records: Sequence[Record],
    protocol: str,
    metric: str | None = None,
    paper: PaperRows = "same",
    methods: Collection[str] = (),
) -> Table:
    """Make the table of one protocol: its columns are the datasets that have runs.

    A row's average is over its datasets without its source. Methods without a source, and the paper's rows, are
    averaged over the same datasets as the others if those have one source, else without the protocol's source.

    Args:
        records: Records of runs, as `read_records` gives them.
        protocol: The name of the protocol.
        metric: The name of one of its metrics. None shows the protocol's default metrics, one block each: base, new
            and harmonic mean in base-to-new.
        paper: Which rows of the paper are shown: those of the same methods, all, or none.
        methods: The methods to show; all if empty.

    Raises:
        SelfTPTError: There is no such protocol, metric or method, or nothing to show.
    """
    chosen = find_protocol(protocol)
    if metric is not None and metric not in chosen.metrics:
        raise SelfTPTError(f"{protocol} has no metric {metric!r}: choose one of {', '.join(chosen.metrics)}")
    names = {*method_order(), *(record["method"] for record in records)}
    if unknown := set(methods) - names:
        name = min(unknown)
        raise SelfTPTError(
            f"no method is called {name!r}: {did_you_mean(name, names)}choose one of {', '.join(sorted(names))}"
        )
    metrics = chosen.default_metrics if metric is None else (metric,)
    of_protocol = [
        record for record in records if record["protocol"] == protocol and (not methods or record["method"] in methods)
    ]
    runs = {
        name: found
        for name in metrics
        if (found := [record for record in of_protocol if value(record, chosen.metrics[name].path) is not None])
    }
    if not runs:
        raise SelfTPTError(f"nothing to show: no run of {protocol} with the metric {metrics[0]!r} is recorded")

    every = [record for record in of_protocol if any(record in found for found in runs.values())]
    datasets = in_paper_order({record["dataset"] for record in every})
    blocks = tuple(
        Block(name, chosen.metrics[name].heading, _rows(found, chosen, name, datasets, paper, methods))
        for name, found in runs.items()
    )
    rows = [row for block in blocks for row in block.rows]
    notes = []
    if any(cell.std is not None for row in rows for cell in row.cells.values()):
        notes.append("±: sample standard deviation over seeds; our runs use the same crops of an image with every seed")
    notes += source_footer(datasets, chosen.source, sources_of(every))
    if absent := [method for method in methods if method not in {row.method for row in rows}]:
        notes.append(f"no run of {', '.join(absent)}")
    notes += _paper_footer(rows, chosen, tuple(runs), paper)
    title = "top-1 accuracy (%)" if len(blocks) > 1 else chosen.metrics[blocks[0].metric].title
    return Table(protocol, f"{protocol}: {title}", (*datasets, AVERAGE), blocks, marks_of(rows), tuple(notes))


def _rows(
    records: Sequence[Record],
    protocol: Protocol,
    metric: str,
    datasets: Sequence[str],
    paper: PaperRows,
    methods: Collection[str],
) -> tuple[Row, ...]:
    """Return the rows of one metric, including the paper's, in the order of `METHODS`."""
    shown, order = protocol.metrics[metric], method_order()
    rows = _our_rows(records, protocol, shown, datasets)
    if paper != "none" and metric == protocol.paper_metric:
        ours = {row.method for row in rows}
        rows += [
            row
            for row in _paper_rows(protocol, datasets, default_source(records, protocol))
            if (row.method in methods if methods else paper == "all" or row.method in ours)
        ]
    rows.sort(key=lambda row: order.index(row.method) if row.method in order else len(order))
    return tuple(mark_best(rows, shown))


def sources_of(records: Sequence[Record]) -> set[str]:
    """Return the datasets that runs learned from."""
    return {source for source in map(source_of, records) if source}


def default_source(records: Sequence[Record], protocol: Protocol) -> str | None:
    """Return the source that averages of rows without a source exclude: that of all other rows, or the protocol's."""
    sources = sources_of(records)
    return sources.pop() if len(sources) == 1 else protocol.source


def _our_rows(records: Sequence[Record], protocol: Protocol, metric: Metric, datasets: Sequence[str]) -> list[Row]:
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record["method"], []).append(record)
    default, rows = default_source(records, protocol), []
    for method, of_method in by_method.items():
        for name, of_row in split_rows(method, of_method):
            latest = latest_records(of_row)
            row = make_row(name, latest, metric)
            excluded = row.source or default
            columns = [dataset for dataset in datasets if dataset != excluded]
            row = with_average(row, columns, latest, metric)
            notes = source_notes(row, protocol.source, sources_of(records), excluded)
            notes += [*paper_notes(latest), *average_notes(row, columns)]
            rows.append(replace(row, notes=tuple(notes)))
    return rows


def _paper_rows(protocol: Protocol, datasets: Sequence[str], excluded: str | None) -> list[Row]:
    """Return the paper's rows in the columns shown, without rows that have none of them."""
    columns = [dataset for dataset in datasets if dataset != excluded]
    cut = [cut_paper_row(row, datasets, columns) for row in paper_rows(protocol).values()]
    return [replace(row, notes=(*row.notes, *average_notes(row, columns))) for row in cut if row.cells]


def _paper_footer(rows: Sequence[Row], protocol: Protocol, metrics: Collection[str], wanted: PaperRows) -> list[str]:
    if any(row.paper for row in rows):
        return [f"(paper): {paper()['title']}, {protocol.paper_table}; averages are over the columns shown"]
    if wanted != "none" and protocol.paper_metric not in metrics:
        return ["the paper does not print this metric"]
    return []
