"""Tables of recorded runs beside the paper's: rows are methods, columns are datasets and their average."""

from __future__ import annotations

import csv
import functools
import io
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from selftpt.errors import SelfTPTError
from selftpt.evaluation.runs import Record

Paper = Literal["same", "all", "none"]
Format = Literal["text", "markdown", "csv", "latex"]

AVERAGE = "average"
DATASETS = {  # titles, in the paper's order
    "imagenet": "ImageNet",
    "caltech101": "Caltech",
    "oxford_pets": "Pets",
    "stanford_cars": "Cars",
    "oxford_flowers": "Flowers",
    "food101": "Food101",
    "fgvc_aircraft": "Aircraft",
    "sun397": "SUN397",
    "dtd": "DTD",
    "eurosat": "EuroSAT",
    "ucf101": "UCF101",
    "imagenetv2": "V2",
    "imagenet_sketch": "Sketch",
    "imagenet_a": "A",
    "imagenet_r": "R",
}
ORDER = (
    "clip clip-ensemble coop cocoop kgcoop proda lasp ship maple promptsrc rpo logoprompt visdesc waffleclip tpt "
    "coop+tpt maple+tpt promptsrc+tpt c-tpt difftpt coop+difftpt promptalign swapprompt tda mta zero four-prompts "
    "self-tpt self-tpt-v"
).split()

ACCURACY, FIVE, ECE = (
    "top-1 accuracy (%)",
    "top-5 accuracy (%)",
    "expected calibration error (%), the lower the better,",
)
ON_TEST: dict[str, tuple[str, tuple[str, ...]]] = {
    "test": (f"{ACCURACY} on the test pictures", ("test", "top1")),
    "top5": (f"{FIVE} on the test pictures", ("test", "top5")),
    "ece": (f"{ECE} on the test pictures", ("test", "ece")),
}
MEASURES: dict[
    str, dict[str, tuple[str, tuple[str, ...]]]
] = {  # what is shown, where it is in the results; first: usual
    "base-to-new": {
        "new": (f"{ACCURACY} on new classes", ("new", "top1")),
        "base": (f"{ACCURACY} on base classes", ("base", "top1")),
        "harmonic": (f"harmonic mean of {ACCURACY} on base and on new classes", ("harmonic",)),
        "top5": (f"{FIVE} on new classes", ("new", "top5")),
        "ece": (f"{ECE} on new classes", ("new", "ece")),
        "base-top5": (f"{FIVE} on base classes", ("base", "top5")),
        "base-ece": (f"{ECE} on base classes", ("base", "ece")),
    },
    "cross-dataset": ON_TEST,
    "domain": ON_TEST,
}

PRINTED = {  # the paper's tables of the usual measure: values, then deviations
    "base-to-new": ("tab:cmp_with_sota_b2n", "tab:b2n_error_bar"),
    "cross-dataset": ("tab:cmp_with_sota_cross_dataset", "tab:cross_dataset_error_bar"),
    "domain": ("tab:domain_gen", "tab:domain_gen"),
}
PAPERS_SHOTS = 16
PAPERS_MODELS = {
    ("ViT-B-16", "openai"),
    ("ViT-B-16-quickgelu", "openai"),
    ("hf-hub:timm/vit_base_patch16_clip_224.openai", None),
}
MEANINGLESS = "random weights: this row means nothing"
UNSET = "unset"
MARKS = "†‡§¶"
CSV_COLUMNS = ("protocol", "measure", "method", "of", "dataset", "mean", "deviation", "seeds", "notes")
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


@dataclass(frozen=True)
class Cell:
    """Mean and sample deviation over so many seeds; 0 seeds is a method that draws nothing, or the paper.

    pictures: that were looked at, in all; only cells of as many are compared.
    """

    mean: float
    deviation: float | None = None
    seeds: int = 0
    pictures: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Row:
    """A method, ours or the paper's: cells by column, what a reader must know of it, columns in which it is best."""

    name: str
    method: str
    paper: bool
    cells: Mapping[str, Cell]
    notes: tuple[str, ...] = ()
    best: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Table:
    """Columns are names of datasets, then the average; `marks` are those of the rows' notes; `notes` are of all."""

    protocol: str
    measure: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    marks: Mapping[str, str]
    notes: tuple[str, ...]


