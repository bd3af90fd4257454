"""Records of runs as lines of JSON: written with a digest of their content, checked when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from selftpt.evaluation.protocols import PROTOCOLS
from selftpt.files import parse_json

Record = dict[str, Any]

FORMAT = 2  # records without a format have no digest
RENAMED = {"meaningless": "random_init", "pictures": "images"}  # keys of records written by earlier versions

# What a value must be. "?" after a name in FIELDS: the value may be null or missing.
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a string", lambda value: isinstance(value, str)),
    "name": ("a string that is not empty", lambda value: isinstance(value, str) and value != ""),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "count": ("an integer of 0 or more", lambda value: type(value) is int and value >= 0),
    "positive": ("an integer of 1 or more", lambda value: type(value) is int and value >= 1),
    "share": ("a number above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1),
    "percent": ("a number from 0 to 100", lambda value: type(value) in (int, float) and 0 <= value <= 100),
    "seconds": ("a number of 0 or more", lambda value: type(value) in (int, float) and value >= 0),
}
RESULT_FIELDS = {"top1": "percent?", "top5": "percent?", "ece": "percent?", "images": "count?", "classes": "positive?"}
FIELDS: dict[str, str] = {
    "format": "positive?",
    "key": "name?",
    "protocol": "name",
    "method": "name",
    "dataset": "name",
    "seed": "count?",
    "model": "object",
    "model.name": "name",
    "model.digest": "name",
    "model.pretrained": "text?",
    "precision": "text?",
    "device": "text?",
    "random_init": "flag?",
    "template": "text?",
    "source": "object?",
    "source.dataset": "name",
    "source.split": "text?",
    "source.list": "text?",
    "source.published": "flag?",
    "source.shots": "positive?",
    "source.share": "share?",
    "source.classes": "positive?",
    "source.images": "count?",
    "source.unreadable": "count?",
    "prompt": "object?",
    "prompt.source": "name",
    "prompt.digest": "name",
    "data": "object",
    "data.split": "text?",
    "data.published": "flag?",
    "data.limit": "positive?",
    "data.unreadable": "count?",
    "settings": "object",
    "changes": "object?",
    "results": "object",
    "seconds": "object?",
    "versions": "object?",
}


def to_line(record: Mapping[str, Any]) -> str:
    """Convert a record to one line of JSON with the digest of its content.

    Raises:
        ValueError: If `from_line` would refuse the line.
    """
    content = json.loads(json.dumps({**record, "format": FORMAT}, allow_nan=False))
    line = json.dumps({**content, "digest": content_digest(content)})
    from_line(line.encode())
    return line


def from_line(line: bytes) -> Record:
    """Parse a line to a record with the present keys.

    A record without a digest, as earlier versions wrote it, is accepted if it has what tables and benchmarks use.

    Raises:
        ValueError: If the line is damaged, with the reason in a few words.
    """
    try:
        record = parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from error
    if not isinstance(record, dict):
        raise ValueError("not an object")
    _check_text(record)
    if ("format" in record or "digest" in record) and record.get("digest") != content_digest(record):
        raise ValueError("its content is not what its digest says")
    record = _with_new_keys(record)
    _check_fields(record)
    return record


def content_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record without its digest, as JSON with sorted keys and without spaces."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_text(value: Any) -> None:
    """Refuse strings that no file or terminal takes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{value[:20]!a} is not text") from None
    elif isinstance(value, dict | list):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_text(inner)


def _with_new_keys(record: Record) -> Record:
    """Rename the keys of a record that earlier versions called otherwise; settings are not changed."""

    def renamed(value: Any) -> Any:
        return {RENAMED.get(key, key): inner for key, inner in value.items()} if isinstance(value, dict) else value

    record = renamed(record)
    if isinstance(results := record.get("results"), dict):
        record["results"] = {part: renamed(value) for part, value in results.items()}
    if "source" in record:
        record["source"] = renamed(record["source"])
    return record


def _check_fields(record: Record) -> None:
    for path, kind in FIELDS.items():
        *parents, name = path.split(".")
        place: Any = record
        for parent in parents:
            place = place.get(parent)
        if place is not None:  # an object that may be missing
            _check_kind(place, name, path, kind)
    if record["protocol"] not in PROTOCOLS:
        raise ValueError(f"unknown protocol {record['protocol'][:40]!a}")
    results = record["results"]
    for part in results:
        path = f"results.{ascii(part[:40])[1:-1]}"
        if part == "harmonic":
            _check_kind(results, part, path, "percent")
            continue
        _check_kind(results, part, path, "object")
        for name, kind in RESULT_FIELDS.items():
            _check_kind(results[part], name, f"{path}.{name}", kind)
    if "harmonic" in results and not all(results.get(part, {}).get("top1") is not None for part in ("base", "new")):
        raise ValueError("results.harmonic without results.base.top1 and results.new.top1")
    for stage in record.get("seconds") or {}:
        _check_kind(record["seconds"], stage, f"seconds.{ascii(stage[:40])[1:-1]}", "seconds")


def _check_kind(place: Mapping[str, Any], name: str, path: str, kind: str) -> None:
    value = place.get(name)
    if value is None and kind.endswith("?"):
        return
    what, is_kind = KINDS[kind.rstrip("?")]
    if not is_kind(value):
        raise ValueError(f"{path} is not {what}" if name in place else f"no {path}")
