"""`selftpt push`: share a prompt or a classifier through the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from selftpt.cli.options import HUB, Json
from selftpt.errors import SelfTPTError


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The prompt or classifier file to upload.")],
    repo: Annotated[
        str, typer.Argument(metavar="USER/REPO", help="The repository on the hub. It is created if it does not exist.")
    ],
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public",
            help="Visibility of a new repository. By default public, unless the organisation's default is private.",
            rich_help_panel=HUB,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="BRANCH", help="The branch to upload to. By default the main branch.", rich_help_panel=HUB
        ),
    ] = None,
    message: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="The commit message. By default it names what is uploaded.", rich_help_panel=HUB
        ),
    ] = None,
    accuracy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PERCENT",
            help="Top-1 accuracy on a test set, for the model card: 'my test set=81.2'. Repeat the option for more "
            "test sets.",
            rich_help_panel=HUB,
        ),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The license for the model card, such as apache-2.0.", rich_help_panel=HUB),
    ] = None,
    as_json: Json = False,
) -> None:
    """Upload a prompt or a classifier to the Hugging Face hub, with a model card. Log in first: `hf auth login`."""
    from selftpt.classifier import Classifier
    from selftpt.files import verify_file
    from selftpt.prompt import Prompt

    results = dict(map(_parse_accuracy, accuracy or [])) or None
    kind = verify_file(file)["kind"]
    if kind not in ("prompt", "classifier"):
        raise SelfTPTError(f"{file} contains a {kind}: only prompts and classifiers can be uploaded")
    loaded = Prompt.load(file) if kind == "prompt" else Classifier.load(file)
    url = loaded.push_to_hub(
        repo, private=private, revision=revision, commit_message=message, accuracy=results, license=license
    )
    if as_json:
        print(json.dumps({"repository": repo, "kind": kind, "commit": url}))
    else:
        print(f"uploaded the {kind} to {repo}: {url}")


def _parse_accuracy(text: str) -> tuple[str, float]:
    """Parse the name and the percentage in `my test set=81.2`."""
    name, _, value = text.rpartition("=")
    try:
        if not name.strip():
            raise ValueError
        return name.strip(), float(value)
    except ValueError:
        raise SelfTPTError(
            f"--accuracy takes the name of a test set and a percentage, such as 'my test set=81.2', not {text!r}"
        ) from None
