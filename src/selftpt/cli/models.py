"""`selftpt models`: list the models that --model takes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from selftpt.cli.options import Json, complete_model
from selftpt.errors import SelfTPTError


def command(
    part: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="List only models whose name contains this text.",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """List the models that --model takes, each with the weights that --pretrained takes."""
    from selftpt.models import EMBEDDED, list_models

    found = {name: tags for name, tags in list_models().items() if part.lower() in name.lower()}
    if not found:
        raise SelfTPTError(f"no model has {part!r} in its name: `selftpt models` lists all models")
    if as_json:
        print(json.dumps(found))
        return
    width = max(map(len, found))
    for name, tags in found.items():
        remark = "embedded, the default" if name == EMBEDDED else "no published weights: give a checkpoint file"
        print(f"{name:{width}}  {', '.join(tags) or f'({remark})'}")
