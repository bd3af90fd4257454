"""Metrics, and records of runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import template_hint
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.evaluation.metrics import accuracy, all_metrics, expected_calibration_error, harmonic_mean
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


def test_top_k_accuracy_of_known_probabilities() -> None:
    assert accuracy(PROBABILITIES, LABELS, 1) == 50
    assert accuracy(PROBABILITIES, LABELS, 5) == 75
    assert accuracy(PROBABILITIES[:, :2], torch.tensor([0, 1, 1, 1]), 5) == 100


def test_calibration_error_of_two_bins() -> None:
    """Confidences 0.3 and 0.24 are in one bin and wrong; 0.7 and 0.9 are in the other and correct."""
    expected = 100 * (abs(0 - (0.30 + 0.24)) + abs(2 - (0.70 + 0.90))) / 4
    assert expected_calibration_error(PROBABILITIES, LABELS, bins=2) == pytest.approx(expected, rel=1e-5)


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(2, 8))
def test_calibration_error_equals_a_loop_over_bins(seed: int, count: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probabilities = (3 * torch.randn(count, classes, generator=generator)).softmax(-1)
    labels = torch.randint(classes, (count,), generator=generator)
    expected = 0.0
    for b in range(15):
        members = [i for i in range(count) if b / 15 < probabilities[i].max() <= (b + 1) / 15]
        if members:
            accuracy = sum(int(probabilities[i].argmax()) == int(labels[i]) for i in members) / len(members)
            confidence = sum(float(probabilities[i].max()) for i in members) / len(members)
            expected += len(members) / count * abs(accuracy - confidence)
    assert expected_calibration_error(probabilities, labels) == pytest.approx(100 * expected, abs=1e-3)


def test_all_metrics_and_harmonic_mean() -> None:
    found = all_metrics(PROBABILITIES, LABELS)
    assert (found["top1"], found["top5"], found["images"], found["classes"]) == (50, 75, 4, 6)
    assert harmonic_mean(80, 60) == pytest.approx(68.5714, abs=1e-4)
    assert harmonic_mean(0, 0) == 0


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


def test_added_records_are_read(tmp_path: Path) -> None:
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


def test_time_of_the_last_run_is_found_for_another_seed(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.add(RECORD | {"seed": 1, "settings": {"learn": {"seed": 1, "views": ("end", "hand_crafted")}}})
    assert (
        Runs(tmp_path).last_seconds(RECORD | {"settings": {"learn": {"seed": 2, "views": ("end", "hand_crafted")}}})
        == 3
    )
    assert Runs(tmp_path).last_seconds(RECORD | {"settings": {"learn": {"seed": 2, "views": ("end",)}}}) is None


def test_incomplete_record_is_replaced(tmp_path: Path) -> None:
    """The next record replaces the line of a run that was killed while writing."""
    runs = Runs(tmp_path)
    runs.add(RECORD)
    with runs.file.open("a") as file:
        file.write('{"key": "b", "protoc')
    with pytest.warns(SelfTPTWarning, match="skipped line 2"):
        again = Runs(tmp_path)
    assert again.done() == {"a"}
    again.add({**RECORD, "key": "c"})
    assert [json.loads(line)["key"] for line in runs.file.read_text().splitlines()] == ["a", "c"]


def test_two_writers_keep_each_others_records(tmp_path: Path) -> None:
    first, second = Runs(tmp_path), Runs(tmp_path)
    for number, runs in enumerate([first, first, second, first]):
        runs.add({**RECORD, "key": str(number)})
    assert [record["key"] for record in Runs(tmp_path).records] == ["0", "1", "2", "3"]


def test_template_benchmark_leaves_out_unreadable_images() -> None:
    """Their rows are NaN, which would count as certain predictions of class 0."""
    rows = np.array([[0.5, 0.5], [np.nan, np.nan], [0.0, 1.0]], dtype=np.float32)
    classifier: Any = SimpleNamespace(predict_proba=lambda paths: rows[: len(paths)])
    test = Source(("cat", "dog"), (Path("a"), Path("b"), Path("c")), (0, 0, 1))
    assert template_hint.evaluate(classifier, test) == (0.5, 100)
    rows[:] = np.nan
    with pytest.raises(SelfTPTError, match="none of the 3 test images"):
        template_hint.evaluate(classifier, test)


def test_template_benchmark_reports_skipped_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["template_hint.py", "--data", str(tmp_path)])
    template_hint.main()
    assert f"skipped eurosat: the folder {tmp_path / 'eurosat' / '2750'} does not exist" in capsys.readouterr().err
