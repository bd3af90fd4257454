"""Fixtures for all tests: one torch thread per worker, and a separate cache for every test."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.commands import CommandResult, Run

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a new, empty cache folder instead of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SELFTPT_CACHE", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for subprocesses
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a selftpt command in this process."""
    from selftpt import cli

    def call(*arguments: str | Path, stdin: str = "") -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["selftpt", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return CommandResult(int(stop.value.code or 0), *capsys.readouterr())

    return call
