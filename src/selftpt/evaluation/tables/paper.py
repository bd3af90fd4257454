"""The paper's tables, which are in paper.json as printed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from selftpt.evaluation.protocols import PROTOCOLS, Protocol
from selftpt.evaluation.tables.table import Cell, Row
from selftpt.methods import METHODS

MODELS = {  # CLIP ViT-B/16 with OpenAI's weights, by its names in open_clip
    ("ViT-B-16", "openai"),
    ("ViT-B-16-quickgelu", "openai"),
    ("hf-hub:timm/vit_base_patch16_clip_224.openai", None),
}
SHOTS = 16


@functools.cache
def paper() -> dict[str, Any]:
    """Read paper.json."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text("utf-8"))
    return content


def paper_table(label: str) -> dict[str, Any]:
    """Return a table of the paper by its label."""
    table: dict[str, Any] = next(table for table in paper()["tables"] if table["label"] == label)
    return table


def dataset_statistic(column: str) -> dict[str, int]:
    """Return a number that the paper gives for each dataset: "classes", "train", "validation" or "test"."""
    table = paper_table("tab:dataset_stat")
    return {row["dataset"]: row["values"][table["columns"].index(column)] for row in table["rows"]}


def paper_rows(protocol: Protocol) -> dict[str, Row]:
    """Return the paper's rows by method, with the standard deviations of its table of error bars."""
    table = paper_table(protocol.paper_table)
    std = {row["method"]: row["std"] for row in paper_table(protocol.paper_std_table)["rows"] if "std" in row}
    rows = {}
    for row in table["rows"]:
        cells = map(Cell, row["values"], std.get(row["method"], [None] * len(table["columns"])))
        rows[row["method"]] = Row(
            name=f"{row['printed']} (paper)",
            method=row["method"],
            paper=True,
            cells=dict(zip(table["columns"], cells, strict=True)),
            notes=(row["note"],) if "note" in row else (),
        )
    return rows


@functools.cache
def method_order() -> tuple[str, ...]:
    """Return the order of rows: `METHODS`, with each method that only the paper has after its predecessor there."""
    order = list(METHODS)
    for protocol in PROTOCOLS.values():
        place = 0
        for row in paper_table(protocol.paper_table)["rows"]:
            if row["method"] not in order:
                order.insert(place, row["method"])
            place = order.index(row["method"]) + 1
    return tuple(order)
