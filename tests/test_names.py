"""Class names: accepted types, and error messages for all others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import selftpt
from selftpt.classifier import Classifier
from selftpt.cli.options import read_classes
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError
from selftpt.models import load_model
from selftpt.names import check_names
from tests.helpers.commands import Run, refused


class Column:
    """Stub of a pandas column: not a sequence, but with `tolist`."""

    def tolist(self) -> list[str]:
        return ["cat", "dog"]


@pytest.mark.parametrize("names", [["cat", "dog"], ("cat", "dog"), np.array(["cat", "dog"]), Column()])
def test_ordered_sequences_of_strings_are_accepted(names: object) -> None:
    checked = check_names(names)
    assert checked == ("cat", "dog")
    assert [type(name) for name in checked] == [str, str]


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: {"cat", "dog"}, "not of type set"),
    (lambda: (name for name in ("cat", "dog")), "not of type generator"),
    (lambda: {"cat": 0, "dog": 1}, "not of type dict"),
    (lambda: {"cat": 0, "dog": 1}.keys(), "not of type dict_keys"),
    (lambda: None, "not None"),
    (lambda: 2, "not of type int"),
    (lambda: b"cat,dog", "not of type bytes"),
    (lambda: "cat, dog", "not the string 'cat, dog'"),
    (lambda: np.array("cat"), "not of type ndarray"),
    (lambda: ["cat", 5], "class name 2 of 2 must be a string, not 5 of type int"),
    (lambda: ["cat", None], "class name 2 of 2 must be a string, not None"),
    (lambda: ["cat", b"dog"], "class name 2 of 2 must be a string, not b'dog'"),
    (lambda: np.array([1.0, 2.0]), "class name 1 of 2 must be a string, not 1.0"),
    (lambda: torch.tensor([1, 2]), "class name 1 of 2 must be a string, not 1"),
    (lambda: np.array([["cat"], ["dog"]]), r"class name 1 of 2 must be a string, not \['cat'\]"),
    (lambda: ["cat", "\ud800"], r"class name 2 of 2 cannot be encoded in UTF-8: '\\ud800'"),
    (lambda: ["cat", "d\x00g"], r"class name 2 of 2 has a control character: 'd\\x00g'"),
    (lambda: ["cat", "\x1b[31mdog"], "class name 2 of 2 has a control character"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_every_entry_point_refuses_other_names_in_one_line(make: Callable[[], Any], message: str) -> None:
    model, prompt = load_model(), selftpt.Prompt.embedded()
    entries: list[Callable[[Any], Any]] = [
        check_names,
        lambda names: selftpt.zero_shot(model, names),
        lambda names: selftpt.adapt(model, prompt, names),
        lambda names: Classifier(names, torch.zeros(2, 4), 1.0, model.id),
        lambda names: Source(names, (Path("a"), Path("b")), (0, 1)),
    ]
    for entry in entries:
        with pytest.raises(SelfTPTError, match=message) as caught:
            entry(make())
        assert "\n" not in str(caught.value)


def test_names_files_are_checked(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "names.json"
    for names in (["cat", 1], ["cat", "\ud800"], ["cat", "d\u0000g"]):
        file.write_text(json.dumps(names))
        refused(run("classify", tmp_path, "--names-file", file), "names.json", "class name 2 of 2")
    described = {"cat": ["striped fur", "whiskers"], "dog": ["floppy ears"]}
    file.write_text(json.dumps(described, indent=1))
    assert read_classes(None, file) == (["cat", "dog"], described)
