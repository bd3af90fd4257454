"""`selftpt cache`: show and delete what is cached on disk."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from selftpt.cli.options import CACHE, Json
from selftpt.errors import SelfTPTError


def command(
    part: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="List only entries whose kind or description contains this text, such as classifiers or the name of a "
            "model.",
        ),
    ] = "",
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Delete the listed entries; they are computed again when they are needed. Generated images are "
            "deleted only if TEXT is generated.",
            rich_help_panel=CACHE,
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List what is cached (image features, adapted classifiers, learned parameters, generated images), with sizes."""
    from selftpt.data.cache import Cache, cache_entries

    cache = Cache()
    found = [entry for entry in cache_entries(cache) if part.lower() in f"{entry.kind} {entry.content}".lower()]
    if part and not found:
        raise SelfTPTError(f"no entry of the cache {cache.folder} matches {part!r}: `selftpt cache` lists all entries")
    total = sum(entry.bytes for entry in found) / 1e6
    if as_json:
        print(json.dumps([{**dataclasses.asdict(entry), "path": str(entry.path)} for entry in found]))
    else:
        for entry in found:
            unit = "images" if entry.kind == "features" else "files"
            print(f"{entry.bytes / 1e6:9.1f} MB  {entry.items:7} {unit:6}  {entry.kind:11}  {entry.content}")
        print(f"{total:9.1f} MB  in {cache.folder}")
    if prune:
        # Generated images may have taken hours to make.
        pruned = [entry for entry in found if entry.kind != "generated" or part.lower() == "generated"]
        for entry in pruned:
            entry.remove()
        if not as_json:
            print(f"deleted {sum(entry.bytes for entry in pruned) / 1e6:.1f} MB")
            if len(pruned) < len(found):
                print("kept the generated images: `selftpt cache generated --prune` deletes them")
