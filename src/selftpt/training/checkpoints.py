"""The files of a training run: its result, its log and its checkpoint."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.files import read_tensors, write_after, write_tensors
from selftpt.training.state import State


class RunFiles:
    """What is learned, its log and its checkpoint, or nothing at all without a path.

    made_of: a digest of all that decides the result; a checkpoint of another making is not taken up.
    """

    def __init__(self, out: Path | None, made_of: str, meaningless: bool) -> None:
        self.out, self.made_of, self.meaningless = out, made_of, meaningless
        self.logged = 0  # bytes of the log that the checkpoint vouches for
        if out is not None:
            self.log = out.with_name(out.name + ".log.jsonl")
            self.checkpoint = out.with_name(out.name + ".checkpoint")

    def resume(self, state: State) -> int:
        """Restore the state of a run of the same making; how many epochs it had done."""
        if self.out is None or not os.path.exists(self.checkpoint):
            return 0
        try:
            header, tensors = read_tensors(self.checkpoint, "checkpoint")
        except SelfTPTError as error:
            warnings.warn(f"learning from the start: {error}", SelfTPTWarning, stacklevel=3)
            return 0
        if header["made_of"] != self.made_of:
            warnings.warn(f"learning from the start: {self.checkpoint} is of another run", SelfTPTWarning, stacklevel=3)
            return 0
        state.restore(tensors)
        self.logged = header["logged"]
        return int(header["epochs"])

    def keep(self, state: State, epochs: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """After an epoch: its log and a checkpoint."""
        if self.out is None:
            return
        mark = {"meaningless": True} if self.meaningless else {}
        text = "".join(json.dumps({**line, **mark}) + "\n" for line in lines).encode()
        write_after(self.log, self.logged, text)
        self.logged += len(text)
        header = {"made_of": self.made_of, "epochs": epochs, "logged": self.logged}
        write_tensors(self.checkpoint, "checkpoint", state.tensors(), header)

    def finish(self, save: Callable[[Path], None]) -> None:
        """At the end: what was learned is saved, and the checkpoint goes."""
        if self.out is not None:
            save(self.out)
            self.checkpoint.unlink(missing_ok=True)
