"""Descriptors: which file, which sentences, and the mean of cosines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import AdaptConfig
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.methods import METHODS, Job, Predictor
from selftpt.methods.visdesc import Settings, relative_clause
from tests.commands import Run, refused
from tests.folders import make_model, make_photos
from tests.oracle import described
from tests.small import Small, model, relative, small

NAMES = ["cat", "red_kite", "bird on  the lake"]
DESCRIBED = {
    "Cat": ["a tree", "often on the road", "red rain"],
    "red kite": ["used in the wind"],
    "bird on the lake": ["blue", "has rice and corn"],
}
CLEAN = ["cat", "red kite", "bird on the lake"]


VIT = small("vit")


def job(small: Small) -> Job:
    return Job(small.model, None, Path("nowhere"), lambda error: None)


def predictor(descriptors: Path, names: list[str] = NAMES, small: Small | None = None) -> Predictor:
    return METHODS["visdesc"].fit(job(small or VIT), Settings(str(descriptors)))(names, "a photo of a {}.")


def pictures(small: Small, count: int = 3) -> Tensor:
    drawn = torch.randn(count, small.spec.dimension, generator=torch.Generator().manual_seed(0))
    return F.normalize(drawn.to(small.embedding.dtype), dim=-1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "descriptors.json"
    path.write_text(json.dumps({**DESCRIBED, "dog": []}))
    return path


@pytest.mark.parametrize("kind", ["vit", "layerscale", "worldwide", "siglip"])
def test_it_is_the_mean_of_cosines(kind: str, file: Path) -> None:
    tiny = small(kind, torch.float64)
    found = predictor(file, small=tiny)(pictures(tiny)[:, None])
    sentences = [[f"{{}}, {described.clause(one)}" for one in some] for some in DESCRIBED.values()]
    wanted = described.probabilities(tiny, pictures(tiny), CLEAN, sentences, tiny.model.scale)
    assert relative(found, wanted) < 1e-9


@settings(max_examples=50, deadline=None)
@given(st.text() | st.sampled_from(["", "a", "an oar", "antlers", "used", "has", "hash", "may", "can", "often"]))
def test_how_descriptors_are_joined(descriptor: str) -> None:
    assert relative_clause(descriptor) == described.clause(descriptor)


def test_a_class_without_descriptors_has_one_sentence(file: Path) -> None:
    tiny = small("vit", torch.float64)
    found = predictor(file, ["dog", "cat"], tiny)(pictures(tiny)[:, None])
    sentences = [["{}, which has"], [f"{{}}, {described.clause(one)}" for one in DESCRIBED["Cat"]]]
    wanted = described.probabilities(tiny, pictures(tiny), ["dog", "cat"], sentences, tiny.model.scale)
    assert relative(found, wanted) < 1e-9


def test_many_sentences_in_chunks_are_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = small("vit", torch.float64)
    whole = predictor(file, small=tiny)
    monkeypatch.setattr(AdaptConfig, "chunk", 2)
    monkeypatch.setattr("selftpt.models.text.WIDE", 2)
    chunked = predictor(file, small=tiny)
    assert isinstance(whole, Classifier)
    assert isinstance(chunked, Classifier)
    assert relative(chunked.weights, whole.weights) < 1e-9


def test_what_is_too_long_loses_its_end(tmp_path: Path) -> None:
    """A model of 32 positions reads 30 tokens between start and end."""
    tiny = small("layerscale", torch.float64)
    path = tmp_path / "long.json"
    path.write_text(json.dumps({"cat": [" ".join(["red"] * 40), "sun"], "dog": ["snow"]}))
    with pytest.warns(SelfTPTWarning, match="1 of 3 sentences lose their end: this model reads 32 tokens"):
        found = predictor(path, ["cat", "dog"], tiny)
    cut = "{}, which has " + " ".join(["red"] * 26)  # with `cat` 30 tokens
    sentences = [[cut, "{}, which has sun"], ["{}, which has snow"]]
    wanted = described.probabilities(tiny, pictures(tiny), ["cat", "dog"], sentences, tiny.model.scale)
    assert relative(found(pictures(tiny)[:, None]), wanted) < 1e-9


def test_of_a_folder_the_file_with_all_names_is_taken(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in {
        "a": {**DESCRIBED, "cat": ["sun"], "dog": ["moon"]},  # has them all too, and more
        "b": DESCRIBED,
        "c": {"cat": ["rain"], "red kite": ["snow"]},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "README.md").write_text("no descriptors")
    found, wanted = predictor(folder), predictor(file)
    assert isinstance(found, Classifier)
    assert isinstance(wanted, Classifier)
    assert torch.equal(found.weights, wanted.weights)
    (folder / "b.json").unlink()
    (folder / "a.json").unlink()
    with pytest.raises(SelfTPTError, match=r"c\.json comes nearest and lacks 'bird on the lake', 'lion'$"):
        predictor(folder, [*NAMES, "lion"])
    with pytest.raises(SelfTPTError, match=r"lacks 'bird on the lake', '1', '2', '3', '4', \.\.\.$"):
        predictor(folder, [*NAMES, *"1234567"])


@pytest.mark.parametrize("wrong", ["", "{", "[]", '{"cat": "red"}', '{"cat": [1]}'])
def test_files_of_another_kind_are_refused(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(wrong)
    with pytest.raises(SelfTPTError, match=r"wrong\.json"):
        predictor(path)


def test_what_is_not_there_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(SelfTPTError, match="--set descriptors=FILE_OR_FOLDER"):
        METHODS["visdesc"].fit(job(small("vit")), Settings())
    with pytest.raises(SelfTPTError, match="cannot read the descriptors"):
        predictor(tmp_path / "nowhere.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SelfTPTError, match="of descriptors"):
        predictor(tmp_path / "empty")
    with pytest.raises(SelfTPTError, match="give two"):
        predictor(file, ["cat"])


def test_a_descriptor_with_a_mark_of_the_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "marks.json"
    path.write_text(json.dumps({"cat": ["<end_of_text>"], "dog": []}))
    with pytest.raises(SelfTPTError, match="a mark that the tokenizer keeps"):
        predictor(path, ["cat", "dog"])


def test_the_classifier_is_saved_and_loaded(file: Path, tmp_path: Path) -> None:
    classifier = predictor(file)
    assert isinstance(classifier, Classifier)
    assert classifier.names == tuple(CLEAN)
    classifier.save(tmp_path / "c.safetensors")
    again = Classifier.load(tmp_path / "c.safetensors", model())
    shown = pictures(small("vit"))[:, None]
    assert torch.equal(again(shown), classifier(shown))
    assert (classifier.weights.norm(dim=-1) < 1).any(), "means of unit vectors are shorter"


def test_on_the_command_line(run: Run, file: Path, tmp_path: Path) -> None:
    photos, weights = make_photos(tmp_path / "photos"), make_model(tmp_path / "model")
    command = ["predict", photos, "--method", "visdesc", "--names", "cat,red kite", "--model", weights]
    refused(run(*command), "visdesc needs descriptors: --set descriptors=FILE_OR_FOLDER")
    answer = run(*command, "--set", f"descriptors={file}", "--json")
    assert answer.code == 0, answer.err
    assert len(answer.out.splitlines()) == 9
