"""Configurations of all classes are checked when they are created."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from selftpt.cli.options import parse_setting
from selftpt.config import (
    AdaptConfig,
    BenchConfig,
    Config,
    ContrastConfig,
    LearnConfig,
    PredictConfig,
    TrainConfig,
    change,
    setting,
)
from selftpt.errors import SelfTPTError, SelfTPTWarning
from tests.helpers.commands import Run, refused


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (LearnConfig, {"epochs": 1.5}, "LearnConfig.epochs must be an integer above 0, not 1.5"),
        (LearnConfig, {"epochs": True}, "LearnConfig.epochs must be an integer above 0, not True"),
        (LearnConfig, {"epochs": None}, "LearnConfig.epochs must be an integer above 0, not None"),
        (LearnConfig, {"epochs": 10**30}, "LearnConfig.epochs must be an integer above 0 and below 2147483648, not 1"),
        (LearnConfig, {"lr": "0.1"}, "LearnConfig.lr must be a number above 0, not '0.1'"),
        (LearnConfig, {"lr": math.nan}, "LearnConfig.lr must be a number above 0, not nan"),
        (LearnConfig, {"lr": math.inf}, "LearnConfig.lr must be a number above 0, not inf"),
        (LearnConfig, {"lr": 10**400}, "LearnConfig.lr must be a number above 0, not 1000"),
        (LearnConfig, {"lr": np.array([0.1])}, "LearnConfig.lr must be a number above 0, not array"),
        (LearnConfig, {"ce": np.float32("nan")}, "LearnConfig.ce must be a number 0 or more, not"),
        (LearnConfig, {"shots": 0}, "LearnConfig.shots must be an integer above 0, or none, not 0"),
        (LearnConfig, {"shots": "none"}, "LearnConfig.shots must be an integer above 0, or none, not 'none'"),
        (LearnConfig, {"classes_per_step": 1}, "LearnConfig.classes_per_step must be an integer 2 or more, or none"),
        (LearnConfig, {"momentum": 1}, "LearnConfig.momentum must be a number 0 or more and below 1, not 1"),
        (LearnConfig, {"seed": 2**31}, "LearnConfig.seed must be an integer 0 or more and below 2147483648, not"),
        (LearnConfig, {"matching": "l2"}, "LearnConfig.matching must be one of cosine, mse, not 'l2'"),
        (LearnConfig, {"matching": ["mse"]}, "LearnConfig.matching must be one of cosine, mse, not ['mse']"),
        (LearnConfig, {"contrast": {}}, "LearnConfig.contrast must be a ContrastConfig, not {}"),
        (LearnConfig, {"words": b"a photo"}, "LearnConfig.words must be a string that UTF-8 can encode, not b'a"),
        (LearnConfig, {"words": "\ud800"}, "LearnConfig.words must be a string that UTF-8 can encode, not '\\ud800'"),
        (ContrastConfig, {"views": "end"}, "ContrastConfig.views must be a list in which each item is one of end,"),
        (
            ContrastConfig,
            {"views": ("end", 1)},
            "ContrastConfig.views must be a list in which each item is one of end,",
        ),
        (ContrastConfig, {"normalize": 1}, "ContrastConfig.normalize must be true or false, not 1"),
        (AdaptConfig, {"steps": -1}, "AdaptConfig.steps must be an integer 0 or more, not -1"),
        (
            PredictConfig,
            {"confidence_ratio": 1.5},
            "PredictConfig.confidence_ratio must be a number above 0 and at most 1, not 1.5",
        ),
        (BenchConfig, {"share": 0}, "BenchConfig.share must be a number above 0 and at most 1, not 0"),
    ],
)
def test_invalid_value_is_refused_in_one_line(kind: type[Config], given: dict[str, Any], message: str) -> None:
    with pytest.raises(SelfTPTError) as caught:
        kind(**given)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


def test_numpy_numbers_and_integers_are_converted_to_the_type_of_the_field() -> None:
    made = LearnConfig(epochs=np.int64(3), lr=np.float32(0.5), ce=1, shots=np.uint8(2))  # type: ignore[arg-type]
    assert ContrastConfig(normalize=np.bool_(False)).normalize is False  # type: ignore[arg-type]
    assert made == LearnConfig(epochs=3, lr=0.5, ce=1.0, shots=2)
    for value, kind in ((made.epochs, int), (made.lr, float), (made.ce, float), (made.shots, int)):
        assert type(value) is kind
    assert repr(made) == repr(LearnConfig(epochs=3, lr=0.5, ce=1.0, shots=2))
    assert ContrastConfig(views=["end", "hand_crafted"]).views == ("end", "hand_crafted")  # type: ignore[arg-type]


def test_default_values_are_valid_and_unchanged() -> None:
    for kind in (ContrastConfig, TrainConfig, LearnConfig, AdaptConfig, PredictConfig, BenchConfig):
        assert repr(kind(**vars(kind()))) == repr(kind())


def test_redeclared_field_keeps_its_other_limits() -> None:
    @dataclass(frozen=True)
    class Slow(TrainConfig):
        epochs: int = setting(100, "epochs", maximum=200)

    assert Slow().epochs == 100
    for wrong in (0, 201):
        with pytest.raises(SelfTPTError, match=f"Slow.epochs must be an integer above 0 and at most 200, not {wrong}"):
            Slow(epochs=wrong)


@dataclass(frozen=True)
class Outer(Config):
    """A configuration that contains another one."""

    learn: LearnConfig = field(default_factory=LearnConfig)
    words: str = setting("a", "words")


@pytest.mark.parametrize(
    ("text", "value"),
    [("learn.shots=none", None), ("learn.shots=null", None), ("learn.shots=4", 4), ("learn.chunk= none", None)],
)
def test_none_and_null_are_parsed_as_none(text: str, value: int | None) -> None:
    key, given = parse_setting(text)
    changed = change(Outer(), {key: given})
    assert getattr(changed.learn, key.partition(".")[2]) is value


def test_zero_is_deprecated_for_none() -> None:
    key, given = parse_setting("learn.shots=0")
    with pytest.warns(SelfTPTWarning, match="0 for shots is deprecated: write none"):
        assert change(Outer(), {key: given}).learn.shots is None


@pytest.mark.parametrize("text", ["words=none", "words=1", "learn.lr=none", "learn.epochs=2.0", "learn.shots=false"])
def test_value_of_another_type_is_refused(text: str) -> None:
    key, given = parse_setting(text)
    with pytest.raises(SelfTPTError, match=key.rpartition(".")[2]):
        change(Outer(), {key: given})


def test_command_line_accepts_none(run: Run, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    learn = ["learn", nowhere, "--out", tmp_path / "p"]
    answer = run(*learn, "--shots", "none", "--chunk", "none")
    refused(answer, "nowhere")
    assert "deprecated" not in answer.err
    answer = run(*learn, "--shots", "0")
    refused(answer, "nowhere")
    assert "note: 0 for --shots is deprecated: write none" in answer.err
    refused(run(*learn, "--shots", "all"), "--shots", "'all'", "none")
    refused(run(*learn, "--shots", "-1"), "--shots must be an integer above 0, or none, not -1")
    refused(run(*learn, "--lr", "nan"), "--lr must be a number above 0")
    shown = run("learn", "--help").out
    assert "[default: none]" in " ".join(shown.split())
    assert "none takes all" in " ".join(shown.replace("│", " ").split())


def test_methods_show_null_for_no_limit(run: Run) -> None:
    assert json.loads(run("methods", "self-tpt", "--json").out)["settings"]["learn.crops"] is None
