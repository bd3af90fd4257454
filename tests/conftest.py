"""One thread a worker, and a cache of its own for every test."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from selftpt import cli
from tests.helpers.commands import Answer, Run

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is read from or left in the user's cache, and processes do not fight for cores."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SELFTPT_CACHE", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes that a test starts
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""

    def call(*arguments: str | Path, stdin: str = "") -> Answer:
        monkeypatch.setattr(sys, "argv", ["selftpt", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Answer(int(stop.value.code or 0), *capsys.readouterr())

    return call
