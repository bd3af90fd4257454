"""`selftpt inspect`: show the content of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from selftpt.cli.options import Json
from selftpt.files import CONTROL


def command(
    file: Annotated[Path, typer.Argument(help="A file that selftpt wrote, such as a prompt or a classifier.")],
    as_json: Json = False,
) -> None:
    """Show the content of a file that selftpt wrote, such as a prompt or a classifier, and verify its digests."""
    from selftpt.files import verify_file

    header = verify_file(file)
    verified = header["format"] > 1
    header["tensors"] = {name: entry["shape"] for name, entry in header["tensors"].items()}
    if as_json:
        _print(json.dumps({**header, "verified": verified}, ensure_ascii=False))
        return
    origin, model = (_object(header.get(key)) for key in ("origin", "model"))
    version = origin.get("selftpt") or header.get("selftpt")
    written = f", written by selftpt {version}" if version else ""
    _print(f"{file}: {header['kind']} file, format {header['format']}{written}")
    _print("digest: verified" if verified else "digest: none (format 1 has none); load and save the file to add one")
    if model:
        weights = f" ({model['pretrained']})" if model.get("pretrained") else ""
        _print(f"model: {model.get('name')}{weights}, digest {model.get('digest')}")
    if header.get("random_init"):
        _print("the model has randomly initialised weights: predictions are meaningless")
    if "method" in header:
        _print(f"method: {header['method']}")
    places = (("names", header), ("classes", origin), ("classes", header), ("classes", _object(header.get("data"))))
    names = next((place[key] for key, place in places if place.get(key)), None)
    if isinstance(names, list):
        _print(f"classes: {len(names)}: {', '.join(map(str, names[:10]))}{', ...' if len(names) > 10 else ''}")
    images = origin.get("images", header.get("images"))
    if isinstance(images, int):
        _print(f"learned from {images} images")
    for name, shape in header["tensors"].items():
        _print(f"{name}: {' x '.join(map(str, shape))}")
    for key, value in {
        **_flat(_object(header.get("contrast"))),
        **_flat(_object(origin.get("settings"))),
        **_flat(_object(header.get("config"))),
    }.items():
        _print(f"{key}: {'none' if value is None else value}")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: {"learn": {"lr": ...}} becomes {"learn.lr": ...}."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _object(value: Any) -> dict[str, Any]:
    """Return a value if it is a dict, else an empty dict: in an untrusted file it may be of any type."""
    return value if isinstance(value, dict) else {}


def _print(line: str) -> None:
    """Print a line with control characters escaped as in JSON, because the file may be untrusted."""
    print(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line))
