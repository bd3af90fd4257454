"""One thread a worker, and a cache of its own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is read from or left in the user's cache, and processes do not fight for cores."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SELFTPT_CACHE", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes that a test starts
    return folder
