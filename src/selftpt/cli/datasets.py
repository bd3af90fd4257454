"""`selftpt datasets`: list the datasets of the paper, and which of them are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selftpt.cli.options import DATA, Json
from selftpt.errors import SelfTPTError

if TYPE_CHECKING:
    from selftpt.data.datasets import Spec


def command(
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder with the datasets.", rich_help_panel=DATA)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the datasets of the paper: their published sizes, which are found, and where to get the others."""
    from rich.console import Console
    from rich.table import Table

    from selftpt.data.datasets import COOP, DATASETS
    from selftpt.progress import Bar

    if data is not None and not data.is_dir():
        raise SelfTPTError(f"the data folder {data} does not exist: create it, or give another --data FOLDER")
    rows = []
    with Bar("reading", len(DATASETS)) as bar:
        for name, spec in DATASETS.items():
            rows.append(_describe(name, spec, data))
            bar.step()
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("name", "title", box=None, pad_edge=False)
    for part in ("classes", "train", "val", "test"):
        table.add_column(part, justify="right")
    if data is not None:
        table.add_column("found")
    notes = {"here": Table.grid(), "broken": Table.grid(), "missing": Table.grid()}
    for row in rows:
        found = row["found"]
        sizes_found = [f"{found['train'] or '-'}/{found['test']}" if found else row["state"]]
        sizes = ["-" if size is None else str(size) for size in row["published"].values()]
        table.add_row(row["name"], row["title"], *sizes, *(sizes_found if data is not None else []))
        if found:
            as_published = "as published" if found["published"] else f"{found['classes']} classes, not as published"
            note = f"{found['split']}; {as_published}"
        else:
            note = row["problem"] or f"{row['page']} in {row['folder']}"
        notes[row["state"] or "missing"].add_row(f"{row['name']:17}", note)
    console = Console(highlight=False, markup=False)
    title = "Published numbers of classes and images" + (":" if data is None else ", and images found (train/test):")
    console.print(title, table, sep="\n")
    heads = {
        "here": "Found. Results are comparable with published results only if split and size are as published:",
        "broken": "Broken:",
        "missing": f"Missing. Put the images in these folders below {data or '--data FOLDER'}; "
        f"split files and class names: {COOP}",
    }
    for state, head in heads.items():
        if notes[state].row_count:
            console.print(f"\n{head}", notes[state], sep="\n")


def _describe(name: str, spec: Spec, data: Path | None) -> dict[str, Any]:
    """Describe a dataset as published and as found in `data`. The state is None if `data` is None."""
    from selftpt.data.datasets import read_dataset

    folder = Path(spec.folder, spec.image_folder)
    row: dict[str, Any] = {"name": name, "title": spec.title, "published": spec.size._asdict()}
    row |= {"page": spec.page, "folder": folder.as_posix(), "state": None, "found": None, "problem": None}
    if data is None:
        return row
    try:
        if not (data / folder).is_dir():
            return {**row, "state": "missing"}
        dataset = read_dataset(name, data)
    except (SelfTPTError, OSError) as error:
        return {**row, "state": "broken", "problem": str(error)}
    found = {
        "classes": len(dataset.test.names),
        "train": len(dataset.train.paths) if dataset.train else None,
        "test": len(dataset.test.paths),
        "split": dataset.split,
        "published": dataset.published,
    }
    return {**row, "state": "here", "found": found}
