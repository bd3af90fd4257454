"""`selftpt adapt`: adapt a prompt to class names (stage 2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selftpt.cli.options import (
    OUTPUT,
    Json,
    ModelOptions,
    Names,
    NamesFile,
    PromptFile,
    note,
    read_classes,
    with_settings,
)
from selftpt.config import AdaptConfig

if TYPE_CHECKING:
    from selftpt.prompt import Prompt


@with_settings(options=ModelOptions, config=AdaptConfig)
def command(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The classifier file to write.", rich_help_panel=OUTPUT)],
    options: ModelOptions,
    config: AdaptConfig,
    prompt: PromptFile = None,
    names: Names = None,
    names_file: NamesFile = None,
    as_json: Json = False,
) -> None:
    """Adapt a prompt to a list of class names and write the classifier (stage 2). It needs no images."""
    classes = read_classes(names, names_file)
    from selftpt.adaptation import adapt
    from selftpt.files import check_writable

    check_writable(out)
    learned = options.prompt(prompt)
    note_unused_template(learned, config)
    classes.note_unused("adapt")
    classifier = adapt(options.load(learned.model, f"the prompt {prompt}"), learned, classes.names, config)
    classifier.save(out)
    if as_json:
        summary = {"classifier": str(out), "classes": len(classifier.names), "model": str(classifier.model_id)}
        print(json.dumps(summary | ({"random_init": True} if classifier.model_id.random_init else {})))
    else:
        print(f"adapted to {len(classifier.names)} classes: {out}")


def note_unused_template(prompt: Prompt, config: AdaptConfig) -> None:
    """Print a note if --template is given but has no effect, because the prompt has no hand-crafted view."""
    if config.template is not None and "hand_crafted" not in prompt.contrast.views:
        note("--template has no effect: the prompt was learned without the hand-crafted view")
