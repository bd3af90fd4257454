"""`selftpt inspect`: what is in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from selftpt.cli.options import Json


def command(
    file: Annotated[Path, typer.Argument(help="a prompt or classifier file")],
    as_json: Json = False,
) -> None:
    """Show what is in a prompt or classifier file."""
    from selftpt.files import read_file

    header, tensors = read_file(file)
    header["tensors"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if as_json:
        print(json.dumps(header, ensure_ascii=False))
        return
    origin, model = header.get("origin", {}), header.get("model")
    print(f"{file}: a {header['kind']} (format {header['format']}, selftpt {origin.get('selftpt', 'unknown')})")
    if model:
        weights = f" ({model['pretrained']})" if model["pretrained"] else ""
        print(f"model: {model['name']}{weights}, digest {model['digest']}")
    if header.get("meaningless"):
        print("made with random weights: meaningless")
    if names := header.get("names") or origin.get("classes"):
        print(f"classes: {len(names)}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}")
    if "pictures" in origin:
        print(f"learned from {origin['pictures']} pictures")
    for name, shape in header["tensors"].items():
        print(f"{name}: {' x '.join(map(str, shape))}")
    for key, value in {**header.get("contrast", {}), **origin.get("settings", {})}.items():
        if not isinstance(value, dict):
            print(f"{key}: {'none' if value is None else value}")
