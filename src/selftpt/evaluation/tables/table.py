"""The parts of a table: cells, rows, blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from selftpt.data.datasets.table import DATASETS

AVERAGE = "average"


@dataclass(frozen=True)
class Cell:
    """A mean over seeds.

    Attributes:
        mean: The mean.
        std: Sample standard deviation over seeds; None for one seed, and where it is not known.
        seeds: The number of seeds; 0 for a method that uses none, and for the paper.
        images: The number of test images, over all datasets of an average.
    """

    mean: float
    std: float | None = None
    seeds: int = 0
    images: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Row:
    """The results of a method, of recorded runs or of the paper.

    Attributes:
        name: The title of the row: the method, and how it differs from the method's other rows.
        method: The method.
        paper: Whether the numbers are the paper's.
        cells: Cells by column.
        source: The dataset that the runs learned from; None for methods that learn from none, and in protocols that
            learn from a part of the dataset that is tested.
        averaged: The datasets that the average is over.
        complete: Whether these are all columns of the table that a row with this source is averaged over.
        random_init: Whether the weights of the model were randomly initialised.
        notes: What a reader must know about the row.
        best: The columns in which the row is the best of our runs.
    """

    name: str
    method: str
    paper: bool
    cells: Mapping[str, Cell]
    source: str | None = None
    averaged: tuple[str, ...] = ()
    complete: bool = True
    random_init: bool = False
    notes: tuple[str, ...] = ()
    best: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Block:
    """The rows of one metric.

    Attributes:
        metric: The name of the metric.
        heading: What it is called above the rows.
        rows: The rows.
    """

    metric: str
    heading: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    """A table, ready to be rendered.

    Attributes:
        protocol: The protocol.
        title: The title.
        columns: Names of datasets, then the average.
        blocks: One block per metric.
        marks: The mark of each note of the rows.
        notes: Notes on the whole table.
    """

    protocol: str
    title: str
    columns: tuple[str, ...]
    blocks: tuple[Block, ...]
    marks: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all blocks."""
        return tuple(row for block in self.blocks for row in block.rows)


def column_title(column: str) -> str:
    """Return the heading of a column: a dataset's short title, or the name of a dataset that is not the paper's."""
    if column == AVERAGE:
        return "Average"
    return DATASETS[column].short_title if column in DATASETS else column


def in_paper_order(datasets: Collection[str]) -> list[str]:
    """Datasets in the paper's order, then all others by name."""
    return [*(name for name in DATASETS if name in datasets), *sorted(set(datasets) - DATASETS.keys())]
