"""The example in docs/adding-a-method.md works."""

from __future__ import annotations

import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from selftpt.methods import METHODS, FitContext, FittedMethod
from tests.helpers.methods import make_context
from tests.helpers.models import model

PAGE = Path(__file__).parents[1] / "docs" / "adding-a-method.md"
LINES = 40  # maximum number of code lines of the example


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Execute the first block of the page as a module of the package, and the second, which registers the method."""
    module = types.ModuleType("selftpt.methods.class_means")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(blocks()[0], str(PAGE), "exec"), module.__dict__)
    monkeypatch.setattr(METHODS, "info", dict(METHODS.info))
    exec(compile(blocks()[1], str(PAGE), "exec"), {})
    assert METHODS["class-means"] is module.CLASS_MEANS
    return module


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_example_is_short() -> None:
    code = [
        line for line in blocks()[0].splitlines() if line.strip() and not line.startswith(("from", "import", '"""'))
    ]
    assert len(code) <= LINES


def test_example_learns_predicts_saves_and_loads(example: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path / "a")
    config = example.ClassMeansConfig()
    fitted = example.CLASS_MEANS.fit(context, config)
    features, labels = context.features(config.learn)
    means = torch.stack([features[labels == label, 0].mean(0) for label in range(3)])
    torch.testing.assert_close(fitted.tensors["means"], means)
    names = [*context.source.names, "boat"]
    weights = fitted.for_classes(names).classifier.weights
    plain = METHODS["clip"].fit(FitContext(context.model)).for_classes(names).classifier.weights
    assert torch.equal(weights[-1], plain[-1])
    for i in range(3):
        mean = F.normalize(means[i], dim=0)
        torch.testing.assert_close(weights[i], F.normalize((plain[i] + mean) / 2, dim=0))
    fitted.save(tmp_path / "fitted")
    for copy in (
        FittedMethod.load(tmp_path / "fitted", model()),
        pickle.loads(pickle.dumps(fitted)).with_model(model()),
    ):
        assert torch.equal(copy.for_classes(names).classifier.weights, weights)


def test_single_step_example_runs(example: Any) -> None:
    scope = {**example.__dict__}
    exec(compile(blocks()[2], str(PAGE), "exec"), scope)
    assert scope["losses"]["distance"] > 0
    means = torch.stack([scope["features"][label::2].mean(0) for label in (0, 1)])
    torch.testing.assert_close(scope["means"], means)


def test_page_names_every_field_of_a_method() -> None:
    named = set(re.findall(r"`(\w+)[`(]", PAGE.read_text(encoding="utf-8")))
    fields = {*type(METHODS["clip"]).__dataclass_fields__}
    assert fields - named <= {"name", "summary", "reference", "config"}
