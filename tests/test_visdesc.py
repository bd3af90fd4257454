"""visdesc: descriptors, sentences, and the mean of cosines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import AdaptConfig
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.methods import METHODS, FitContext, FittedMethod
from selftpt.methods.visdesc import VISDESC, VisDescConfig, relative_clause
from tests.helpers.commands import Run, refused
from tests.helpers.folders import make_model, make_photos
from tests.helpers.models import Small, model, relative, small
from tests.oracle import described

NAMES = ["cat", "red_kite", "bird on  the lake"]
DESCRIBED = {
    "Cat": ["a tree", "often on the road", "red rain"],
    "red kite": ["used in the wind"],
    "bird on the lake": ["blue", "has rice and corn"],
}
CLEAN = ["cat", "red kite", "bird on the lake"]


def classifier(descriptors: Path, names: list[str] = NAMES, tiny: Small | None = None) -> Classifier:
    context = FitContext(model() if tiny is None else tiny.model)
    found = VISDESC.fit(context, VisDescConfig(str(descriptors))).for_classes(names, "a photo of a {}.").classifier
    assert found is not None
    return found


def images(small: Small, count: int = 3) -> Tensor:
    """Return L2-normalised features [N, D]."""
    drawn = torch.randn(count, small.spec.dimension, generator=torch.Generator().manual_seed(0))
    return F.normalize(drawn.to(small.embedding.dtype), dim=-1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "descriptors.json"
    path.write_text(json.dumps({**DESCRIBED, "dog": []}))
    return path


@pytest.mark.parametrize("kind", ["vit", "layerscale", "worldwide", "siglip"])
def test_logits_are_mean_cosines_of_the_sentences(kind: str, file: Path) -> None:
    tiny = small(kind, torch.float64)
    found = classifier(file, tiny=tiny)(images(tiny)[:, None])
    sentences = [[f"{{}}, {described.clause(one)}" for one in some] for some in DESCRIBED.values()]
    expected = described.probabilities(tiny, images(tiny), CLEAN, sentences, tiny.model.scale)
    assert relative(found, expected) < 1e-9


@settings(max_examples=50, deadline=None)
@given(st.text() | st.sampled_from(["", "a", "an oar", "antlers", "used", "has", "hash", "may", "can", "often"]))
def test_descriptors_are_joined_as_in_the_authors_code(descriptor: str) -> None:
    assert relative_clause(descriptor) == described.clause(descriptor)


def test_name_and_descriptor_are_tokenised_together(tmp_path: Path) -> None:
    """CLIP has one token for a full stop and a following comma."""
    tiny = small("vit", torch.float64)
    assert len(tiny.encode("cat etc.,")) < len(tiny.encode("cat etc.")) + len(tiny.encode(","))
    path = tmp_path / "stops.json"
    path.write_text(json.dumps({"cat etc.": ["red rain"], "dog": ["snow"]}))
    found = classifier(path, ["cat etc.", "dog"], tiny)(images(tiny)[:, None])
    sentences = [["{}, which has red rain"], ["{}, which has snow"]]
    expected = described.probabilities(tiny, images(tiny), ["cat etc.", "dog"], sentences, tiny.model.scale)
    assert relative(found, expected) < 1e-9


def test_class_without_descriptors_gets_one_sentence(file: Path) -> None:
    tiny = small("vit", torch.float64)
    found = classifier(file, ["dog", "cat"], tiny)(images(tiny)[:, None])
    sentences = [["{}, which has"], [f"{{}}, {described.clause(one)}" for one in DESCRIBED["Cat"]]]
    expected = described.probabilities(tiny, images(tiny), ["dog", "cat"], sentences, tiny.model.scale)
    assert relative(found, expected) < 1e-9


def test_chunked_sentences_equal_unchunked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = small("vit", torch.float64)
    whole = classifier(file, tiny=tiny)
    monkeypatch.setattr(AdaptConfig, "chunk", 2)
    monkeypatch.setattr("selftpt.models.text.NO_GRAPH_CHUNK", 2)
    chunked = classifier(file, tiny=tiny)
    assert relative(chunked.weights, whole.weights) < 1e-9


def test_sentence_that_is_too_long_is_truncated(tmp_path: Path) -> None:
    """A context length of 32 has 30 tokens between the start and end tokens."""
    tiny = small("layerscale", torch.float64)
    path = tmp_path / "long.json"
    path.write_text(json.dumps({"cat": [" ".join(["red"] * 40), "sun"], "dog": ["snow"]}))
    with pytest.warns(SelfTPTWarning, match="1 of 3 sentences are truncated: this model reads 32 tokens"):
        found = classifier(path, ["cat", "dog"], tiny)
    cut = "{}, which has " + " ".join(["red"] * 26)  # 30 tokens with `cat`
    sentences = [[cut, "{}, which has sun"], ["{}, which has snow"]]
    expected = described.probabilities(tiny, images(tiny), ["cat", "dog"], sentences, tiny.model.scale)
    assert relative(found(images(tiny)[:, None]), expected) < 1e-9


def test_file_with_all_names_is_chosen_from_a_folder(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in {
        "a": {**DESCRIBED, "cat": ["sun"], "dog": ["moon"]},  # has all names too, and more
        "b": DESCRIBED,
        "c": {"cat": ["rain"], "red kite": ["snow"]},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "README.md").write_text("no descriptors")
    found, expected = classifier(folder), classifier(file)
    assert torch.equal(found.weights, expected.weights)
    (folder / "b.json").unlink()
    (folder / "a.json").unlink()
    with pytest.raises(SelfTPTError, match=r"c\.json, lacks: 'bird on  the lake', 'lion'$"):
        classifier(folder, [*NAMES, "lion"])
    with pytest.raises(SelfTPTError, match=r"lacks: 'bird on  the lake', '1', '2', '3', '4', \.\.\.$"):
        classifier(folder, [*NAMES, *"1234567"])


@pytest.mark.parametrize("wrong", ["", "{", "[]", '{"cat": "red"}', '{"cat": [1]}'])
def test_invalid_descriptor_files_are_refused(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(wrong)
    with pytest.raises(SelfTPTError, match=r"wrong\.json"):
        classifier(path)


def test_lines_with_descriptions_equal_json(tmp_path: Path) -> None:
    lines, as_json = tmp_path / "lines.txt", tmp_path / "same.json"
    lines.write_text("cat: red fur\nred kite: wide: wings\n\ncat: whiskers\n")
    as_json.write_text(json.dumps({"cat": ["red fur", "whiskers"], "red kite": ["wide: wings"]}))
    names = ["cat", "red kite"]
    assert torch.equal(classifier(lines, names).weights, classifier(as_json, names).weights)
    lines.write_text("cat: red fur\nred kite\n")
    with pytest.raises(SelfTPTError, match="lacks: 'red kite'"):
        classifier(lines, names)
    lines.write_bytes(b"cat: \xff")
    with pytest.raises(SelfTPTError, match=r"lines\.txt must be a text file in UTF-8"):
        classifier(lines, names)


def test_missing_descriptors_are_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(SelfTPTError, match="--set descriptors=FILE_OR_FOLDER"):
        VISDESC.fit(FitContext(model()), VisDescConfig())
    with pytest.raises(SelfTPTError, match="cannot read the descriptors"):
        classifier(tmp_path / "nowhere.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SelfTPTError, match="of descriptors"):
        classifier(tmp_path / "empty")
    with pytest.raises(SelfTPTError, match="give at least two"):
        classifier(file, ["cat"])
    with pytest.raises(SelfTPTError, match="class name 2 of 2 is empty"):
        classifier(file, ["cat", "_"])


def test_descriptor_with_a_special_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "marks.json"
    path.write_text(json.dumps({"cat": ["<end_of_text>"], "dog": []}))
    with pytest.raises(SelfTPTError, match="a special token of the tokenizer"):
        classifier(path, ["cat", "dog"])


def test_classifier_is_saved_and_loaded(file: Path, tmp_path: Path) -> None:
    found = classifier(file)
    assert found.names == tuple(CLEAN)
    found.save(tmp_path / "c.safetensors")
    again = Classifier.load(tmp_path / "c.safetensors", model())
    features = images(small("vit"))[:, None]
    assert torch.equal(again(features), found(features))
    assert (found.weights.norm(dim=-1) < 1).any(), "means of L2-normalised vectors are shorter"


def test_fitted_method_does_not_read_the_files_again(file: Path, tmp_path: Path) -> None:
    fitted = VISDESC.fit(FitContext(model()), VisDescConfig(str(file)))
    expected = classifier(file).weights
    fitted.save(tmp_path / "fitted.safetensors")
    file.unlink()
    again = FittedMethod.load(tmp_path / "fitted.safetensors", model())
    for one in (fitted, again):
        found = one.for_classes(NAMES).classifier
        assert found is not None
        assert torch.equal(found.weights, expected)


@pytest.mark.parametrize("wrong", [1, None, Path("descriptors.json")])
def test_invalid_configuration_is_refused(wrong: Any) -> None:
    with pytest.raises(SelfTPTError, match=r"VisDescConfig\.descriptors must be"):
        VisDescConfig(wrong)


def test_method_is_registered() -> None:
    assert METHODS["visdesc"] is VISDESC
    assert VISDESC.cost(VISDESC.config) == "1 view"


def test_predict_command_runs_visdesc(run: Run, file: Path, tmp_path: Path) -> None:
    photos, weights = make_photos(tmp_path / "photos"), make_model(tmp_path / "model")
    command = ["predict", photos, "--method", "visdesc", "--names", "cat,red kite", "--model", weights]
    refused(run(*command), "visdesc needs descriptors: --set descriptors=FILE_OR_FOLDER")
    answer = run(*command, "--set", f"descriptors={file}", "--json")
    assert answer.code == 0, answer.err
    assert len(answer.out.splitlines()) == 9
    names = tmp_path / "names.txt"
    names.write_text("cat: whiskers\ncat: a tail\nred kite: wings\n")
    by_set = tmp_path / "same.json"
    by_set.write_text(json.dumps({"cat": ["whiskers", "a tail"], "red kite": ["wings"]}))
    expected = run(*command, "--set", f"descriptors={by_set}", "--json").out
    command = ["predict", photos, "--method", "visdesc", "--model", weights, "--names-file", names, "--json"]
    assert run(*command).out == expected
