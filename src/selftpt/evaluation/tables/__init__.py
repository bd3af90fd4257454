"""Tables of recorded runs beside the paper's: rows are methods, columns are datasets and their average."""

from __future__ import annotations

from selftpt.evaluation.tables.build import PaperRows, make_table
from selftpt.evaluation.tables.render import Format, render
from selftpt.evaluation.tables.table import AVERAGE, Block, Cell, Row, Table, column_title

__all__ = ["AVERAGE", "Block", "Cell", "Format", "PaperRows", "Row", "Table", "column_title", "make_table", "render"]
