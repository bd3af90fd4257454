"""A folder of runs: one record per line in RUNS/records.jsonl, each written once by whatever number of processes."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.evaluation.records import Record, from_line, to_line
from selftpt.files import append_line, digest
from selftpt.locks import lock

__all__ = ["Record", "Runs", "read_records"]


class Runs:
    """The records of a folder, oldest first.

    Several processes may work on one folder, on one machine or on several with a shared file system that has locks.

    Attributes:
        folder: The folder.
        file: Its file of records.
        records: The records as they were last read; `done`, `claim` and `add` read again what other processes added.

    Raises:
        SelfTPTError: If the file cannot be read, or one of its lines is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "records.jsonl"
        self.records: list[Record] = []
        self._parsed: dict[bytes, Record] = {}
        if cut_short := self._refresh():
            text = f"skipped line {cut_short} of {self.file}, the last: it was cut short"
            warnings.warn(text, SelfTPTWarning, stacklevel=2)

    def done(self) -> set[str]:
        """Return the keys of all recorded runs."""
        self._refresh()
        return {record["key"] for record in self.records if record.get("key")}

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Claim a run while it is done: `with runs.claim(key) as mine: if mine: ...`.

        The claim ends with the block, or with the process, so that a run whose owner was killed can be claimed again.

        Yields:
            Whether the run is to be done here; false if another process or thread does it now, or if it is recorded.
        """
        with lock(self.folder / f".claim-{digest(key)}.lock", wait=False) as mine:
            yield mine and key not in self.done()

    def add(self, record: Mapping[str, Any]) -> Record:
        """Add a record, unless one with its key is there.

        Returns:
            The record with that key, as it is read: the new one, or the one that was there.

        Raises:
            SelfTPTError: If the record cannot be written. It is in the file as a whole or not at all.
        """
        try:
            line = to_line(record)
        except (TypeError, ValueError) as error:
            raise SelfTPTError(f"this run cannot be recorded: {error}") from error
        with lock(self.file.with_name(f".{self.file.name}.lock")):
            self._refresh()
            for known in self.records:
                if known.get("key") and known["key"] == record.get("key"):
                    return known
            append_line(self.file, line)
            self._refresh()
        return self._parsed[line.encode()]

    def last_seconds(self, facts: Mapping[str, Any]) -> float | None:
        """Return the seconds of the latest run whose record differs from `facts` at most by its seed, or None."""
        wanted = _without_seed(facts)
        for record in reversed(self.records):
            if record.get("seconds") and _without_seed(record) == wanted:
                return float(sum(record["seconds"].values()))
        return None

    def _refresh(self) -> int | None:
        """Read the file again.

        Returns:
            The number of the last line if it was cut short: its writer was killed, or is still writing.
        """
        try:
            content = self.file.read_bytes() if self.folder.is_dir() and self.file.exists() else b""
        except OSError as error:
            raise SelfTPTError(f"no runs can be read from {self.folder}: {error.strerror}") from error
        *lines, rest = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                if line.strip() and line not in self._parsed:
                    self._parsed[line] = from_line(line)
            except ValueError as error:
                text = f"{self.file}, line {number} is damaged ({error}): fix or delete the line"
                raise SelfTPTError(text) from error
        self.records = [self._parsed[line] for line in lines if line.strip()]
        return len(lines) + 1 if rest else None


def _without_seed(record: Mapping[str, Any]) -> str:
    """Return, as JSON, what decides how long a run takes. (As Python objects, tuples and lists would differ.)"""
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
    """Read the records of a folder.

    Raises:
        SelfTPTError: If there is no such folder, it has no record, or a record is damaged.
    """
    if not folder.is_dir():
        is_not = "is not a folder" if folder.exists() else "does not exist"
        raise SelfTPTError(f"{folder} {is_not}: give the folder in which runs were recorded")
    runs = Runs(folder)
    if not runs.records:
        why = "no run has ended yet" if runs.file.exists() else "`selftpt bench` makes them"
        raise SelfTPTError(f"{runs.file} has no record: {why}")
    return runs.records
