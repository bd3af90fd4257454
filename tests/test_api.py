"""The public API: exported names, `fit`, `Model.to`, and representations."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import selftpt
from tests.helpers.folders import make_photos
from tests.helpers.models import model
from tests.helpers.pretend_device import pretend_device

NAMES = ["cat", "dog", "red kite"]


def test_public_names_are_listed_and_can_be_imported() -> None:
    assert dir(selftpt) == sorted(selftpt.__all__)
    for name in selftpt.__all__:
        assert getattr(selftpt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        selftpt.nothing  # noqa: B018


def test_every_public_function_and_class_has_a_docstring() -> None:
    undocumented = [
        f"{name}.{part}"
        for name in selftpt.__all__
        if callable(member := getattr(selftpt, name))
        for part, function in [("", member), *vars(member).items()]
        if not part.startswith("_") and (callable(function) or isinstance(function, property | classmethod))
        if not getattr(function, "__doc__", None)
    ]
    assert undocumented == []


def test_importing_selftpt_imports_neither_torch_nor_open_clip() -> None:
    code = "import sys, selftpt; dir(selftpt); print([m for m in ('torch', 'open_clip') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["adaptation", "classifier", "methods.fitting", "models.model", "data.sources"])
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"selftpt.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_fit_accepts_sources_settings_and_initial_values(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", ("cat", "dog"), per_class=2)
    settings = {"learn.epochs": 1, "learn.lr": 0.1}
    fitted = selftpt.fit("coop", model(), photos, settings=settings, folder=tmp_path / "out")
    assert (fitted.config.learn.epochs, fitted.config.learn.lr) == (1, 0.1)
    assert [path.suffix for path in (tmp_path / "out").iterdir() if path.suffix == ".safetensors"]
    again = selftpt.fit("coop", model(), selftpt.Source.read(photos), settings=settings, cache=selftpt.Cache("off"))
    assert torch.equal(again.tensors["context"], fitted.tensors["context"])
    start = {"context": torch.zeros_like(fitted.tensors["context"])}
    other = selftpt.fit("coop", model(), photos, settings=settings, initial=start, cache=selftpt.Cache("off"))
    assert not torch.allclose(other.tensors["context"], fitted.tensors["context"])


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (("nothing",), {}, "no method is called 'nothing'"),
        (("coop",), {}, "coop learns from labelled images"),
        (("tpt",), {"views": 0}, "views must be an integer above 0"),
        (("tpt",), {"nothing": 0}, "tpt has no setting 'nothing'"),
    ],
)
def test_fit_refuses_unknown_methods_and_invalid_settings(
    arguments: tuple[str], settings: dict[str, object], words: str
) -> None:
    with pytest.raises(selftpt.SelfTPTError, match=words):
        selftpt.fit(*arguments, model(), settings=settings)


def test_fit_refuses_a_source_of_an_unknown_type() -> None:
    with pytest.raises(selftpt.SelfTPTError, match=r"a source must be a folder, a CSV file, .* not int"):
        selftpt.fit("coop", model(), 5)  # type: ignore[arg-type]


def test_former_names_of_settings_are_accepted_with_a_warning() -> None:
    with pytest.warns(selftpt.SelfTPTWarning, match="confident is deprecated: write confidence_ratio"):
        fitted = selftpt.fit("tpt", model(), settings={"confident": 0.5})
    assert fitted.config.confidence_ratio == 0.5


def test_model_to_returns_a_copy_on_another_device() -> None:
    own = model()
    assert own.to("cpu") is own
    assert own.to(torch.device("cpu")) is own
    with pretend_device() as device:
        moved = own.to(device)
        assert (moved.device, own.device.type) == (device, "cpu")
        assert next(moved.clip.parameters()).device == device
        assert next(own.clip.parameters()).device.type == "cpu"
        assert moved.id == own.id
    with pytest.raises(selftpt.SelfTPTError, match="the device 'nowhere' cannot be used here"):
        own.to("nowhere")


def test_representations_are_short_and_useful() -> None:
    own = model()
    assert repr(own) == f"Model({own.id}, dimension={own.dimension}, device=cpu, precision=fp32)"
    prompt = selftpt.Prompt.embedded()
    classes, images = len(prompt.origin["classes"]), prompt.origin["images"]
    assert (
        repr(prompt) == f"Prompt(4 context vectors for selftpt-tiny, learned on {images} images of {classes} classes)"
    )
    classifier = selftpt.zero_shot(own, [*NAMES, "fish"])
    assert repr(classifier) == f"Classifier(4 classes: 'cat', 'dog', 'red kite', ...; model {own.id})"
    fitted = selftpt.fit("clip", own)
    assert repr(fitted) == f"FittedMethod(clip, {own.id})"
    assert repr(fitted.for_classes(NAMES)) == f"Predictor(clip, 3 classes, {own.id})"


def test_numpy_images_and_names_are_accepted() -> None:
    classifier = selftpt.zero_shot(model(), np.array(NAMES))
    image = np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8)
    assert classifier.predict(image).names == classifier.predict([image])[0].names
    assert classifier.predict_proba(image).sum() == pytest.approx(1, abs=1e-5)


def test_arguments_of_wrong_types_are_refused_in_one_line() -> None:
    clip, prompt, names = model(), selftpt.Prompt.embedded(), ["cat", "dog"]
    classifier = selftpt.zero_shot(clip, names)
    for call, message in (
        (lambda: selftpt.adapt(clip, "p.safetensors", names), "prompt must be a Prompt, not str: Prompt.load reads"),
        (lambda: selftpt.adapt(clip, prompt, names, {"steps": 3}), "config must be an AdaptConfig, not dict"),
        (lambda: selftpt.adapt(clip, prompt, names, selftpt.LearnConfig()), "config must be an AdaptConfig"),
        (lambda: selftpt.learn(clip, "photos", {"epochs": 1}), "config must be a LearnConfig, not dict"),
        (lambda: selftpt.learn(clip, "photos", cache="off"), "cache must be a Cache, not str"),
        (lambda: selftpt.zero_shot(names, clip), "model must be a Model, not list"),
        (lambda: selftpt.fit(clip, "coop", "photos"), r"method must be a str, not Model: the arguments are fit\("),
        (lambda: selftpt.fit("coop", clip, settings="learn.epochs=1"), "settings must be a Mapping, not str"),
        (lambda: classifier.predict("a.jpg", config={"views": 3}), "config must be a PredictConfig, not dict"),
        (lambda: selftpt.load_model(3), "the name of a model must be a str, not int"),
    ):
        with pytest.raises(selftpt.SelfTPTError, match=message):
            call()
