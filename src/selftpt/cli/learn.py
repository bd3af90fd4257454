"""`selftpt learn`: learn a prompt (stage 1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from selftpt.cli.options import OUTPUT, CacheOptions, Json, ModelOptions, with_settings
from selftpt.config import LearnConfig


@with_settings(options=ModelOptions, caching=CacheOptions, config=LearnConfig)
def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Labelled images: a folder with one folder of images per class, or a CSV file with paths and class "
            "names.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The prompt file to write.", rich_help_panel=OUTPUT)],
    options: ModelOptions,
    caching: CacheOptions,
    config: LearnConfig,
    as_json: Json = False,
) -> None:
    """Learn a prompt from labelled images (stage 1). The same command resumes an interrupted run."""
    from selftpt.data.sources import Source
    from selftpt.files import check_writable

    check_writable(out)
    images = Source.read(source)

    from selftpt.learning import learn

    prompt = learn(options.load(), images, config, out=out, cache=caching.cache())
    summary = {
        "prompt": str(out),
        "log": f"{out}.log.jsonl",
        "model": str(prompt.model),
        "classes": len(images.names),
        "images": prompt.origin["images"],
    }
    if prompt.model.random_init:
        summary["random_init"] = True
    if as_json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        learned_from = f"{summary['images']} images of {summary['classes']} classes, for {summary['model']}"
        print(f"learned {out} from {learned_from}; log: {summary['log']}")
