"""`selftpt adapt`: stage 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from selftpt.cli.options import Json, ModelOptions, Names, NamesFile, PromptFile, read_names, with_settings
from selftpt.config import AdaptConfig


@with_settings(options=ModelOptions, config=AdaptConfig)
def command(
    out: Annotated[Path, typer.Option(help="where the classifier is written")],
    options: ModelOptions,
    config: AdaptConfig,
    prompt: PromptFile = None,
    names: Names = None,
    names_file: NamesFile = None,
    as_json: Json = False,
) -> None:
    """Tune a prompt to a list of class names and make its classifier (stage 2)."""
    listed = read_names(names, names_file)
    from selftpt.adaptation import adapt
    from selftpt.files import check_writable

    check_writable(out)
    learned = options.prompt(prompt)
    classifier = adapt(options.load(learned.model, f"the prompt {prompt}"), learned, listed, config)
    classifier.save(out)
    if as_json:
        facts = {"classifier": str(out), "classes": len(classifier.names), "model": str(classifier.model_id)}
        print(json.dumps(facts | ({"random_init": True} if classifier.model_id.random_init else {})))
    else:
        print(f"adapted to {len(classifier.names)} classes: {out}")
