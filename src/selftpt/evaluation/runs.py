"""Runs: one JSON record a line, added safely, in RUNS/records.jsonl."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.evaluation.protocols import PROTOCOLS
from selftpt.files import append_line

Record = dict[str, Any]


class Runs:
    """The records of a folder, oldest first. A last line that was cut short is left out, with a warning."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "records.jsonl"
        self.records: list[Record] = []
        try:
            lines = self.file.read_bytes().splitlines(keepends=True) if folder.is_dir() and self.file.exists() else []
        except OSError as error:
            raise SelfTPTError(f"no runs can be read from {folder}: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("cut short")
                if line.strip():
                    self.records.append(_checked(json.loads(line, parse_constant=_refuse)))
            except ValueError as error:
                if line.endswith(b"\n"):
                    what = error.msg if isinstance(error, json.JSONDecodeError) else error
                    text = f"{self.file}, line {number} is damaged ({what}): mend or delete the line"
                    raise SelfTPTError(text) from error
                text = f"left out line {number} of {self.file}, the last: it was cut short"
                warnings.warn(text, SelfTPTWarning, stacklevel=2)

    def done(self) -> set[str]:
        """The keys of what was run."""
        return {record["key"] for record in self.records if "key" in record}

    def add(self, record: Mapping[str, Any]) -> Record:
        """Add a record: the line is there as a whole before this returns, or not at all. The record as it is read."""
        line = json.dumps(record)
        append_line(self.file, line)
        self.records.append(json.loads(line))
        return self.records[-1]

    def last_seconds(self, facts: Mapping[str, Any]) -> float | None:
        """How long the latest run took that differs from `facts`, which a record would have, by its seed at most."""
        wanted = _without_seed(facts)
        for record in reversed(self.records):
            if "seconds" in record and _without_seed(record) == wanted:
                return float(sum(record["seconds"].values()))
        return None


def _without_seed(record: Mapping[str, Any]) -> str:
    """What decides how long a run takes, as JSON: in memory it has tuples where a file has lists."""
    source, data = record.get("source") or {}, record.get("data") or {}
    facts = {key: record.get(key) for key in ("protocol", "method", "dataset", "model", "precision", "device")}
    facts["settings"] = _seedless(record.get("settings"))
    facts["source"] = [source.get(key) for key in ("dataset", "shots", "share", "classes")]
    return json.dumps({**facts, "limit": data.get("limit")}, sort_keys=True)


def _seedless(settings: Any) -> Any:
    if not isinstance(settings, Mapping):
        return settings
    return {key: _seedless(value) for key, value in settings.items() if key != "seed"}


def read_records(folder: Path) -> list[Record]:
    """The records of a folder, which has some."""
    if not folder.is_dir():
        is_not = "is not a folder" if folder.exists() else "does not exist"
        raise SelfTPTError(f"{folder} {is_not}: give the folder in which runs were recorded")
    runs = Runs(folder)
    if not runs.records:
        why = "no run has ended yet" if runs.file.exists() else "`selftpt bench` makes them"
        raise SelfTPTError(f"{runs.file} has no record: {why}")
    return runs.records


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _checked(record: Any) -> Record:
    """A record that has what tables need."""
    if not isinstance(record, dict):
        raise ValueError("not an object")
    for kind, keys in ((str, "protocol method dataset"), (dict, "model data settings results")):
        for key in keys.split():
            if not isinstance(record.get(key), kind):
                raise ValueError(f"no {key}")
    if record["protocol"] not in PROTOCOLS:
        raise ValueError(f"unknown protocol {record['protocol']!r}")
    if not all(isinstance(record["model"].get(key), str) for key in ("name", "digest")):
        raise ValueError("no name or digest of the model")
    return record
