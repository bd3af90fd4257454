"""`selftpt learn`: stage 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from selftpt.cli.options import CacheOptions, Json, ModelOptions, with_settings
from selftpt.config import LearnConfig


@with_settings(options=ModelOptions, caching=CacheOptions, config=LearnConfig)
def command(
    source: Annotated[
        Path,
        typer.Argument(help="a folder with one folder of images per class, or a CSV file of paths and class names"),
    ],
    out: Annotated[Path, typer.Option(help="where the prompt is written")],
    options: ModelOptions,
    caching: CacheOptions,
    config: LearnConfig,
    as_json: Json = False,
) -> None:
    """Learn a prompt from labelled images (stage 1). An interrupted run resumes when it is started again."""
    from selftpt.data.sources import Source
    from selftpt.files import check_writable
    from selftpt.learning import learn

    check_writable(out)
    images = Source.read(source)
    prompt = learn(options.load(), images, config, out=out, cache=caching.cache())
    facts = {
        "prompt": str(out),
        "log": f"{out}.log.jsonl",
        "model": str(prompt.model),
        "classes": len(images.names),
        "images": prompt.origin["images"],
    }
    if prompt.model.random_init:
        facts["random_init"] = True
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        what = f"{facts['images']} images of {facts['classes']} classes, for {facts['model']}"
        print(f"learned {out} from {what}; log: {facts['log']}")
