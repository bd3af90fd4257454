"""From records to rows: which runs share a row, means over seeds, averages over datasets, the best rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from selftpt.evaluation.metrics import harmonic_mean
from selftpt.evaluation.protocols import PROTOCOLS, Metric
from selftpt.evaluation.records import Record
from selftpt.evaluation.tables.table import AVERAGE, Cell, Row

UNSET = "unset"
SOURCE_FACTS = ("shots", "share", "classes")


def value(record: Record, path: Sequence[str]) -> float | None:
    """Return a number from the results of a record, or None if it has no such number."""
    found: Any = record["results"]
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, int | float) else None


def source_of(record: Record) -> str | None:
    """Return the dataset that a run learned from.

    None if it learned from nothing, or from the base classes of the dataset that it was tested on.
    """
    source: str | None = (record.get("source") or {}).get("dataset")
    own = PROTOCOLS[record["protocol"]].source is None and source == record["dataset"]
    return None if own else source


def image_count(record: Record) -> int:
    """Count the test images of a run."""
    return sum(part.get("images") or 0 for part in record["results"].values() if isinstance(part, dict))


def model_title(model: Mapping[str, Any]) -> str:
    """Return the name of a model and of its weights."""
    return f"{model['name']} {model['pretrained']}" if model.get("pretrained") else str(model["name"])


def split_rows(method: str, records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Group the records of one method into rows, each with its name.

    Runs with different models, sources or given prompts never share a row, nor do those with different values of a
    setting on one dataset. A setting with one value on each dataset does not split a row.
    """
    models = {record["model"]["digest"]: model_title(record["model"]) for record in records}
    prompts = {prompt["digest"]: prompt["source"] for record in records if (prompt := record.get("prompt"))}
    groups: dict[tuple[str, str | None, str | None], list[Record]] = {}
    for record in records:
        key = record["model"]["digest"], source_of(record), (record.get("prompt") or {}).get("digest")
        groups.setdefault(key, []).append(record)
    several_sources = len({source for _, source, prompt in groups if prompt is None}) > 1
    rows: dict[tuple[object, ...], tuple[str, list[Record]]] = {}
    for (digest, source, prompt), members in groups.items():
        varied = varied_keys((record["dataset"], _facts(record)) for record in members)
        labels = []
        if len(models) > 1:
            labels.append(_unique_title(models, digest))
        if prompt is not None:
            labels.append(f"prompt {_unique_title(prompts, prompt)}")
        elif several_sources:
            labels.append(f"source {source or 'none'}")
        for record in members:
            facts = _facts(record)
            values = [f"{key} {facts.get(key, UNSET)}" for key in varied]
            label = ", ".join([*labels, *values])
            row = rows.setdefault((digest, source, prompt, *values), (f"{method} ({label})" if label else method, []))
            row[1].append(record)
    return list(rows.values())


def _unique_title(titles: Mapping[str, str], digest: str) -> str:
    """Return the title of a digest, with the start of the digest if another one has the same title."""
    title = titles[digest]
    return f"{title} {digest[:8]}" if list(titles.values()).count(title) > 1 else title


def _facts(record: Record) -> dict[str, str]:
    """Collect what may differ between runs of one method, model and source on one dataset: settings, data, versions."""
    source, data = record.get("source") or {}, record["data"]
    facts = flat_settings(
        {
            "source": {key: source[key] for key in SOURCE_FACTS if key in source},
            "limit": data.get("limit") or "none",
            "split": data.get("split") or "",
            "template": record.get("template") or "",
            "precision": record.get("precision") or "",
            "selftpt": (record.get("versions") or {}).get("selftpt", ""),
        }
    )
    settings = flat_settings(record["settings"])
    return {f"settings.{key}" if key in facts else key: text for key, text in settings.items()} | facts


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings to text by dotted name, without seeds, which are another key of a record."""
    flat: dict[str, str] = {}
    for key, setting in settings.items():
        if isinstance(setting, dict):
            flat |= flat_settings(setting, f"{prefix}{key}.")
        elif key != "seed":
            flat[f"{prefix}{key}"] = " ".join(setting.split()) if isinstance(setting, str) else json.dumps(setting)
    return flat


def varied_keys(settings: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return the names of the settings that have several values on one dataset, from pairs of dataset and settings."""
    pairs = list(settings)
    values: dict[tuple[str, str], set[str]] = {}
    for key in sorted({key for _, flat in pairs for key in flat}):
        for dataset, flat in pairs:
            values.setdefault((key, dataset), set()).add(flat.get(key, UNSET))
    return list(dict.fromkeys(key for (key, _), found in values.items() if len(found) > 1))


def latest_records(records: Iterable[Record]) -> list[Record]:
    """Keep the latest record of each dataset and seed."""
    return list({(record["dataset"], record.get("seed")): record for record in records}.values())


