"""What a table consists of."""

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
        seeds: The number of seeds; 0 for a method that draws nothing, and for the paper.
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
        name: What the row is called: the method, and what tells it from the method's other rows.
        method: The method.
        paper: Whether the numbers are the paper's.
        cells: Cells by column.
        source: The dataset that the runs learned from; None for methods that learn from none, and in protocols that
            learn from a part of the dataset that is tested.
        averaged: The datasets that the average is over.
        complete: Whether these are all columns of the table that a row with this source is averaged over.
        random_init: Whether the weights of the model were randomly initialised.
        notes: What a reader must know about the row.
        best: The columns in which the row is the best of ours.
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
class Table:
    """A table, ready to be rendered.

    Attributes:
        protocol: The protocol.
        measure: The measure.
        title: The title.
        columns: Names of datasets, then the average.
        rows: The rows.
        marks: The mark of each note of the rows.
        notes: Notes on the whole table.
    """

    protocol: str
    measure: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    marks: Mapping[str, str]
    notes: tuple[str, ...]


def column_title(column: str) -> str:
    """The heading of a column: a dataset's short title, or the name of a dataset that is not the paper's."""
    if column == AVERAGE:
        return "Average"
    return DATASETS[column].short_title if column in DATASETS else column


def in_paper_order(datasets: Collection[str]) -> list[str]:
    """Datasets in the paper's order, then all others by name."""
    return [*(name for name in DATASETS if name in datasets), *sorted(set(datasets) - DATASETS.keys())]