def make_table(
    records: Sequence[Record],
    protocol: str,
    measure: str | None = None,
    paper: Paper = "same",
    methods: Collection[str] = (),
) -> Table:
    """The table of one protocol; `paper` says of which methods its rows are shown; with `methods` only these are.

    Columns are the datasets that have runs. A row's average is over those it has, but for the source of the protocol.
    """
    if protocol not in MEASURES:
        raise SelfTPTError(f"no protocol is called {protocol!r}: choose of {', '.join(MEASURES)}")
    known = MEASURES[protocol]
    usual = next(iter(known))
    measure = measure or usual
    if measure not in known:
        raise SelfTPTError(f"{protocol} has no measure {measure!r}: choose of {', '.join(known)}")
    title, path = known[measure]
    names = {*ORDER, *(record["method"] for record in records)}
    if unknown := set(methods) - names:
        raise SelfTPTError(f"no method is called {min(unknown)!r}: choose of {', '.join(sorted(names))}")
    runs: dict[str, list[Record]] = {}
    for record in records:
        asked = record["protocol"] == protocol and (not methods or record["method"] in methods)
        if asked and _value(record, path) is not None:
            runs.setdefault(record["method"], []).append(record)
    if not runs:
        raise SelfTPTError(f"nothing to show: no run of {protocol} with the measure {measure!r} is recorded")
    printed = _printed(protocol) if measure == usual and paper != "none" else {}

    datasets = _ordered({record["dataset"] for its in runs.values() for record in its})
    source = None if protocol == "base-to-new" else "imagenet"
    averaged = [dataset for dataset in datasets if dataset != source]
    shown = methods or (printed if paper == "all" else runs)
    apart = [pair for method, its in runs.items() for pair in _apart(method, its).items()]
    rows = [_row(name, its, path, averaged) for name, its in apart]
    cut = [_cut(row, datasets, averaged) for method, row in printed.items() if method in shown]
    rows += [row for row in cut if row.cells]
    rows.sort(key=lambda row: ORDER.index(row.method) if row.method in ORDER else len(ORDER))
    rows = _with_best(rows, averaged, min if measure.endswith("ece") else max)

    told = dict.fromkeys(note for row in rows for note in row.notes)
    marks = {note: MARKS[i % len(MARKS)] * (i // len(MARKS) + 1) for i, note in enumerate(told)}
    notes = []
    if any(cell.deviation is not None for row in rows for cell in row.cells.values()):
        notes.append("±: sample standard deviation over seeds; ours have the same crops of a picture in all seeds")
    if source in datasets:
        notes.append("ImageNet is the source, and not in the average")
    if absent := [method for method in methods if method not in {row.method for row in rows}]:
        notes.append(f"no run of {', '.join(absent)}")
    if any(row.paper for row in rows):
        notes.append(f"(paper): {_paper()['title']}, {PRINTED[protocol][0]}; averages are over the columns shown")
    elif paper != "none" and measure != usual:
        notes.append("the paper does not print this measure")
    return Table(protocol, measure, f"{protocol}: {title}", (*datasets, AVERAGE), tuple(rows), marks, tuple(notes))


def _value(record: Record, path: Sequence[str]) -> float | None:
    """A result of a record; None if it has none such."""
    value: Any = record["results"]
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def _apart(method: str, records: Sequence[Record]) -> dict[str, list[Record]]:
    """The rows of one method by name: one for each model, and for each value of a setting that varies on a dataset.

    A setting with one value on each dataset, such as a template, makes no rows: no two runs are for the same cell.
    """
    models = {record["model"]["digest"]: _model(record["model"]) for record in records}
    rows: dict[str, list[Record]] = {}
    for digest, model in models.items():
        its = [(record, _facts(record)) for record in records if record["model"]["digest"] == digest]
        varied = _varied((record["dataset"], facts) for record, facts in its)
        alike = list(models.values()).count(model) > 1
        which = [f"{model} {digest[:8]}" if alike else model] if len(models) > 1 else []
        for record, facts in its:
            told = ", ".join([*which, *(f"{key} {facts.get(key, UNSET)}" for key in varied)])
            rows.setdefault(f"{method} ({told})" if told else method, []).append(record)
    return rows


def _varied(settings: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Names of settings that have two values in one place, of pairs of a place and its settings."""
    pairs = list(settings)
    values: dict[tuple[str, str], set[str]] = {}
    for key in sorted({key for _, flat in pairs for key in flat}):
        for place, flat in pairs:
            values.setdefault((key, place), set()).add(flat.get(key, UNSET))
    return list(dict.fromkeys(key for (key, _), found in values.items() if len(found) > 1))


def _model(model: Mapping[str, Any]) -> str:
    return f"{model['name']} {model['pretrained']}" if model.get("pretrained") else str(model["name"])


def _facts(record: Record) -> dict[str, str]:
    """What tells runs of one method and model on one dataset apart: settings, and the amount of data."""
    source = {key: value for key, value in (record.get("source") or {}).items() if key in ("shots", "share", "classes")}
    data = {"limit": record["data"].get("limit") or "none", "split": record["data"].get("split", "")}
    version = record.get("versions", {}).get("selftpt", "")
    how = {"precision": record.get("precision", ""), "selftpt": version}
    return _flat(record["settings"]) | _flat({"source": source, **data, **how})


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings by dotted name, without seeds: a record tells its own."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif key != "seed":
            flat[f"{prefix}{key}"] = " ".join(value.split()) if isinstance(value, str) else json.dumps(value)
    return flat


def _row(name: str, records: Sequence[Record], path: Sequence[str], averaged: Sequence[str]) -> Row:
    """A row of ours; of two records of one dataset and seed the later counts."""
    latest = {(record["dataset"], record.get("seed")): record for record in records}
    values: dict[str, dict[int | None, float]] = {}
    pictures: dict[str, int] = {}
    for (dataset, seed), record in latest.items():
        if (value := _value(record, path)) is not None:
            values.setdefault(dataset, {})[seed] = value
            pictures[dataset] = _looked_at(record)
    cells = {dataset: _cell(by_seed, pictures[dataset]) for dataset, by_seed in values.items()}
    present = [dataset for dataset in averaged if dataset in values]
    looked_at = sum(pictures[dataset] for dataset in present)
    if len({frozenset(values[dataset]) for dataset in present}) == 1:
        averages = {seed: _average([latest[dataset, seed] for dataset in present], path) for seed in values[present[0]]}
        cells[AVERAGE] = _cell(averages, looked_at)
    elif present:
        cells[AVERAGE] = Cell(statistics.fmean(cells[dataset].mean for dataset in present), pictures=looked_at)
    notes = (*_notes(list(latest.values())), *_fewer(cells, averaged))
    return Row(name, records[0]["method"], False, cells, notes)


def _average(records: Sequence[Record], path: Sequence[str]) -> float:
    """The mean over datasets; of harmonic means, that of the mean accuracies, as the field has it."""
    if path == ("harmonic",):
        base, new = (_average(records, (part, "top1")) for part in ("base", "new"))
        return 2 * base * new / (base + new) if base + new else 0.0
    return statistics.fmean(_value(record, path) or 0.0 for record in records)


def _cell(by_seed: Mapping[int | None, float], pictures: int) -> Cell:
    values = by_seed.values()
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Cell(statistics.fmean(values), deviation, sum(seed is not None for seed in by_seed), pictures)


def _fewer(cells: Collection[str], averaged: Sequence[str]) -> list[str]:
    has = sum(dataset in cells for dataset in averaged)
    return [f"average over {has} of {len(averaged)} datasets"] if has < len(averaged) else []


def _notes(records: Sequence[Record]) -> list[str]:
    """In what a row of ours is not like the paper's."""
    if any(record.get("meaningless") for record in records):
        return [MEANINGLESS]
    notes, model = [], records[0]["model"]
    if (model["name"], model.get("pretrained")) not in PAPERS_MODELS:
        notes.append(f"the model is {_model(model)}, not the paper's CLIP ViT-B/16 with OpenAI's weights")
    every = {record["dataset"] for record in records}
    split = {record["dataset"] for record in records if not record["data"].get("published")}
    learned = {record["dataset"] for record in records if not _papers_source(record)}
    for datasets, what in (
        (split, "the split is not the published one"),
        (learned, f"learned from pictures that are not the published {PAPERS_SHOTS} shots"),
    ):
        if datasets:
            notes.append(what if datasets == every else f"{what}: {', '.join(map(column_title, _ordered(datasets)))}")
    if counts := list(dict.fromkeys(filter(None, map(_count, records)))):
        notes.append(f"not the paper's number of pictures: {', '.join(counts)}")
    changed = {f"{key} {json.dumps(value)}" for record in records for key, value in record.get("changes", {}).items()}
    if changed:
        notes.append(f"other settings than the method's own: {', '.join(sorted(changed))}")
    if mixed := _varied(("", _flat(record["settings"])) for record in records):
        notes.append(f"settings differ between datasets: {', '.join(mixed)}")
    return notes


def _papers_source(record: Record) -> bool:
    """Whether a run learned from all of the pictures that the paper's did, or from none."""
    source = record.get("source")
    if source is None:
        return True
    classes = _statistic("classes").get(source.get("dataset"))
    if classes and record["protocol"] == "base-to-new":
        classes = (classes + 1) // 2
    whole = source.get("share", 1) == 1 and classes in (None, source.get("classes")) and not source.get("unreadable")
    return whole and source.get("shots") == PAPERS_SHOTS and bool(source.get("published"))


def _count(record: Record) -> str | None:
    """How many pictures were looked at, if that is not what the paper says; its test pictures are base and new ones."""
    data, dataset = record["data"], record["dataset"]
    looked_at = _looked_at(record)
    papers = _statistic("test").get(dataset)
    if not data.get("unreadable") and (looked_at == papers or (papers is None and data.get("limit") is None)):
        return None
    of = "" if papers is None else f" of {papers}"
    unreadable = f" ({data['unreadable']} unreadable)" if data.get("unreadable") else ""
    return f"{column_title(dataset)} {looked_at}{of}{unreadable}"


def _looked_at(record: Record) -> int:
    return sum(part.get("pictures", 0) for part in record["results"].values() if isinstance(part, dict))


def _ordered(datasets: Collection[str]) -> list[str]:
    return [*(name for name in DATASETS if name in datasets), *sorted(set(datasets) - DATASETS.keys())]


def column_title(column: str) -> str:
    """How a column is headed."""
    return {**DATASETS, AVERAGE: "Average"}.get(column, column)


@functools.cache
def _paper() -> dict[str, Any]:
    paper: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text("utf-8"))
    return paper


def _paper_table(label: str) -> dict[str, Any]:
    table: dict[str, Any] = next(table for table in _paper()["tables"] if table["label"] == label)
    return table


def _statistic(column: str) -> dict[str, int]:
    """What the paper says of each dataset."""
    table = _paper_table("tab:dataset_stat")
    return {row["dataset"]: row["values"][table["columns"].index(column)] for row in table["rows"]}


def _printed(protocol: str) -> dict[str, Row]:
    """The paper's rows by method, with the deviations that it prints in another table."""
    values, errors = map(_paper_table, PRINTED[protocol])
    deviations = {row["method"]: row["deviations"] for row in errors["rows"] if "deviations" in row}
    rows = {}
    for row in values["rows"]:
        known = deviations.get(row["method"], [None] * len(values["columns"]))
        cells = dict(zip(values["columns"], map(Cell, row["values"], known), strict=True))
        notes = (row["note"],) if "note" in row else ()
        rows[row["method"]] = Row(f"{row['printed']} (paper)", row["method"], True, cells, notes)
    return rows


def _cut(row: Row, datasets: Collection[str], averaged: Sequence[str]) -> Row:
    """A row of the paper in the columns shown: its own average if they are its own, else that of what is shown."""
    cells = {dataset: row.cells[dataset] for dataset in datasets if dataset in row.cells}
    present = [dataset for dataset in averaged if dataset in cells]
    if {*present, AVERAGE} == row.cells.keys():
        cells[AVERAGE] = row.cells[AVERAGE]
    elif present:
        cells[AVERAGE] = Cell(statistics.fmean(cells[dataset].mean for dataset in present))
    return replace(row, cells=cells, notes=(*row.notes, *_fewer(cells, averaged)))


def _with_best(rows: Sequence[Row], averaged: Sequence[str], pick: Callable[[Iterable[float]], float]) -> list[Row]:
    """Rows with the best of ours marked in each column that two or more can be compared in."""
    most: dict[str, int] = {}
    for row in rows:
        for column, cell in row.cells.items():
            most[column] = max(most.get(column, 0), cell.pictures)
    means: dict[str, list[float]] = {}
    for row in rows:
        for column, cell in row.cells.items():
            if _contends(row, column, averaged, most):
                means.setdefault(column, []).append(round(cell.mean, 2))
    best = {column: pick(values) for column, values in means.items() if len(values) > 1}

    def won(row: Row) -> frozenset[str]:
        contended = (column for column in row.cells if _contends(row, column, averaged, most))
        return frozenset(column for column in contended if round(row.cells[column].mean, 2) == best.get(column))

    return [replace(row, best=won(row)) for row in rows]


def _contends(row: Row, column: str, averaged: Sequence[str], most: Mapping[str, int]) -> bool:
    whole = column != AVERAGE or row.cells.keys() >= set(averaged)
    return whole and not row.paper and MEANINGLESS not in row.notes and row.cells[column].pictures == most[column]


def render(table: Table, format: Format = "text") -> str:
    """A table to be read, or as CSV with a line a cell."""
    return {"text": _text, "markdown": _markdown, "csv": _csv, "latex": _latex}[format](table)


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
    header, *body = (f"{' & '.join(line)} \\\\" for line in _lines(table, r"\textbf{{{}}} ", _escaped))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escaped(table.title)}}}",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}|r}}",
        r"\hline",
        header,
        r"\hline",
        *body,
        r"\hline",
        r"\end{tabular}",
        *(rf"\par\footnotesize {_escaped(note)}" for note in _legend(table, "bold: best of ours")),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _lines(table: Table, best: str, escaped: Callable[[str], str] = str) -> list[list[str]]:
    """What stands in the table, its header first; `best` is what the best mean is put in."""
    lines = [["method", "seeds", *map(escaped, map(column_title, table.columns))]]
    for row in table.rows:
        line = [escaped(" ".join([row.name, *(table.marks[note] for note in row.notes)])), _seeds(row)]
        for column in table.columns:
            if cell := row.cells.get(column):
                mean = (best if column in row.best else "{} ").format(f"{cell.mean:.2f}")
                line.append((mean + ("" if cell.deviation is None else escaped(f"±{cell.deviation:.2f}"))).rstrip())
            else:
                line.append("-")
        lines.append(line)
    return lines


def _csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in table.rows:
        for column in table.columns:
            if cell := row.cells.get(column):
                deviation = "" if cell.deviation is None else round(cell.deviation, 4)
                of = "paper" if row.paper else "ours"
                numbers = [round(cell.mean, 4), deviation, cell.seeds or ""]
                writer.writerow([table.protocol, table.measure, row.name, of, column, *numbers, "; ".join(row.notes)])
    return out.getvalue()


def _seeds(row: Row) -> str:
    """How many seeds the row's cells have: "3", or "1-3"; "-" for none."""
    counts = sorted({cell.seeds for column, cell in row.cells.items() if column != AVERAGE})
    return "-".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if any(counts) else "-"


def _legend(table: Table, best: str) -> list[str]:
    marked = any(row.best for row in table.rows)
    return [*(f"{mark} {note}" for note, mark in table.marks.items()), *([best] if marked else []), *table.notes]


def _escaped(text: str) -> str:
    return text.translate(LATEX)
