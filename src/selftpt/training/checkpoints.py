"""The files of a training run: its result, its log and its checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.files import Schema, read_tensors, set_aside, write_after, write_tensors
from selftpt.training.state import State

SCHEMA = Schema(header={"made_of": str, "epochs": int, "logged": int}, oldest=2)


class RunFiles:
    """The result of a training run, its log and its checkpoint.

    Args:
        out: The file of the result; None writes nothing.
        made_of: A digest of all that determines the result; the checkpoint of another run is not resumed.
        random_init: Whether the model has random weights, which the log then says.
        optional: Whether the run goes on with a warning if a file cannot be written.
    """

    def __init__(self, out: Path | None, made_of: str, random_init: bool, optional: bool = False) -> None:
        self.out, self.made_of, self.random_init, self.optional = out, made_of, random_init, optional
        self.logged = 0  # bytes of the log that the checkpoint vouches for
        if out is not None:
            self.log = out.with_name(out.name + ".log.jsonl")
            self.checkpoint = out.with_name(out.name + ".checkpoint")

    def resume(self, state: State, epochs: int) -> int:
        """Restore the state of an interrupted run.

        A damaged checkpoint is set aside with a warning. With such a one, or that of another run, training starts from
        the beginning.

        Args:
            state: Is restored, or not changed at all.
            epochs: Of the whole run.

        Returns:
            The number of epochs that are done.
        """
        if self.out is None or not os.path.lexists(self.checkpoint):
            return 0
        try:
            header, tensors = read_tensors(self.checkpoint, "checkpoint", SCHEMA)
            if header["made_of"] != self.made_of:
                text = f"learning from the start: {self.checkpoint} is of another run"
                warnings.warn(text, SelfTPTWarning, stacklevel=3)
                return 0
            if not 1 <= header["epochs"] <= epochs:
                raise ValueError(f"{header['epochs']} epochs of {epochs} are done")
            size = self.log.stat().st_size if self.log.is_file() else 0
            if not 0 <= header["logged"] <= size:
                raise ValueError(f"{header['logged']} bytes were logged, and {self.log} has {size}")
            state.restore(tensors)
        except SelfTPTError as error:
            set_aside(self.checkpoint, f"learning from the start: {error}")
            return 0
        except ValueError as error:
            set_aside(self.checkpoint, f"learning from the start: {self.checkpoint} is not a valid checkpoint: {error}")
            return 0
        self.logged = header["logged"]
        return int(header["epochs"])

    def keep(self, state: State, epochs: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """After an epoch: its log and a checkpoint."""
        if self.out is None:
            return
        mark = {"random_init": True} if self.random_init else {}
        text = "".join(json.dumps({**line, **mark}) + "\n" for line in lines).encode()
        header = {"made_of": self.made_of, "epochs": epochs, "logged": self.logged + len(text)}
        with self._writing():
            write_after(self.log, self.logged, text)
            write_tensors(self.checkpoint, "checkpoint", state.tensors(), header)
        self.logged += len(text)

    def finish(self, save: Callable[[Path], None]) -> None:
        """At the end: what was learned is saved, and the checkpoint goes."""
        if self.out is not None:
            with self._writing():
                save(self.out)
            self.checkpoint.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except SelfTPTError as error:
            if not self.optional:
                raise
            warnings.warn(f"the training run is not kept: {error}", SelfTPTWarning, stacklevel=5)
            self.out = None
