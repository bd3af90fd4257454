"""Stage 3: `Classifier.predict`, `iter_predict` and `predict_proba`, Self-TPT-v, and classifier files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import random
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor

import selftpt.classifier
from selftpt.classifier import Classifier, Prediction, merge_views
from selftpt.config import PredictConfig
from selftpt.data.decoding import ImageError, open_image
from selftpt.data.views import LazyImage, image_and_crops
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.files import read_file, write_tensors
from selftpt.models import Model, ModelId
from tests.helpers import image_files
from tests.helpers.models import model, small

NAMES = ("cat", "dog", "Éléphant", "猫", "fish")


@functools.cache
def classifier() -> Classifier:
    """Return a classifier whose class vectors separate images; text features of a random model do not."""
    own = model()
    features = own.encode_images(torch.stack([own.preprocess(image_files.noise(100 + i)) for i in range(len(NAMES))]))
    weights = F.normalize(features - features.mean(0), dim=-1)
    return Classifier(NAMES, weights, own.scale, own.id, {"note": "a test"}, own)


def probabilities_of(prediction: Prediction) -> Tensor:
    """Return the probabilities of a prediction in class order."""
    assert prediction.names == tuple(NAMES[i] for i in prediction.labels)
    assert list(prediction.probabilities) == sorted(prediction.probabilities, reverse=True)
    return torch.tensor([prediction.probabilities[prediction.labels.index(i)] for i in range(len(NAMES))])


def matrix(predictions: Iterable[Prediction]) -> Tensor:
    """Return the probabilities [N, C] of predictions in class order."""
    return torch.stack([probabilities_of(prediction) for prediction in predictions])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return image_files.noises(tmp_path_factory.mktemp("images"), 7)


def views(count: int, **more: Any) -> PredictConfig:
    return PredictConfig(views=count, **more)


def test_probabilities_equal_equation_1(paths: list[Path]) -> None:
    """The reference uses open_clip's preprocessing and image tower, one image at a time."""
    made, clip = classifier(), small("vit").clip
    transform = image_transform_v2(PreprocessCfg(size=32), is_train=False)
    rows = []
    for prediction, path in zip(made.predict(paths), paths, strict=True):
        with torch.no_grad():
            feature = clip.encode_image(transform(Image.open(path))[None])[0].tolist()
        length = math.sqrt(sum(x * x for x in feature))
        logits = [
            made.scale * sum(x * w for x, w in zip(feature, row, strict=True)) / length for row in made.weights.tolist()
        ]
        total = sum(math.exp(logit) for logit in logits)
        rows.append([math.exp(logit) / total for logit in logits])
        assert prediction.path == str(path)
        torch.testing.assert_close(probabilities_of(prediction), torch.tensor(rows[-1]), rtol=0, atol=1e-5)
    assert (torch.tensor(rows).std(0) > 1e-2).all(), "the model does not distinguish the images"


def test_every_kind_of_image_gives_the_same_prediction(paths: list[Path]) -> None:
    """One image gives one prediction, a list gives a list; only a path is reported as a path."""
    made, path = classifier(), paths[1]
    image = open_image(path)
    array = np.asarray(image)
    pixels = torch.from_numpy(array.copy()).permute(2, 0, 1)
    normalized = model().preprocess.normalize(model().preprocess(image)[None])[0]
    expected = matrix(made.predict([path]))
    inputs: list[tuple[Any, str | None]] = [(str(path), str(path)), (path, str(path))]
    inputs += [(image, None), (array, None), (pixels, None), (normalized, None)]
    for given_image, reported in inputs:
        single = made.predict(given_image)
        assert isinstance(single, Prediction)
        for found in (single, *made.predict([given_image]), *made.predict(iter([given_image]))):
            assert found.path == reported
            torch.testing.assert_close(probabilities_of(found)[None], expected, rtol=0, atol=1e-6)
    for batch in (torch.stack([pixels, pixels.flip(1)]), np.stack([array, array[::-1]])):
        found = made.predict(batch)
        assert [p.index for p in found] == [0, 1]
        torch.testing.assert_close(matrix(found[:1]), expected, rtol=0, atol=1e-6)


