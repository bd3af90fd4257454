"""Records of runs as lines of JSON: written with a digest of their content, checked when they are read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from selftpt.evaluation.protocols import PROTOCOLS

Record = dict[str, Any]

MAX_DEPTH = 32
MAX_INT = 2**63
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
    """A record as one line of JSON with the digest of its content.

    Raises:
        ValueError: If `from_line` would refuse the line.
    """
    content = json.loads(json.dumps(record, allow_nan=False))
    line = json.dumps({**content, "digest": content_digest(content)})
    from_line(line.encode())
    return line


def from_line(line: bytes) -> Record:
    """The record of a line, with the keys of today.

    A record without a digest, as earlier versions wrote it, is accepted if it has what tables and benchmarks use.

    Raises:
        ValueError: If the line is damaged, with the reason in a few words.
    """
    record = _parse(line)
    if not isinstance(record, dict):
        raise ValueError("not an object")
    _check_value(record, MAX_DEPTH)
    if "digest" in record and record["digest"] != content_digest(record):
        raise ValueError("its content is not what its digest says")
    record = _with_new_keys(record)
    _check_fields(record)
    return record


def content_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record without its digest, as JSON with sorted keys and without spaces."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _parse(line: bytes) -> Any:
    try:
        return json.loads(
            line.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
            parse_float=_parse_float,
            object_pairs_hook=_unique,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from error


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _parse_int(digits: str) -> int:
    if len(digits) > len(str(-MAX_INT)) or not -MAX_INT <= int(digits) < MAX_INT:
        raise ValueError(f"an integer of {len(digits)} characters is too large")
    return int(digits)


def _parse_float(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError("a number is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!a} is there twice")
    return unique


def _check_value(value: Any, depth: int) -> None:
    """Refuse what is nested too deep, and strings that no file or terminal takes."""
    if depth < 0:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{value[:20]!a} is not text") from None
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_value(key, depth)
            _check_value(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_value(inner, depth - 1)


def _with_new_keys(record: Record) -> Record:
    """The record with the keys that earlier versions called otherwise; settings stay as they were."""

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
