"""`selftpt datasets`: what can be measured on, and what of it is here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selftpt.cli.options import Json
from selftpt.errors import SelfTPTError

if TYPE_CHECKING:
    from selftpt.data.datasets import Spec


def command(
    data: Annotated[Path | None, typer.Option(help="the folder that the datasets lie in")] = None,
    as_json: Json = False,
) -> None:
    """List the datasets of the paper: their published size, what is here, and where to get the rest."""
    from rich.console import Console
    from rich.table import Table

    from selftpt.data.datasets import COOP, DATASETS
    from selftpt.progress import Bar

    if data is not None and not data.is_dir():
        raise SelfTPTError(f"there is no data folder {data}")
    told = []
    with Bar("reading", len(DATASETS)) as bar:
        for name, spec in DATASETS.items():
            told.append(_tell(name, spec, data))
            bar.step()
    if as_json:
        print(json.dumps(told))
        return
    table = Table("name", "title", box=None, pad_edge=False)
    for part in ("classes", "train", "val", "test"):
        table.add_column(part, justify="right")
    if data is not None:
        table.add_column("here")
    notes = {"here": Table.grid(), "broken": Table.grid(), "missing": Table.grid()}
    for one in told:
        found = one["found"]
        here = [f"{found['train'] or '-'}/{found['test']}" if found else one["state"]] if data is not None else []
        sizes = ["-" if size is None else str(size) for size in one["published"].values()]
        table.add_row(one["name"], one["title"], *sizes, *here)
        if found:
            as_published = "as published" if found["published"] else f"{found['classes']} classes, not as published"
            note = f"{found['split']}; {as_published}"
        else:
            note = one["problem"] or f"{one['page']} in {one['folder']}"
        notes[one["state"] or "missing"].add_row(f"{one['name']:17}", note)
    console = Console(highlight=False, markup=False)
    what = "Published classes and images" + (":" if data is None else ", and what is here to train/test:")
    console.print(what, table, sep="\n")
    heads = {
        "here": "Here. Figures can be compared with published ones only where split and size are as published:",
        "broken": "Broken:",
        "missing": f"To get. Put the images in these folders below {data or '--data DIR'}; "
        f"split files and class names: {COOP}",
    }
    for state, head in heads.items():
        if notes[state].row_count:
            console.print(f"\n{head}", notes[state], sep="\n")


def _tell(name: str, spec: Spec, data: Path | None) -> dict[str, Any]:
    """What is known of a dataset and what is found of it: it is here, broken or missing, or None: not looked for."""
    from selftpt.data.datasets import read_dataset

    folder = Path(spec.folder, spec.image_folder)
    told: dict[str, Any] = {"name": name, "title": spec.title, "published": spec.size._asdict()}
    told |= {"page": spec.page, "folder": folder.as_posix(), "state": None, "found": None, "problem": None}
    if data is None:
        return told
    try:
        if not (data / folder).is_dir():
            return {**told, "state": "missing"}
        dataset = read_dataset(name, data)
    except (SelfTPTError, OSError) as error:
        return {**told, "state": "broken", "problem": str(error)}
    found = {
        "classes": len(dataset.test.names),
        "train": len(dataset.train.paths) if dataset.train else None,
        "test": len(dataset.test.paths),
        "split": dataset.split,
        "published": dataset.published,
    }
    return {**told, "state": "here", "found": found}