def test_array_of_paths_is_a_list_of_images(paths: list[Path]) -> None:
    expected = classifier().predict(paths)
    assert classifier().predict(np.array([str(path) for path in paths])) == expected
    assert classifier().predict(np.array(paths, dtype=object)) == expected


def test_prediction_names_its_best_class(paths: list[Path]) -> None:
    prediction = classifier().predict(paths[2], top=2)
    assert (prediction.name, prediction.probability) == (prediction.names[0], prediction.probabilities[0])
    assert repr(prediction) == f"Prediction({prediction.name!r}, {prediction.probability:.1%}, path={str(paths[2])!r})"


def test_predict_proba_is_in_input_order_with_nan_for_unusable_images(paths: list[Path], tmp_path: Path) -> None:
    made, errors = classifier(), list[ImageError]()
    mixed = [paths[0], tmp_path / "none.jpg", paths[1]]
    found = made.predict_proba(mixed, on_error=errors.append)
    assert (found.shape, found.dtype) == ((3, len(NAMES)), np.float32)
    assert np.isnan(found).tolist() == [[False] * 5, [True] * 5, [False] * 5]
    torch.testing.assert_close(torch.from_numpy(found[[0, 2]]), matrix(made.predict(paths[:2])), rtol=0, atol=1e-6)
    assert len(errors) == 1
    assert made.predict_proba(paths[0]).shape == (1, len(NAMES))
    assert made.predict_proba([]).shape == (0, len(NAMES))
    with pytest.raises(SelfTPTError, match=r"none\.jpg: no such file"):
        made.predict_proba(tmp_path / "none.jpg")


def test_predictions_keep_the_position_of_their_image(paths: list[Path], tmp_path: Path) -> None:
    mixed = [tmp_path / "none.jpg", paths[0], paths[1]]
    found = classifier().predict(mixed, on_error=lambda error: None)
    assert [(p.index, p.path) for p in found] == [(1, str(paths[0])), (2, str(paths[1]))]


@pytest.mark.parametrize("images", [5, None, b"a.jpg", 1.5])
@pytest.mark.parametrize("method", ["predict", "iter_predict", "predict_proba"])
def test_input_that_is_not_an_image_is_refused_at_the_call(images: Any, method: str) -> None:
    with pytest.raises(SelfTPTError, match=f"images must be .* not {type(images).__name__}"):
        getattr(classifier(), method)(images)


