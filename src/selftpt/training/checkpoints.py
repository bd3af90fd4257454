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
        made_of: A digest of everything that determines the result. A checkpoint with another digest is not resumed.
        random_init: Whether the weights of the model are randomly initialised; if so, each line of the log says so.
        optional: Whether to warn and continue if a file cannot be written.
    """

    def __init__(self, out: Path | None, made_of: str, random_init: bool, optional: bool = False) -> None:
        self.out, self.made_of, self.random_init, self.optional = out, made_of, random_init, optional
        self.logged = 0  # size of the log in bytes at the last checkpoint
        if out is not None:
            self.log = out.with_name(out.name + ".log.jsonl")
            self.checkpoint = out.with_name(out.name + ".checkpoint")

    def resume(self, state: State, epochs: int) -> int:
        """Restore the state of an interrupted run.

        If the checkpoint is damaged or belongs to another run, training starts from the beginning, with a warning. A
        damaged checkpoint is renamed.

        Args:
            state: The state to restore. Without a valid checkpoint it is not changed.
            epochs: Number of epochs of the run.

        Returns:
            The number of completed epochs.
        """
        if self.out is None or not os.path.lexists(self.checkpoint):
            return 0
        try:
            header, tensors = read_tensors(self.checkpoint, "checkpoint", SCHEMA)
            if header["made_of"] != self.made_of:
                text = f"learning from the start: {self.checkpoint} belongs to another run"
                warnings.warn(text, SelfTPTWarning, stacklevel=3)
                return 0
            if not 1 <= header["epochs"] <= epochs:
                raise ValueError(f"its number of epochs is {header['epochs']}, not 1 to {epochs}")
            size = self.log.stat().st_size if self.log.is_file() else 0
            if not 0 <= header["logged"] <= size:
                raise ValueError(f"it was written when {self.log} had {header['logged']} bytes, and now it has {size}")
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
        """Write the log of an epoch and a checkpoint.

        Args:
            state: The state after the epoch.
            epochs: Number of completed epochs.
            lines: The lines of the log, one per step of the epoch.
        """
        if self.out is None:
            return
        mark = {"random_init": True} if self.random_init else {}
        text = "".join(json.dumps({**line, **mark}) + "\n" for line in lines).encode()
        header = {"made_of": self.made_of, "epochs": epochs, "logged": self.logged + len(text)}
        with self._write_errors():
            write_after(self.log, self.logged, text)
            write_tensors(self.checkpoint, "checkpoint", state.tensors(), header)
        self.logged += len(text)

    def finish(self, save: Callable[[Path], None]) -> None:
        """Save the result with `save`, a function of its path, and delete the checkpoint."""
        if self.out is not None:
            with self._write_errors():
                save(self.out)
            self.checkpoint.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except SelfTPTError as error:
            if not self.optional:
                raise
            warnings.warn(f"the files of the training run are not saved: {error}", SelfTPTWarning, stacklevel=5)
            self.out = None
