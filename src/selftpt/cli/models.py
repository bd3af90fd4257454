"""`selftpt models`: what can be named."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from selftpt.cli.options import Json
from selftpt.errors import SelfTPTError


def command(
    part: Annotated[str, typer.Argument(help="only names with this in them")] = "",
    as_json: Json = False,
) -> None:
    """List the models that --model takes, with the weights that --pretrained takes."""
    from selftpt.models import EMBEDDED, list_models

    found = {name: tags for name, tags in list_models().items() if part.lower() in name.lower()}
    if not found:
        raise SelfTPTError(f"no model has {part!r} in its name")
    if as_json:
        print(json.dumps(found))
        return
    width = max(map(len, found))
    for name, tags in found.items():
        comes = (
            "comes with selftpt: the default" if name == EMBEDDED else "no published weights: give a checkpoint file"
        )
        print(f"{name:{width}}  {', '.join(tags) or f'({comes})'}")
