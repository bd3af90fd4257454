"""Notes on rows: how their runs differ from the paper's, and what their averages are over."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from selftpt.evaluation.protocols import PROTOCOLS
from selftpt.evaluation.records import Record
from selftpt.evaluation.tables.aggregate import flat_settings, image_count, model_title, varied_keys
from selftpt.evaluation.tables.paper import MODELS, SHOTS, dataset_statistic
from selftpt.evaluation.tables.table import Row, column_title, in_paper_order

RANDOM_INIT = "the weights were randomly initialised: the numbers have no meaning"
MARKS = "†‡§¶"


def paper_notes(records: Sequence[Record]) -> list[str]:
    """List how the runs of a row differ from the paper's."""
    if any(record.get("random_init") for record in records):
        return [RANDOM_INIT]
    notes, model = [], records[0]["model"]
    if (model["name"], model.get("pretrained")) not in MODELS:
        notes.append(f"the model is {model_title(model)}, not the paper's CLIP ViT-B/16 with OpenAI's weights")
    if prompts := {record["prompt"]["source"] for record in records if record.get("prompt")}:
        notes.append(f"the prompt was given ({', '.join(sorted(prompts))}), not learned in the run")
    every = {record["dataset"] for record in records}
    for what, is_paper in (
        ("the split is not the published one", _has_paper_split),
        (f"learned from images that are not the published {SHOTS} shots", _has_paper_shots),
        ("the template is not the protocol's", _has_protocol_template),
    ):
        if datasets := {record["dataset"] for record in records if not is_paper(record)}:
            notes.append(what if datasets == every else f"{what}: {_titles(datasets)}")
    if counts := list(dict.fromkeys(filter(None, map(_count_note, records)))):
        notes.append(f"not the paper's number of images: {', '.join(counts)}")
    if changed := {
        f"{key} {json.dumps(new)}" for record in records for key, new in (record.get("changes") or {}).items()
    }:
        notes.append(f"other settings than the method's own: {', '.join(sorted(changed))}")
    if mixed := varied_keys(("", flat_settings(record["settings"])) for record in records):
        notes.append(f"settings differ between datasets: {', '.join(mixed)}")
    return notes


def source_notes(row: Row, protocol_source: str | None, sources: Collection[str], excluded: str | None) -> list[str]:
    """Note what a row learned from, unless it is the paper's source and that of all rows.

    Args:
        row: The row.
        protocol_source: The paper's source; None if it is a part of each dataset.
        sources: The sources of all rows.
        excluded: The dataset that is not in the row's average; None if all are.
    """
    notes = []
    if row.source and row.source != protocol_source and protocol_source:
        notes.append(f"learned from {column_title(row.source)}, not from the paper's {column_title(protocol_source)}")
    elif row.source and (len(sources) > 1 or not protocol_source):
        notes.append(f"learned from {column_title(row.source)}")
    if excluded and excluded in row.cells and len(sources) > 1:
        notes.append(f"{column_title(excluded)} is not in the average")
    return ["; ".join(notes)] if notes else []


def average_notes(row: Row, columns: Sequence[str]) -> list[str]:
    """Note if a row lacks some of the columns that its average would be over."""
    return [] if row.complete else [f"average over {len(row.averaged)} of {len(columns)} datasets"]


def source_footer(columns: Collection[str], protocol_source: str | None, sources: Collection[str]) -> list[str]:
    """Note the only source of a table if it is one of the columns; several sources are noted on their rows."""
    if len(sources) == 1 and (source := next(iter(sources))) in columns:
        return [f"{column_title(source)} is the source and not in the average"]
    if not sources and protocol_source and protocol_source in columns:
        return [f"{column_title(protocol_source)}, the source of the protocol, is not in the average"]
    return []


def marks_of(rows: Sequence[Row]) -> dict[str, str]:
    """Assign a mark to each note of the rows."""
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    return {note: MARKS[i % len(MARKS)] * (i // len(MARKS) + 1) for i, note in enumerate(notes)}


def _titles(datasets: Collection[str]) -> str:
    return ", ".join(map(column_title, in_paper_order(datasets)))


def _has_paper_split(record: Record) -> bool:
    return bool(record["data"].get("published"))


def _has_paper_shots(record: Record) -> bool:
    """Return whether a run learned from all images of a published few-shot list, or from none."""
    source = record.get("source")
    if source is None:
        return True
    classes = dataset_statistic("classes").get(source["dataset"])
    if classes and PROTOCOLS[record["protocol"]].source is None:
        classes = (classes + 1) // 2
    complete = source.get("share", 1) == 1 and classes in (None, source.get("classes")) and not source.get("unreadable")
    return complete and source.get("shots") == SHOTS and bool(source.get("published"))


def _has_protocol_template(record: Record) -> bool:
    expected = PROTOCOLS[record["protocol"]].template(record["dataset"])
    return None in (expected, record.get("template")) or record["template"] == expected


def _count_note(record: Record) -> str | None:
    """Note the number of test images if it is not the paper's, which counts base and new classes together."""
    data, dataset = record["data"], record["dataset"]
    images, in_paper = image_count(record), dataset_statistic("test").get(dataset)
    if not data.get("unreadable") and (images == in_paper or (in_paper is None and data.get("limit") is None)):
        return None
    of = "" if in_paper is None else f" of {in_paper}"
    unreadable = f" ({data['unreadable']} unreadable)" if data.get("unreadable") else ""
    return f"{column_title(dataset)} {images}{of}{unreadable}"
