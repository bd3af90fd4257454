"""Fuzzing with a few hundred mutated images; `python -m tests.fuzz --kind images --n 5000` runs more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from selftpt.data.decoding import open_image
from tests.fuzz import run
from tests.fuzz_images import samples

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory cannot be measured here")
def test_mutated_images_are_decoded_or_refused_in_one_line() -> None:
    seed = int(os.environ.get("SELFTPT_FUZZ_SEED", "0"))
    report = run("images", 200, seed)
    print(report)
    assert not report.failures, f"SELFTPT_FUZZ_SEED={seed}\n{report}"


def test_unchanged_samples_are_valid(tmp_path: Path) -> None:
    """Otherwise mutated images would be refused for another reason."""
    for name, data, size in samples():
        if size != (0, 0):
            path = tmp_path / "a"
            path.write_bytes(data)
            assert open_image(path).size == size, name
