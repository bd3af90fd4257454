"""Fuzzing with a few hundred mutated files; `python -m tests.fuzz --kind files --n 5000` runs more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from selftpt.files import read_file
from tests.fuzz import run
from tests.fuzz_files import KINDS, Parts, valid_files

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory cannot be measured here")
def test_mutated_files_are_refused_set_aside_or_give_the_same_result() -> None:
    seed = int(os.environ.get("SELFTPT_FUZZ_SEED", "0"))
    report = run("files", 300, seed)
    print(report)
    assert not report.failures, f"SELFTPT_FUZZ_SEED={seed}\n" + "\n".join(report.failures)


def test_unchanged_files_and_files_with_updated_digests_are_valid(tmp_path: Path) -> None:
    """Otherwise mutated files would be refused for another reason."""
    for name, path in valid_files(tmp_path).items():
        if name != "records":
            parts = Parts.from_bytes(path.read_bytes())
            assert parts.to_bytes() == path.read_bytes()
            parts.update_digests()
            path.write_bytes(parts.to_bytes())
            read_file(path)
    assert KINDS.keys() == valid_files(tmp_path).keys()
