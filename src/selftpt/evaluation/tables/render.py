"""Tables as text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Literal

from selftpt.evaluation.tables.table import AVERAGE, Block, Row, Table, column_title

Format = Literal["text", "markdown", "csv", "latex"]

CSV_COLUMNS = ("protocol", "metric", "method", "of", "dataset", "mean", "std", "seeds", "notes")
LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "†": r"\dag{}",
        "‡": r"\ddag{}",
        "§": r"\S{}",
        "¶": r"\P{}",
    }
)


def render(table: Table, format: Format = "text", width: int | None = None) -> str:
    """Render a table in one of the formats; as CSV it has one line per cell.

    Args:
        table: The table.
        format: The format.
        width: As text, the columns of a table that is wider are continued below, and notes are wrapped. None sets no
            limit.
    """
    if format == "text":
        return _text(table, width)
    return {"markdown": _markdown, "csv": _csv, "latex": _latex}[format](table)


def escape_latex(text: str) -> str:
    """Escape the special characters of LaTeX."""
    return text.translate(LATEX)


def _text(table: Table, width: int | None) -> str:
    blocks = [_lines(table, block, "{}*") for block in table.blocks]
    widths = [max(map(len, column)) for column in zip(*(line for lines in blocks for line in lines), strict=True)]
    parts = []
    for block, lines in zip(table.blocks, blocks, strict=True):
        heading = [block.heading] if len(blocks) > 1 else []
        for columns in _panels(widths, width):
            shown = ["  ".join(line[i].ljust(widths[i]) for i in columns).rstrip() for line in lines]
            parts.append("\n".join([*heading, *shown]))
    title, *notes = (_wrap(text, width) for text in (table.title, *_legend(table, "*: best of our runs")))
    return "\n\n".join([title, *parts, *(["\n".join(notes)] if notes else [])]) + "\n"


def _panels(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Divide the columns, method and seeds first, into as many panels as the width requires."""
    panels = [[0, 1]]
    for column in range(2, len(widths)):
        if width and len(panels[-1]) > 2 and sum(widths[i] + 2 for i in (*panels[-1], column)) - 2 > width:
            panels.append([0, 1])
        panels[-1].append(column)
    return panels


def _wrap(text: str, width: int | None) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ") if width else text


def _markdown(table: Table) -> str:
    parts = [f"**{table.title}**"]
    for block in table.blocks:
        header, *body = _lines(table, block, "**{}** ", lambda text: text.replace("|", r"\|"))
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
        parts += [f"*{block.heading}*"] if len(table.blocks) > 1 else []
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    parts.append("\n".join(f"- {note}" for note in _legend(table, "bold: best of our runs")))
    return "\n\n".join(parts).rstrip() + "\n"


def _latex(table: Table) -> str:
    body: list[str] = []
    for block in table.blocks:
        header, *rows = (f"{' & '.join(line)} \\\\" for line in _lines(table, block, r"\textbf{{{}}} ", escape_latex))
        if not body:
            body = [r"\hline", header]
        if len(table.blocks) > 1:
            columns = len(table.columns) + 2
            rows.insert(0, rf"\multicolumn{{{columns}}}{{l}}{{\textit{{{escape_latex(block.heading)}}}}} \\")
        body += [r"\hline", *rows]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(table.title)}}}",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}|r}}",
        *body,
        r"\hline",
        r"\end{tabular}",
        *(rf"\par\footnotesize {escape_latex(note)}" for note in _legend(table, "bold: best of our runs")),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for block in table.blocks:
        for row, column in itertools.product(block.rows, table.columns):
            if cell := row.cells.get(column):
                std = "" if cell.std is None else round(cell.std, 4)
                of = "paper" if row.paper else "ours"
                numbers = [round(cell.mean, 4), std, cell.seeds or ""]
                writer.writerow([table.protocol, block.metric, row.name, of, column, *numbers, "; ".join(row.notes)])
    return out.getvalue()


def _lines(table: Table, block: Block, best: str, escape: Callable[[str], str] = str) -> list[list[str]]:
    """Return the cells of a block as text, the header first; `best` is the format of the best means."""
    lines = [["method", "seeds", *(escape(_printable(column_title(column))) for column in table.columns)]]
    for row in block.rows:
        name = " ".join([_printable(row.name), *(table.marks[note] for note in row.notes)])
        line = [escape(name), _seeds(row)]
        for column in table.columns:
            if cell := row.cells.get(column):
                mean = (best if column in row.best else "{} ").format(f"{cell.mean:.2f}")
                line.append((mean + ("" if cell.std is None else escape(f"±{cell.std:.2f}"))).rstrip())
            else:
                line.append("-")
        lines.append(line)
    return lines


def _seeds(row: Row) -> str:
    """Return the number of seeds of the row's cells: "3", or "1-3"; "-" for none."""
    counts = sorted({cell.seeds for column, cell in row.cells.items() if column != AVERAGE})
    return "-".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if any(counts) else "-"


def _legend(table: Table, best: str) -> list[str]:
    marked = any(row.best for row in table.rows)
    notes = [*(f"{mark} {note}" for note, mark in table.marks.items()), *([best] if marked else []), *table.notes]
    return list(map(_printable, notes))


def _printable(text: str) -> str:
    """Escape line breaks and other control characters, which would break a table."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
