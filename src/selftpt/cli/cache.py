"""`selftpt cache`: what is kept on disk."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from selftpt.cli.options import Json
from selftpt.errors import SelfTPTError


def command(
    part: Annotated[str, typer.Argument(help="only lines with this in them: a model, or '63 random crops'")] = "",
    prune: Annotated[bool, typer.Option("--prune", help="delete it; what is needed again is computed again")] = False,
    as_json: Json = False,
) -> None:
    """Show the image features that are kept, and how much of the disk they take."""
    from selftpt.data.features import shelves
    from selftpt.files import cache_folder

    found = [shelf for shelf in shelves() if part.lower() in f"{shelf.model}: {shelf.look}".lower()]
    if part and not found:
        raise SelfTPTError(f"{cache_folder()} has no features of a model or look with {part!r} in its name")
    total = sum(shelf.bytes for shelf in found) / 1e6
    if as_json:
        print(json.dumps([{**dataclasses.asdict(shelf), "folder": str(shelf.folder)} for shelf in found]))
    else:
        for shelf in found:
            print(f"{shelf.bytes / 1e6:9.1f} MB  {shelf.pictures:7} pictures  {shelf.model}: {shelf.look}")
        print(f"{total:9.1f} MB  in {cache_folder() / 'features'}")
    if prune:
        for shelf in found:
            shelf.remove()
        if not as_json:
            print(f"deleted {total:.1f} MB")