@pytest.mark.parametrize(("count", "batch", "sizes"), [(1, 3, [3, 3, 1]), (4, 8, [8, 8, 8, 4]), (5, 2, [2, 2, 1] * 7)])
def test_image_tower_encodes_at_most_one_batch_at_once(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, count: int, batch: int, sizes: list[int]
) -> None:
    encoded, own = [], model()
    encode = own.encode_images
    monkeypatch.setattr(own, "encode_images", lambda pixels: encoded.append(len(pixels)) or encode(pixels))
    classifier().predict(paths, config=views(count, batch=batch))
    assert encoded == sizes


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    stored, exif = image_files.turned(image_files.noise(0, 50, 30), 6)
    stored.save(tmp_path / "turned.png", exif=exif)
    found = matrix(classifier().predict([tmp_path / "turned.png", image_files.noise(0, 50, 30), stored]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
    assert (found[0] - found[2]).abs().max() > 1e-3


def test_preprocessed_tensors_can_share_a_batch_with_files(paths: list[Path]) -> None:
    made, preprocess = classifier(), model().preprocess
    floats = [preprocess.normalize(preprocess(open_image(path))[None])[0] for path in paths]
    mixed: list[Any] = [paths[0], floats[1], open_image(paths[2]), floats[3].double(), paths[4], *floats[5:]]
    torch.testing.assert_close(matrix(made.predict(mixed)), matrix(made.predict(paths)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_prediction_does_not_depend_on_the_rest_of_the_batch(paths: list[Path], count: int, batch: int) -> None:
    made = classifier()
    alone = matrix(made.predict(path, config=views(count)) for path in paths)
    together = matrix(made.predict(paths, config=views(count, batch=batch)))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    backwards = matrix(made.predict(paths[::-1], config=views(count, batch=batch)))
    torch.testing.assert_close(backwards.flip(0), alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("count", "batch", "at_once"), [(1, 4, 4), (8, 16, 2), (8, 4, 1)])
def test_iter_predict_reads_images_as_they_are_needed(count: int, batch: int, at_once: int) -> None:
    """The input is endless. While one batch is encoded, two more are prepared."""
    taken = []

    def endless() -> Iterator[Image.Image]:
        for seed in itertools.count():
            taken.append(seed)
            yield image_files.noise(seed % 5)

    predictions = classifier().iter_predict(endless(), config=views(count, batch=batch))
    assert taken == []
    next(predictions)
    assert len(taken) == 3 * at_once
    found = matrix(itertools.islice(predictions, 10))
    predictions.close()  # type: ignore[attr-defined]
    torch.testing.assert_close(found[:5], found[5:], rtol=0, atol=1e-6)


def test_predictions_are_in_input_order_if_an_image_is_slow(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first image is decoded after the second."""
    second, real = threading.Event(), selftpt.data.views.open_image

    def slow(source: Any, *limits: Any) -> Image.Image:
        if source == paths[0]:
            second.wait(5)
        if source == paths[1]:
            second.set()
        return real(source, *limits)

    monkeypatch.setattr(selftpt.data.views, "open_image", slow)
    assert [p.path for p in classifier().predict(paths)] == [str(path) for path in paths]


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_unusable_images_are_reported_and_left_out(tmp_path: Path, paths: list[Path], batch: int) -> None:
    text, strip = tmp_path / "text.jpg", tmp_path / "strip.png"
    text.write_text("no image")
    Image.new("1", (30_000, 1)).save(strip)
    bad: list[Any] = [
        text,
        strip,
        tmp_path / "none.jpg",
        Image.new("RGB", (0, 0)),
        torch.zeros(3, 0, 9, dtype=torch.uint8),
        torch.zeros(1, 9, 9, dtype=torch.uint8),
        torch.zeros(9, 9, dtype=torch.uint8),
        torch.zeros(3, 9, 9, dtype=torch.int64),
        torch.zeros(3, 9, 9),
    ]
    mix = [item for pair in itertools.zip_longest(bad, paths) for item in pair if item is not None]
    errors: list[str] = []
    config = PredictConfig(batch=batch)
    found = classifier().predict(mix, config=config, on_error=lambda error: errors.append(str(error)))
    assert [p.path for p in found] == [str(path) for path in paths]
    torch.testing.assert_close(matrix(found), matrix(classifier().predict(paths)), rtol=0, atol=1e-6)
    words = [str(text), "30000 x 1", "none.jpg: no such file", "0 x 0"]
    words += ["9 x 0", "[1, 9, 9]", "[9, 9]", "int64", "[3, 32, 32]"]
    assert len(errors) == len(bad)
    for line, word in zip(errors, words, strict=True):
        assert word in line
        assert "\n" not in line


def test_folders_and_patterns_are_expanded(paths: list[Path]) -> None:
    folder = paths[0].parent
    inside = [str(path) for path in sorted(paths)]
    assert [p.path for p in classifier().predict(folder)] == inside
    assert [p.path for p in classifier().predict([f"{folder}/*", paths[0]])] == [*inside, str(paths[0])]


def test_unusable_image_of_a_list_is_a_warning_by_default(tmp_path: Path) -> None:
    with pytest.warns(SelfTPTWarning, match=r"none\.jpg: no such file"):
        assert classifier().predict([tmp_path / "none.jpg"]) == []


def test_single_unusable_image_is_an_error(tmp_path: Path, paths: list[Path]) -> None:
    for image, config, words in (
        (tmp_path / "none.jpg", None, r"none\.jpg: no such file"),
        (paths[0], PredictConfig(max_megapixels=1e-3), "over the limit of 0.001"),
        (torch.zeros(3, 32, 32), views(2), "no crops can be made of it"),
    ):
        with pytest.raises(SelfTPTError, match=words):
            classifier().predict(image, config=config)


@pytest.mark.parametrize(("top", "count"), [(1, 1), (3, 3), (5, 5), (99, 5)])
def test_top_limits_the_classes_of_a_prediction(paths: list[Path], top: int, count: int) -> None:
    made = classifier()
    everything = made.predict(paths)
    for found in (made.predict(paths, top=top), made.predict(paths, config=PredictConfig(top=top))):
        for prediction, full in zip(found, everything, strict=True):
            assert prediction.names == full.names[:count]
            assert prediction.labels == full.labels[:count]
            assert prediction.probabilities == pytest.approx(full.probabilities[:count], abs=1e-6)
    assert abs(sum(everything[0].probabilities) - 1) < 1e-6
    assert len(made.predict(paths[0], top=2, config=PredictConfig(top=4)).names) == 2


def test_invalid_top_is_refused_at_the_call(paths: list[Path]) -> None:
    for method in (classifier().predict, classifier().iter_predict):
        with pytest.raises(SelfTPTError, match="top must be an integer above 0"):
            method(paths, top=0)


# Self-TPT-v


def make_views(image: Any, config: PredictConfig) -> Tensor:
    """Return the views [V, 3, S, S] of an image."""
    specs = image_and_crops(config.views, seed=config.seed)
    return torch.cat([spec.make_views(model().preprocess, LazyImage(image)) for spec in specs])


def test_first_view_is_the_image_itself() -> None:
    image, own = image_files.noise(0, 90, 50), model()
    made = make_views(image, views(8))
    assert made.shape == (8, 3, 32, 32)
    assert made.dtype == torch.uint8
    assert torch.equal(made[0], own.preprocess(image))
    assert torch.equal(made[1:], own.preprocess.views(image, 7, random.Random(0), whole=False))
    assert torch.equal(make_views(image, views(1)), made[:1])


def test_views_depend_on_the_seed(paths: list[Path]) -> None:
    made = classifier()
    first = matrix(made.predict(paths, config=views(4, seed=1)))
    assert torch.equal(first, matrix(made.predict(paths, config=views(4, seed=1))))
    other = matrix(made.predict(paths, config=views(4, seed=2)))
    assert ((first - other).abs().amax(1) > 1e-5).all()


@pytest.mark.parametrize("confidence_ratio", [1.0, 0.5, 0.1])
def test_merged_views_equal_views_classified_one_by_one(paths: list[Path], confidence_ratio: float) -> None:
    """All, half or one of the views are averaged."""
    made, own, config = classifier(), model(), views(8, confidence_ratio=confidence_ratio)
    for path, found in zip(paths, made.predict(paths, config=config), strict=True):
        rows = [made.probabilities(own.encode_images(view[None]))[0] for view in make_views(path, config)]
        rows.sort(key=lambda row: -sum(p * math.log(p) for p in row.tolist()))
        chosen = rows[: {1.0: 8, 0.5: 4, 0.1: 1}[confidence_ratio]]
        torch.testing.assert_close(probabilities_of(found), torch.stack(chosen).mean(0), rtol=0, atol=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), max_size=2),
    count=st.integers(1, 9),
    classes=st.integers(1, 6),
    confidence_ratio=st.floats(0.01, 1),
    seed=st.integers(0, 10**6),
)
def test_merge_views_equals_the_mean_over_views_of_lowest_entropy(
    shape: list[int], count: int, classes: int, confidence_ratio: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, count, classes, generator=generator, dtype=torch.float64)
    sharpness = torch.tensor([0.1, 1, 5000])[torch.randint(3, (*shape, count, 1), generator=generator)]
    probabilities = (sharpness * drawn).softmax(-1)
    found = merge_views(probabilities, confidence_ratio)
    assert found.shape == (*shape, classes)
    for rows, merged in zip(probabilities.view(-1, count, classes).tolist(), found.view(-1, classes), strict=True):
        ranked = sorted((-sum(p * math.log(p) for p in row if p > 0), i) for i, row in enumerate(rows))
        keep = max(1, int(confidence_ratio * count))
        if keep < count and ranked[keep][0] - ranked[keep - 1][0] < 1e-9:
            continue  # in a tie, either view may be kept
        chosen = [rows[i] for _, i in ranked[:keep]]
        expected = [sum(column) / keep for column in zip(*chosen, strict=True)]
        assert merged.tolist() == pytest.approx(expected, abs=1e-9)


def test_view_with_probability_one_has_the_lowest_entropy() -> None:
    merged = merge_views(torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0], [0.4, 0.3, 0.3], [0.9, 0.1, 0.0]]), 0.25)
    assert merged.tolist() == [0, 0, 1]


# Files


def test_loaded_classifier_equals_the_saved_one(tmp_path: Path, paths: list[Path]) -> None:
    made, file = classifier(), tmp_path / "new" / "five.safetensors"
    made.save(file)
    for loaded in (Classifier.load(file, model()), Classifier.load(str(file), model())):
        assert (loaded.names, loaded.scale, loaded.model_id) == (made.names, made.scale, made.model_id)
        assert loaded.origin == {"note": "a test"}
        assert torch.equal(loaded.weights, made.weights)
        assert loaded.predict(paths) == made.predict(paths)
    assert read_file(file)[0]["random_init"] is True
    assert list(file.parent.iterdir()) == [file]


def test_classifier_of_another_model_is_refused(tmp_path: Path, paths: list[Path]) -> None:
    """Both when the file is loaded and when it is used; the message names both models."""
    file = tmp_path / "five.safetensors"
    classifier().save(file)
    other = model("one-layer")
    both = rf"vit \(random\) \[{model().id.digest[:8]}\].*one-layer \(random\) \[{other.id.digest[:8]}\]"
    with pytest.raises(SelfTPTError, match=both) as caught:
        Classifier.load(file, other)
    assert str(file) in str(caught.value)
    with pytest.raises(SelfTPTError, match=both):
        dataclasses.replace(classifier(), model=other).predict(paths)


def test_recorded_model_is_loaded_on_first_use(
    tmp_path: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, requested = tmp_path / "five.safetensors", []

    def load(model_id: ModelId, what: str) -> Model:
        requested.append((model_id.name, model_id.pretrained))
        return model()

    monkeypatch.setattr(selftpt.classifier, "load_recorded_model", load)
    classifier().save(file)
    loaded = Classifier.load(file)
    assert loaded.model is None
    assert requested == []
    assert loaded.predict(paths) == classifier().predict(paths)
    assert requested == [("vit", "random")]
    other = dataclasses.replace(loaded, model_id=ModelId("vit", "random", "0" * 32))
    with pytest.raises(SelfTPTError, match="was made with vit"):  # same name, other weights
        other.predict(paths)


def test_recorded_model_that_is_not_published_is_not_loaded(tmp_path: Path, paths: list[Path]) -> None:
    file = tmp_path / "five.safetensors"
    dataclasses.replace(classifier(), model_id=ModelId("hf-hub:org/repo", None, "0" * 32)).save(file)
    with pytest.raises(SelfTPTError, match=r"hf-hub:org/repo.*only when you name it.*load_model\('hf-hub:org/repo'\)"):
        Classifier.load(file).predict(paths)


@pytest.mark.parametrize("change", [{"name": ["a"]}, {"pretrained": 3}, {"digest": None}, {"name": None}])
def test_recorded_model_must_consist_of_strings(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "five.safetensors"
    classifier().save(file)
    header, tensors = read_file(file)
    header["model"] |= change
    write_tensors(file, "classifier", tensors, header)
    with pytest.raises(SelfTPTError, match=f"{next(iter(change))} must be "):
        Classifier.load(file)


@pytest.mark.parametrize("part", ["model", "names", "scale", "origin", "weights"])
def test_file_with_missing_parts_is_refused(tmp_path: Path, part: str) -> None:
    file = tmp_path / "five.safetensors"
    classifier().save(file)
    header, tensors = read_file(file)
    header.pop(part, None)
    tensors.pop(part, None)
    write_tensors(file, "classifier", tensors, header)
    with pytest.raises(SelfTPTError, match=f"not a valid classifier file: .*{part}") as caught:
        Classifier.load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("header", "tensors", "words"),
    [
        ({"names": ["a"]}, {}, "1 names for 5 class vectors"),
        ({"names": "abcde"}, {}, "names must be list"),
        ({"names": ["a", "b", "c", "d", 5]}, {}, "class name 5 of 5 must be a string"),
        ({"names": ["a", "b", "c", "d", "\0"]}, {}, "control character"),
        ({"scale": 0}, {}, "the scale must be above 0"),
        ({"scale": -1.5}, {}, "the scale must be above 0"),
        ({"scale": "1"}, {}, "scale must be a number"),
        ({"origin": []}, {}, "origin must be an object"),
        ({"model": {"name": "vit", "digest": "0"}}, {}, "model has no pretrained"),
        ({"model": {"name": ["vit"], "pretrained": None, "digest": "0"}}, {}, "name must be a string"),
        ({"more": 1}, {}, "unknown entry, 'more'"),
        ({}, {"more": torch.zeros(1)}, "its tensors must be weights"),
        ({}, {"weights": torch.zeros(5)}, "the shape of weights must be C D"),
        ({}, {"weights": torch.zeros(5, 24).double()}, "float32, not of float64"),
        ({}, {"weights": torch.full((5, 24), math.nan)}, "not finite"),
    ],
)
def test_signed_file_with_invalid_content_is_refused_in_one_line(
    tmp_path: Path, header: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    file = tmp_path / "five.safetensors"
    classifier().save(file)
    found, kept = read_file(file)
    write_tensors(file, "classifier", {**kept, **tensors}, {**found, **header})
    with pytest.raises(SelfTPTError) as caught:
        Classifier.load(file, model())
    assert str(caught.value).startswith(f"{file} is not a valid classifier file: ")
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def test_class_vectors_of_another_dimension_are_refused(tmp_path: Path, paths: list[Path]) -> None:
    """Both when the file is loaded with a model and when the model is given later."""
    file = tmp_path / "five.safetensors"
    classifier().save(file)
    header, _ = read_file(file)
    write_tensors(file, "classifier", {"weights": torch.zeros(5, 3)}, header)
    with pytest.raises(SelfTPTError, match="have 3 dimensions"):
        Classifier.load(file, model())
    with pytest.raises(SelfTPTError, match="have 3 dimensions"):
        dataclasses.replace(Classifier.load(file), model=model()).predict(paths)


def test_classifier_of_format_1_is_read(tmp_path: Path) -> None:
    made, file = classifier(), tmp_path / "five.safetensors"
    made.save(file)
    header, tensors = read_file(file)
    header |= {"format": 1}
    del header["tensors"]
    safetensors.torch.save_file(tensors, file, {"selftpt": json.dumps(header)})
    loaded = Classifier.load(file, model())
    assert loaded.names == made.names
    assert torch.equal(loaded.weights, made.weights)


def test_invalid_weights_are_not_saved(tmp_path: Path) -> None:
    for weights in (torch.full((5, 24), math.nan), torch.zeros(5, 24).half()):
        with pytest.raises(SelfTPTError, match="cannot write"):
            dataclasses.replace(classifier(), weights=weights).save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_prompt_file_is_not_loaded_as_a_classifier(tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    write_tensors(file, "prompt", {"context": torch.zeros(2, 4)}, {})
    with pytest.raises(SelfTPTError, match="holds a prompt, not a classifier"):
        Classifier.load(file)
