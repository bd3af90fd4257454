"""`selftpt learn`: stage 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from selftpt.cli.options import Json, ModelOptions, with_settings
from selftpt.config import LearnConfig


@with_settings(options=ModelOptions, config=LearnConfig)
def command(
    source: Annotated[Path, typer.Argument(help="a folder with a folder of pictures for each class")],
    out: Annotated[Path, typer.Option(help="where the prompt is written")],
    options: ModelOptions,
    config: LearnConfig,
    as_json: Json = False,
) -> None:
    """Learn a prompt from labelled pictures (stage 1). Killed and started again, it goes on where it was."""
    from selftpt.data.sources import read_folder
    from selftpt.files import check_writable
    from selftpt.learning import learn

    check_writable(out)
    folder = read_folder(source)
    prompt = learn(options.load(), folder, config, out=out)
    facts = {
        "prompt": str(out),
        "log": f"{out}.log.jsonl",
        "model": str(prompt.model),
        "classes": len(folder.names),
        "pictures": prompt.origin["pictures"],
    }
    if prompt.model.meaningless:
        facts["meaningless"] = True
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        what = f"{facts['pictures']} pictures of {facts['classes']} classes, for {facts['model']}"
        print(f"learned {out} from {what}; log: {facts['log']}")
