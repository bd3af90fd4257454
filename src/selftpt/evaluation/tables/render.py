"""Tables as text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Literal

from selftpt.evaluation.tables.table import AVERAGE, Row, Table, column_title

Format = Literal["text", "markdown", "csv", "latex"]

CSV_COLUMNS = ("protocol", "measure", "method", "of", "dataset", "mean", "std", "seeds", "notes")
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


def render(table: Table, format: Format = "text") -> str:
    """A table in one of the formats; as CSV it has one line per cell."""
    return {"text": _text, "markdown": _markdown, "csv": _csv, "latex": _latex}[format](table)


def escape_latex(text: str) -> str:
    """Text with the characters escaped that are LaTeX's own."""
    return text.translate(LATEX)


def _text(table: Table) -> str:
    lines = _lines(table, "{}*")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([table.title, "", *shown, "", *_legend(table, "*: best of ours")]) + "\n"


def _markdown(table: Table) -> str:
    header, *body = _lines(table, "**{}** ", lambda text: text.replace("|", r"\|"))
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    notes = [f"- {note}" for note in _legend(table, "bold: best of ours")]
    return "\n".join([f"**{table.title}**", "", *(f"| {' | '.join(line)} |" for line in lines), "", *notes]) + "\n"


def _latex(table: Table) -> str:
    header, *body = (f"{' & '.join(line)} \\\\" for line in _lines(table, r"\textbf{{{}}} ", escape_latex))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(table.title)}}}",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}|r}}",
        r"\hline",
        header,
        r"\hline",
        *body,
        r"\hline",
        r"\end{tabular}",
        *(rf"\par\footnotesize {escape_latex(note)}" for note in _legend(table, "bold: best of ours")),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in table.rows:
        for column in table.columns:
            if cell := row.cells.get(column):
                std = "" if cell.std is None else round(cell.std, 4)
                of = "paper" if row.paper else "ours"
                numbers = [round(cell.mean, 4), std, cell.seeds or ""]
                writer.writerow([table.protocol, table.measure, row.name, of, column, *numbers, "; ".join(row.notes)])
    return out.getvalue()


def _lines(table: Table, best: str, escape: Callable[[str], str] = str) -> list[list[str]]:
    """The cells of the table as text, its header first; `best` is the format of the best means."""
    lines = [["method", "seeds", *(escape(_printable(column_title(column))) for column in table.columns)]]
    for row in table.rows:
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
    """The number of seeds of the row's cells: "3", or "1-3"; "-" for none."""
    counts = sorted({cell.seeds for column, cell in row.cells.items() if column != AVERAGE})
    return "-".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if any(counts) else "-"


def _legend(table: Table, best: str) -> list[str]:
    marked = any(row.best for row in table.rows)
    notes = [*(f"{mark} {note}" for note, mark in table.marks.items()), *([best] if marked else []), *table.notes]
    return list(map(_printable, notes))


def _printable(text: str) -> str:
    """Text with line breaks and other control characters, which would break a table, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
