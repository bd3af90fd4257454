"""Measures, records, methods and protocols."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selftpt.errors import SelfTPTWarning
from selftpt.evaluation.measures import calibration_error, harmonic, measure, top
from selftpt.evaluation.runs import Runs

PROBABILITIES = torch.tensor(
    [
        [0.70, 0.10, 0.10, 0.05, 0.03, 0.02],
        [0.30, 0.25, 0.20, 0.15, 0.06, 0.04],
        [0.05, 0.90, 0.02, 0.01, 0.01, 0.01],
        [0.24, 0.22, 0.20, 0.18, 0.13, 0.03],
    ]
)
LABELS = torch.tensor([0, 3, 1, 5])


def test_top() -> None:
    assert top(PROBABILITIES, LABELS, 1) == 50
    assert top(PROBABILITIES, LABELS, 5) == 75
    assert top(PROBABILITIES[:, :2], torch.tensor([0, 1, 1, 1]), 5) == 100


def test_calibration_error_by_hand() -> None:
    """Two bins: of confidence 0.3 and 0.24, none right; of 0.7 and 0.9, both."""
    wanted = 100 * (abs(0 - (0.30 + 0.24)) + abs(2 - (0.70 + 0.90))) / 4
    assert calibration_error(PROBABILITIES, LABELS, bins=2) == pytest.approx(wanted, rel=1e-5)


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(2, 8))
def test_calibration_error_by_loops(seed: int, count: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probabilities = (3 * torch.randn(count, classes, generator=generator)).softmax(-1)
    labels = torch.randint(classes, (count,), generator=generator)
    wanted = 0.0
    for b in range(15):
        members = [i for i in range(count) if b / 15 < probabilities[i].max() <= (b + 1) / 15]
        if members:
            accuracy = sum(int(probabilities[i].argmax()) == int(labels[i]) for i in members) / len(members)
            confidence = sum(float(probabilities[i].max()) for i in members) / len(members)
            wanted += len(members) / count * abs(accuracy - confidence)
    assert calibration_error(probabilities, labels) == pytest.approx(100 * wanted, abs=1e-3)


def test_measure_and_harmonic() -> None:
    found = measure(PROBABILITIES, LABELS)
    assert (found["top1"], found["top5"], found["images"], found["classes"]) == (50, 75, 4, 6)
    assert harmonic(80, 60) == pytest.approx(68.5714, abs=1e-4)
    assert harmonic(0, 0) == 0


RECORD = {
    "key": "a",
    "protocol": "domain",
    "method": "clip",
    "dataset": "dtd",
    "model": {"name": "x", "digest": "y"},
    "data": {},
    "settings": {},
    "results": {},
    "seconds": {"adapt": 1, "predict": 2},
}


def test_records_are_added_and_read(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    assert runs.records == []
    assert runs.last_seconds(RECORD) is None
    runs.add(RECORD)
    assert runs.last_seconds(RECORD) == 3
    runs.add({**RECORD, "key": "b", "seconds": {"adapt": 4}})
    again = Runs(tmp_path / "runs")
    assert again.records == runs.records
    assert again.done() == {"a", "b"}
    assert again.last_seconds(RECORD) == 4
    for other in ({"dataset": "eurosat"}, {"settings": {"lr": 1}}, {"data": {"limit": 9}}, {"device": "cuda"}):
        assert again.last_seconds(RECORD | other) is None


def test_timings_are_found_whatever_the_seed_and_kind_of_sequence(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.add(RECORD | {"seed": 1, "settings": {"learn": {"seed": 1, "views": ("end", "hand_crafted")}}})
    assert (
        Runs(tmp_path).last_seconds(RECORD | {"settings": {"learn": {"seed": 2, "views": ("end", "hand_crafted")}}})
        == 3
    )
    assert Runs(tmp_path).last_seconds(RECORD | {"settings": {"learn": {"seed": 2, "views": ("end",)}}}) is None


def test_the_place_of_a_record_cut_short_is_taken(tmp_path: Path) -> None:
    """A run that was killed as it wrote: its line goes, and the next record stands in its place."""
    runs = Runs(tmp_path)
    runs.add(RECORD)
    with runs.file.open("a") as file:
        file.write('{"key": "b", "protoc')
    with pytest.warns(SelfTPTWarning, match="left out line 2"):
        again = Runs(tmp_path)
    assert again.done() == {"a"}
    again.add({**RECORD, "key": "c"})
    assert [json.loads(line)["key"] for line in runs.file.read_text().splitlines()] == ["a", "c"]


def test_two_writers(tmp_path: Path) -> None:
    """Neither loses what the other adds."""
    first, second = Runs(tmp_path), Runs(tmp_path)
    for number, runs in enumerate([first, first, second, first]):
        runs.add({**RECORD, "key": str(number)})
    assert [record["key"] for record in Runs(tmp_path).records] == ["0", "1", "2", "3"]
