"""`selftpt inspect`: show the content of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from selftpt.cli.options import Json
from selftpt.files import CONTROL


def command(
    file: Annotated[Path, typer.Argument(help="A prompt, a classifier or a fitted method.")],
    as_json: Json = False,
) -> None:
    """Show what is in a file that selftpt wrote: a prompt, a classifier or a fitted method."""
    from selftpt.files import verify_file

    header = verify_file(file)
    verified = header["format"] > 1
    header["tensors"] = {name: entry["shape"] for name, entry in header["tensors"].items()}
    if as_json:
        _print(json.dumps({**header, "verified": verified}, ensure_ascii=False))
        return
    origin, model = (_object(header.get(key)) for key in ("origin", "model"))
    version = origin.get("selftpt") or header.get("selftpt", "unknown")
    _print(f"{file}: a {header['kind']} (format {header['format']}, selftpt {version})")
    _print(
        "digest: verified" if verified else "digest: none, as in every file of format 1; save the file again to add one"
    )
    if model:
        weights = f" ({model['pretrained']})" if model.get("pretrained") else ""
        _print(f"model: {model.get('name')}{weights}, digest {model.get('digest')}")
    if header.get("random_init"):
        _print("made with randomly initialised weights: its predictions are meaningless")
    if "method" in header:
        _print(f"method: {header['method']}")
    names = header.get("names") or origin.get("classes") or _object(header.get("data")).get("classes")
    if isinstance(names, list):
        _print(f"classes: {len(names)}: {', '.join(map(str, names[:10]))}{', ...' if len(names) > 10 else ''}")
    if "images" in origin:
        _print(f"learned from {origin['images']} images")
    for name, shape in header["tensors"].items():
        _print(f"{name}: {' x '.join(map(str, shape))}")
    settings = {key: _object(part) for key, part in _object(header.get("config")).items() if isinstance(part, dict)}
    flat = {f"{key}.{name}": value for key, part in settings.items() for name, value in part.items()}
    shown = {
        **_object(header.get("contrast")),
        **_object(origin.get("settings")),
        **_object(header.get("config")),
        **flat,
    }
    for key, value in shown.items():
        if not isinstance(value, dict):
            _print(f"{key}: {'none' if value is None else value}")


def _object(value: Any) -> dict[str, Any]:
    """Return a part of a header if it is a JSON object, else an empty object: a file may be from somebody else."""
    return value if isinstance(value, dict) else {}


def _print(line: str) -> None:
    """Print a line with control characters escaped as in JSON, because a file may be from somebody else."""
    print(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line))
