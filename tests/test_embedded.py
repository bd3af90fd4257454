"""The embedded model: its files, its predictions on photographs, and commands that use it by default."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageColor

import selftpt
from selftpt.cli.demo import PHOTOGRAPHS, RIGHT
from selftpt.models import EMBEDDED, EMBEDDED_FILES, Model
from selftpt.models import loading as models
from tests.helpers.commands import Run, refused
from tests.helpers.folders import make_photos

spec = find_spec("skimage")
assert spec is not None
assert spec.origin is not None
FOLDER = Path(spec.origin).parent / "data"


@pytest.fixture(scope="module")
def model() -> Model:
    return selftpt.load_model(device="cpu")


def test_model_is_an_open_clip_folder_of_at_most_22_megabytes(model: Model) -> None:
    assert sorted(file.name for file in EMBEDDED_FILES.iterdir()) == [
        "open_clip_config.json",
        "open_clip_model.safetensors",
        "prompt.safetensors",
    ]
    assert sum(file.stat().st_size for file in EMBEDDED_FILES.glob("open_clip_*")) <= 22e6
    clip = open_clip.create_model(f"local-dir:{EMBEDDED_FILES}").eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{EMBEDDED_FILES}")
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = clip.encode_image(pixels, normalize=True)
        text = clip.encode_text(tokenizer(["a photo of a cat.", "a photo of a tram."]), normalize=True)
    torch.testing.assert_close(model.encode_images(pixels), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(selftpt.zero_shot(model, ["cat", "tram"]).weights, text, rtol=0, atol=1e-5)


def test_text_tower_supports_the_packed_forward_pass(model: Model) -> None:
    assert model.text.supports_packed
    assert (model.id.name, model.id.pretrained, model.id.random_init) == (EMBEDDED, None, False)


def test_everyday_photographs_are_classified_correctly(model: Model) -> None:
    """Both zero-shot and with the embedded prompt."""
    expected = {file: PHOTOGRAPHS[file] for file in ("chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png")}
    names = list(PHOTOGRAPHS.values())
    for classifier in (selftpt.zero_shot(model, names), selftpt.adapt(model, selftpt.Prompt.embedded(), names)):
        predicted = [p.names[0] for p in classifier.predict([FOLDER / file for file in expected], top=1)]
        assert predicted == list(expected.values())


def test_embedded_prompt_was_learned_with_the_embedded_model(model: Model) -> None:
    prompt = selftpt.Prompt.embedded()
    prompt.model.check(model, "the prompt")
    assert prompt.origin["stage"] == "learn"
    assert len(prompt.origin["classes"]) == 1000
    start = model.text.embed_words("a photo of a")
    assert F.cosine_similarity(prompt.context, start).min() < 0.999


def test_random_weights_are_another_model(model: Model) -> None:
    random = selftpt.load_model(pretrained="random", device="cpu")
    assert random.id.random_init
    with pytest.raises(selftpt.SelfTPTError, match=r"selftpt-tiny .* not with selftpt-tiny \(random\)"):
        selftpt.adapt(random, selftpt.Prompt.embedded(), ["cat", "dog"])
    with pytest.raises(selftpt.SelfTPTError, match="has its own weights"):
        selftpt.load_model(pretrained="openai")


def test_commands_use_the_embedded_model_and_prompt_by_default(run: Run, tmp_path: Path) -> None:
    cat, names = FOLDER / "chelsea.png", ["--names", "dog, cat, tram"]
    for more in ([], ["--zero-shot"]):
        answer = run("classify", cat, *names, *more, "--json")
        assert answer.code == 0, answer.err
        assert json.loads(answer.out)["names"][0] == "cat"
    adapted = run("adapt", *names, "--out", tmp_path / "c")
    assert adapted.code == 0, adapted.err
    answer = run("predict", cat, "--classifier", tmp_path / "c", "--json")
    assert json.loads(answer.out)["names"][0] == "cat"
    refused(run("classify", cat, *names, "--model", "ViT-B-32", "--pretrained", "random"), "no prompt comes with")
    refused(run("classify", cat, *names, "--zero-shot", "--prompt", tmp_path / "p"), "uses no prompt")
    assert run("models", "tiny").out.startswith("selftpt-tiny")


def test_learn_uses_the_embedded_model_by_default(run: Run, tmp_path: Path) -> None:
    answer = run("learn", make_photos(tmp_path / "photos"), "--out", tmp_path / "p", "--epochs", 1, "--shots", 1)
    assert answer.code == 0, answer.err
    assert "for selftpt-tiny" in answer.out
    assert selftpt.Prompt.load(tmp_path / "p").model.name == EMBEDDED
    refused(run("learn", tmp_path / "photos", "--out", tmp_path / "q", "--model", ""), "no model is called ''")


def test_folder_with_the_name_of_the_model_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / EMBEDDED).mkdir()
    monkeypatch.chdir(tmp_path)
    assert selftpt.load_model(device="cpu").id.name == EMBEDDED


def test_broken_installation_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open_clip_config.json").write_bytes((EMBEDDED_FILES / "open_clip_config.json").read_bytes())
    monkeypatch.setattr(models, "EMBEDDED_FILES", tmp_path)
    with pytest.raises(selftpt.SelfTPTError, match="install selftpt again"):
        selftpt.load_model(device="cpu")


def test_demo_writes_an_image_sheet(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = tmp_path / "sheet.png"
    answer = run("demo", "--out", sheet)
    assert answer.code == 0, answer.err
    assert "zero-shot" in answer.out
    assert str(sheet) in answer.out
    with Image.open(sheet) as image:
        assert image.width > 900
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert ImageColor.getrgb(RIGHT) in colours
    refused(run("demo", "--out", tmp_path / "sheet.png" / "x"), "cannot write")
    (tmp_path / "data").mkdir()
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    refused(run("demo", "--out", sheet), "no such file")  # a scikit-image release without these images
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(run("demo"), "selftpt[demo]")


def test_wheel_contains_the_model(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(root)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 30e6
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    for name in ("open_clip_config.json", "open_clip_model.safetensors", "prompt.safetensors"):
        assert f"selftpt/embedded/{name}" in names


def test_representations_are_short(model: Model) -> None:
    expected = "Prompt(4 context vectors for selftpt-tiny, learned on 3000 images of 1000 classes)"
    assert repr(selftpt.Prompt.embedded()) == expected
    assert repr(selftpt.zero_shot(model, ["cat", "dog"])) == "Classifier(2 classes: 'cat', 'dog'; model selftpt-tiny)"


@pytest.mark.parametrize("wrong", [b"bytes", None, 3])
def test_input_that_is_not_an_image_is_reported(model: Model, wrong: object) -> None:
    classifier = selftpt.zero_shot(model, ["cat", "dog"])
    with pytest.raises(selftpt.SelfTPTError, match=f"images must be .*, not {type(wrong).__name__}"):
        classifier.predict(wrong)  # type: ignore[call-overload]
    errors: list[Exception] = []
    assert classifier.predict([wrong], on_error=errors.append) == []  # type: ignore[list-item]
    assert str(errors[0]).endswith(f"not {type(wrong).__name__}")


def test_arrays_are_images(model: Model) -> None:
    prediction = selftpt.zero_shot(model, ["cat", "dog"]).predict(np.zeros((32, 32, 3), np.uint8))
    assert prediction.path is None


def test_help_is_shown_without_a_command(run: Run) -> None:
    answer = run()
    assert answer.code == 2
    assert "classify" in answer.out + answer.err
    assert not answer.err.endswith("selftpt: \n")