def make_row(name: str, records: Sequence[Record], metric: Metric) -> Row:
    """Make a row without its average; `records` has one record per dataset and seed."""
    return Row(
        name=name,
        method=records[0]["method"],
        paper=False,
        cells={
            dataset: _cell({record.get("seed"): _number(record, metric.path) for record in runs}, image_count(runs[-1]))
            for dataset, runs in _by_dataset(records).items()
        },
        source=source_of(records[0]),
        random_init=any(record.get("random_init") for record in records),
    )


def with_average(row: Row, columns: Sequence[str], records: Sequence[Record], metric: Metric) -> Row:
    """Add to a row of our runs its average over those of `columns` for which it has a cell."""
    averaged = tuple(dataset for dataset in columns if dataset in row.cells)
    row = replace(row, averaged=averaged, complete=len(averaged) == len(columns))
    if not averaged:
        return row
    by_seed: dict[int | None, list[Record]] = {}
    for record in records:
        if record["dataset"] in averaged:
            by_seed.setdefault(record.get("seed"), []).append(record)
    images = sum(row.cells[dataset].images for dataset in averaged)
    if all(len(runs) == len(averaged) for runs in by_seed.values()):
        cell = _cell({seed: _mean(runs, metric.path) for seed, runs in by_seed.items()}, images)
    else:  # datasets have different seeds
        by_dataset = _by_dataset(records)
        cell = Cell(_mean_of([by_dataset[dataset] for dataset in averaged], metric.path), images=images)
    return replace(row, cells={**row.cells, AVERAGE: cell})


def cut_paper_row(row: Row, datasets: Sequence[str], columns: Sequence[str]) -> Row:
    """Restrict a row of the paper to the columns shown.

    The paper's average is kept if all its columns are shown. Otherwise it is the mean of the columns shown.

    Args:
        row: The row with all columns of the paper.
        datasets: The datasets shown.
        columns: Those of them that the average is over.
    """
    cells = {dataset: row.cells[dataset] for dataset in datasets if dataset in row.cells}
    averaged = tuple(dataset for dataset in columns if dataset in cells)
    if {*averaged, AVERAGE} == row.cells.keys():
        cells[AVERAGE] = row.cells[AVERAGE]
    elif averaged:
        cells[AVERAGE] = Cell(statistics.fmean(cells[dataset].mean for dataset in averaged))
    return replace(row, cells=cells, averaged=averaged, complete=len(averaged) == len(columns))


def mark_best(rows: Sequence[Row], metric: Metric) -> list[Row]:
    """Mark the best of our rows in each column where two or more can be compared.

    Cells are compared if they are over the same datasets and over the largest number of images. Rows of the paper, of
    randomly initialised weights, and averages that lack a column are not compared.
    """
    rivals: dict[tuple[str, frozenset[str]], list[Row]] = {}
    for row in rows:
        for column in row.cells:
            if not row.paper and not row.random_init and (row.complete or column != AVERAGE):
                over = frozenset(row.averaged if column == AVERAGE else (column,))
                rivals.setdefault((column, over), []).append(row)
    best: dict[int, set[str]] = {}
    for (column, _), group in rivals.items():
        most = max(row.cells[column].images for row in group)
        group = [row for row in group if row.cells[column].images == most]
        means = [round(row.cells[column].mean, 2) for row in group]
        top = min(means) if metric.lower_is_better else max(means)
        for row, mean in zip(group, means, strict=True):
            if len(group) > 1 and mean == top:
                best.setdefault(id(row), set()).add(column)
    return [replace(row, best=frozenset(best.get(id(row), ()))) for row in rows]


def _by_dataset(records: Sequence[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["dataset"], []).append(record)
    return groups


def _number(record: Record, path: Sequence[str]) -> float:
    found = value(record, path)
    assert found is not None
    return found


def _mean(records: Sequence[Record], path: Sequence[str]) -> float:
    """Return the mean over the records of one seed, one per dataset."""
    return _mean_of([[record] for record in records], path)


def _mean_of(groups: Sequence[Sequence[Record]], path: Sequence[str]) -> float:
    """Return the mean over datasets of the mean over the records of each.

    For `harmonic`, return the harmonic mean of the mean base and the mean new accuracy, as is usual in the field.
    """
    if path == ("harmonic",):
        return harmonic_mean(_mean_of(groups, ("base", "top1")), _mean_of(groups, ("new", "top1")))
    return statistics.fmean(statistics.fmean(_number(record, path) for record in records) for records in groups)


def _cell(by_seed: Mapping[int | None, float], images: int) -> Cell:
    values = by_seed.values()
    std = statistics.stdev(values) if len(values) > 1 else None
    return Cell(statistics.fmean(values), std, sum(seed is not None for seed in by_seed), images)
