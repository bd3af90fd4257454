"""Properties of every method of `METHODS`: seeds, files, class lists of any length, batches, frozen weights."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from selftpt import training
from selftpt.adaptation import adapt
from selftpt.classifier import Classifier
from selftpt.config import Config, kind_of
from selftpt.data.cache import Cache
from selftpt.data.decoding import ImageError
from selftpt.data.features import Block, FeatureProvider
from selftpt.data.sources import Source, images_in
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.methods import METHODS, FitContext, FittedMethod, Predictor
from selftpt.methods.selection import configure
from selftpt.methods.self_tpt import prompt_of
from selftpt.models import Model
from selftpt.models.loading import _digest
from tests.helpers.commands import Run, refused
from tests.helpers.folders import make_generated, make_model, make_photos
from tests.helpers.methods import raise_error
from tests.helpers.models import model

NAMES = ("red fox", "blue whale", "kite")
TEMPLATE = "a photo of a {}."
THINGS = tuple(f"thing {i}" for i in range(1000))
SMALL = {  # applied to every method that has the setting
    "learn.epochs": 2,
    "learn.batch": 2,
    "batch": 2,
    "coop.epochs": 2,
    "views": 8,
    "prompts": 4,
    "pairs": 2,
}

every_method = pytest.mark.parametrize("name", METHODS)
SEEDS = {name: "learn.seed" if method.needs_labels else "seed" for name, method in METHODS.items() if method.stochastic}


@dataclass
class Data:
    """Labelled training images, and test images."""

    folder: Path
    source: Source
    images: list[Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("data")
    source = Source.from_folder(make_photos(folder / "source", per_class=2))
    (folder / "descriptors.json").write_text(json.dumps({name: ["red", "a tail"] for name in (*NAMES, *THINGS)}))
    images = images_in(make_photos(folder / "test", ("x", "y"), per_class=2))
    make_generated(folder / "generated", images, SMALL["views"] - 1)
    return Data(folder, source, images)


def small_config(name: str, data: Data, **more: Any) -> Any:
    method = METHODS[name]
    own = {key: str(data.folder / file) for key, file in (("descriptors", "descriptors.json"), ("generated",) * 2)}
    changes = {key: value for key, value in (SMALL | own).items() if kind_of(method.config, key.split("."))}
    return configure(method, changes | more)


def blocks_of(fitted: FittedMethod, images: list[Path], on_error: Any = raise_error) -> list[Block]:
    """Return the blocks of views that a fitted method gets."""
    specs = fitted.method.views(fitted.config)
    provider = FeatureProvider(fitted.model, specs, Cache(), fixed_batch=True, on_error=on_error)
    return list(provider.blocks(images, pixels=fitted.inputs == "pixels"))


class FittedCase:
    """A method fitted in a folder, with its probabilities for the test images."""

    def __init__(self, name: str, data: Data, folder: Path, own: Model | None = None, **changes: Any) -> None:
        self.method, self.model, self.data = METHODS[name], own or model(), data
        self.config = small_config(name, data, **changes)
        source = data.source if self.method.needs_labels else None
        context = FitContext(self.model, source, folder, Cache(), on_error=raise_error)
        self.fitted = self.method.fit(context, self.config)

    def views(self) -> Tensor:
        """Return the views [N, V, ...] that the method gets."""
        return torch.cat([block.views for block in blocks_of(self.fitted, self.data.images)])

    def predictor(self, names: tuple[str, ...] = NAMES) -> Predictor:
        return self.fitted.for_classes(names, TEMPLATE)

    def probabilities(self, names: tuple[str, ...] = NAMES) -> Tensor:
        return self.predictor(names)(self.views())


def check_probabilities(answer: Tensor, shape: tuple[int, int]) -> None:
    assert tuple(answer.shape) == shape
    assert answer.dtype == torch.float32
    assert not answer.requires_grad
    assert (answer >= 0).all()
    torch.testing.assert_close(answer.sum(1), torch.ones(len(answer)))


@every_method
def test_same_seed_gives_the_same_probabilities(name: str, data: Data, tmp_path: Path) -> None:
    first = FittedCase(name, data, tmp_path / "first").probabilities()
    check_probabilities(first, (len(data.images), len(NAMES)))
    assert torch.equal(FittedCase(name, data, tmp_path / "second").probabilities(), first)


@pytest.mark.parametrize("name", SEEDS)
def test_another_seed_gives_other_probabilities(name: str, data: Data, tmp_path: Path) -> None:
    answers = [FittedCase(name, data, tmp_path, **{SEEDS[name]: seed}).probabilities() for seed in (1, 2)]
    assert not torch.equal(*answers)


@every_method
@pytest.mark.parametrize("count", [2, pytest.param(1000, marks=pytest.mark.slow)])
def test_class_lists_of_any_length_are_classified(name: str, count: int, data: Data, tmp_path: Path) -> None:
    """The class names differ from those of the source."""
    answer = FittedCase(name, data, tmp_path).probabilities(THINGS[:count])
    check_probabilities(answer, (len(data.images), count))


@every_method
def test_learned_parameters_are_reused(name: str, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = FittedCase(name, data, tmp_path)
    answer = before.probabilities()

    def never(*_: object) -> None:
        raise AssertionError("it learns again")

    monkeypatch.setattr(training.RunFiles, "finish", never)
    assert torch.equal(FittedCase(name, data, tmp_path).probabilities(), answer)
    classifier = before.predictor().classifier
    if classifier is not None:
        classifier.save(tmp_path / "classifier")
        assert torch.equal(Classifier.load(tmp_path / "classifier", before.model)(before.views()), answer)


@every_method
def test_batch_equals_its_images_one_by_one(name: str, data: Data, tmp_path: Path) -> None:
    """No state is carried over between images."""
    case = FittedCase(name, data, tmp_path)
    predictor, views = case.predictor(), case.views()
    together = predictor(views)
    assert torch.equal(predictor(views), together), "it remembers"
    if case.method.transductive:  # it adapts to all images together
        return
    alone = torch.cat([predictor(one[None]) for one in views])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    turned = predictor(views.flip(0)).flip(0)
    torch.testing.assert_close(turned, together, rtol=0, atol=1e-5)


@every_method
def test_model_is_not_changed(name: str, data: Data, tmp_path: Path) -> None:
    case = FittedCase(name, data, tmp_path)
    clip = case.model.clip
    before, training_mode = _digest(clip, {}), clip.training
    case.probabilities()
    assert _digest(clip, {}) == before
    assert not any(p.requires_grad or p.grad is not None for p in clip.parameters())
    assert clip.training == training_mode
    assert not any(module._forward_hooks for module in clip.modules())


@every_method
def test_method_gives_a_classifier_or_declares_what_it_needs(name: str, data: Data, tmp_path: Path) -> None:
    """A method that needs only class names gives a classifier; the method table declares what any other needs."""
    case = FittedCase(name, data, tmp_path)
    method, cost = case.method, case.method.cost(case.config)
    if case.predictor().classifier is not None:
        assert cost == "1 view"
        assert not method.transductive
    else:
        assert cost != "1 view" or method.transductive or method.inputs != "features"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_model(folder / "model")
    make_photos(folder / "photos", per_class=2)
    return folder


@pytest.fixture
def predict(run: Run, files: Path) -> Callable[..., Any]:
    return functools.partial(run, "predict", files / "photos" / "kite", "--model", files / "model", "--method")


def test_predict_command_runs_a_method(predict: Run, files: Path) -> None:
    answer = predict("clip", "--names", "cat,dog", "--json")
    rows = [json.loads(line) for line in answer.out.splitlines()]
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png"]
    assert all({*row["names"]} == {"cat", "dog"} for row in rows)


def test_predict_command_runs_a_method_that_learns(predict: Run, files: Path) -> None:
    learned = ["coop", "--source", files / "photos", "--set", "learn.epochs=1", "--names", "cat,dog", "--json"]
    first, again = predict(*learned), predict(*learned)
    assert first.code == 0, first.err
    assert first.out == again.out


def test_predict_command_equals_the_library(predict: Run, files: Path) -> None:
    from selftpt.models import load_model

    own = load_model(str(files / "model"), device="cpu")
    for name, template in (("clip", "{} it is."), ("waffleclip", TEMPLATE)):
        predictor = METHODS[name].fit(FitContext(own)).for_classes(["cat", "dog"], template)
        expected = [list(p.probabilities) for p in predictor.predict(images_in(files / "photos" / "kite"))]
        answer = predict(name, "--names", "cat,dog", "--template", template, "--json")
        assert [json.loads(line)["probabilities"] for line in answer.out.splitlines()] == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["clap", "--names", "cat,dog"], ["clap", "clip"]),
        (["clip"], ["--names"]),
        (["coop", "--names", "cat,dog"], ["coop", "--source"]),
        (["clip", "--names", "cat,dog", "--source", "photos"], ["clip", "--source"]),
        (["clip", "--names", "cat,dog", "--set", "learn.lr=1"], ["clip", "learn.lr"]),
        (["clip", "--names", "cat,dog", "--views", "4"], ["--views"]),
        (["waffleclip", "--names", "cat,dog", "--seed", "4"], ["--seed", "--set"]),
        (["lasp", "--names", "cat,dog", "--set", "templates=5"], ["templates", "5"]),
        (["lasp", "--names", "cat,dog", "--set", "templates=[1]"], ["templates", "1"]),
        (["coop", "--names", "cat,dog", "--set", "learn.lr=true"], ["lr", "True"]),
        (["visdesc", "--names", "cat,dog"], ["descriptors"]),
        (["tpt", "--names", "cat,dog", "--set", "lr=1e30"], ["lower the learning rate"]),
        (["clip", "--names", "cat,dog", "--template", "a photo."], ["{}"]),
        (["clip", "--names", "cat,dog", "--classifier", "file"], ["--classifier", "--method"]),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else "",
)
def test_contradictory_options_are_refused(predict: Run, arguments: list[str], words: list[str]) -> None:
    refused(predict(*arguments), *words)


def test_unusable_image_is_left_out(run: Run, files: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path, ("a",), per_class=2)
    (photos / "a" / "0.png").write_text("no image")
    command = ["predict", photos, "--model", files / "model", "--names", "cat,dog", "--json", "--method"]
    for method in (["clip"], ["zero", "--set", "views=2"]):  # one view and two views
        answer = run(*command, *method)
        assert answer.code == 0
        assert [Path(json.loads(line)["path"]).name for line in answer.out.splitlines()] == ["1.png"]
        assert [line for line in answer.err.splitlines() if "0.png" in line][1:] == []
        assert "1 of 2 images were skipped" in answer.err


@pytest.mark.parametrize("method", ["clip", "tda"])
def test_empty_list_of_images_is_refused(run: Run, files: Path, method: str) -> None:
    refused(run("predict", "-", "--model", files / "model", "--method", method, "--names", "cat,dog"), "no image")


@pytest.mark.parametrize("name", ["coop", "kgcoop"])
def test_only_unreadable_images_are_counted(name: str, data: Data, tmp_path: Path) -> None:
    """Images beyond the number of shots are not counted, neither after training nor when the file is reused."""
    config = small_config(name, data, **{"learn.shots": 1})
    for _ in range(2):
        context = FitContext(model(), data.source, tmp_path, Cache(), on_error=raise_error)
        METHODS[name].fit(context, config)
        assert context.unreadable == 0


def test_pixels_are_passed_unchanged(data: Data, tmp_path: Path) -> None:
    """Images that cannot be read are left out."""
    broken = tmp_path / "broken.png"
    broken.write_text("no image")
    errors: list[ImageError] = []
    fitted = dataclasses.replace(METHODS["clip"], inputs="pixels").fit(FitContext(model()))
    blocks = blocks_of(fitted, [data.images[0], broken, *data.images[1:]], errors.append)
    pixels = torch.cat([block.views for block in blocks])
    assert torch.cat([block.indices for block in blocks]).tolist() == [0, 2, 3, 4]
    assert pixels.dtype == torch.uint8
    assert tuple(pixels.shape[:3]) == (4, 1, 3)
    assert len(errors) == 1
    assert "broken.png" in str(errors[0])


@every_method
def test_methods_can_be_pickled(name: str) -> None:
    assert pickle.loads(pickle.dumps(METHODS[name])) == METHODS[name]


@every_method
def test_fitted_methods_can_be_pickled_saved_and_loaded(name: str, data: Data, tmp_path: Path) -> None:
    """The model is not in the file; the predictions are the same."""
    case = FittedCase(name, data, tmp_path / "learned")
    answer = case.probabilities()
    packed = pickle.dumps(case.fitted)
    assert len(packed) < 2_000_000
    case.fitted.save(tmp_path / "fitted.safetensors")
    places = {field.name: getattr(case.config, field.name) for field in dataclasses.fields(case.config)}
    places = {name: value for name, value in places.items() if name in ("descriptors", "generated")}
    copies = [pickle.loads(packed).with_model(case.model)]
    copies.append(FittedMethod.load(tmp_path / "fitted.safetensors", case.model, places))
    for fitted in copies:
        assert fitted.config == case.config
        assert torch.equal(fitted.for_classes(NAMES, TEMPLATE)(case.views()), answer)
    with pytest.raises(SelfTPTError, match="made with vit"):
        pickle.loads(packed).with_model(model("one-layer"))


@every_method
def test_method_table_agrees_with_the_configuration(name: str) -> None:
    method = METHODS[name]
    assert method.needs_labels == (kind_of(method.config, ["learn", "seed"]) is not None)
    assert method.uses_seed == (kind_of(method.config, ["seed"]) is not None)
    assert isinstance(method.config, Config)


def test_single_image_costs_one_forward_pass_of_one_image(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    encode = Model.encode_images

    def counted(self: Model, pixels: Tensor) -> Tensor:
        sizes.append(len(pixels))
        return encode(self, pixels)

    monkeypatch.setattr(Model, "encode_images", counted)
    predictor = METHODS["clip"].fit(FitContext(model())).for_classes(NAMES)
    assert predictor.predict(data.images[0]).path == str(data.images[0])
    classifier = predictor.classifier
    assert classifier is not None
    assert classifier.predict(data.images[0]).path == str(data.images[0])
    assert sizes == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_method
def test_methods_work_without_gradient_mode(name: str, mode: Any, data: Data, tmp_path: Path) -> None:
    expected = FittedCase(name, data, tmp_path / "a").probabilities()
    with mode():
        found = FittedCase(name, data, tmp_path / "b").probabilities()
    assert torch.equal(found, expected)


def test_required_image_tower_is_checked_before_anything_is_learned(data: Data) -> None:
    method = dataclasses.replace(METHODS["coop"], requires="transformer image tower")
    with pytest.raises(SelfTPTError, match="coop needs an open_clip ViT as image tower, and resnet"):
        method.fit(FitContext(model("resnet"), data.source))


def test_unusable_image_in_memory_is_reported_and_skipped(data: Data, tmp_path: Path) -> None:
    truncated = tmp_path / "truncated.jpg"
    truncated.write_bytes(data.images[0].read_bytes()[:200])
    images = [*data.source.images, Image.open(truncated)]
    labels = [data.source.names[label] for label in data.source.labels]
    source = Source.from_images(images, [*labels, labels[0]])
    errors: list[ImageError] = []
    context = FitContext(model(), source, tmp_path, on_error=errors.append)
    METHODS["coop"].fit(context, small_config("coop", data))
    assert len(errors) == context.unreadable == 1


def test_training_without_a_source_is_refused() -> None:
    with pytest.raises(SelfTPTError, match="learns from labelled images: pass a source"):
        METHODS["coop"].training(FitContext(model()))


def test_initial_values_of_a_method_without_parameters_are_refused() -> None:
    with pytest.raises(SelfTPTError, match="tpt learns no parameters from images: remove `initial`"):
        METHODS["tpt"].fit(FitContext(model(), initial={"context": torch.zeros(4, 32)}))


def test_invalid_changes_of_a_loaded_method_are_refused(tmp_path: Path) -> None:
    METHODS["tpt"].fit(FitContext(model())).save(tmp_path / "tpt.safetensors")
    for changes, message in (
        ({"stepz": 2}, "tpt has no setting 'stepz'"),
        ({"steps.lr": 2}, "tpt has no setting 'steps.lr'"),
        ({"confidence_ratio": 2.0}, "^TptConfig.confidence_ratio must be"),
    ):
        with pytest.raises(SelfTPTError, match=message):
            FittedMethod.load(tmp_path / "tpt.safetensors", model(), changes)
    assert FittedMethod.load(tmp_path / "tpt.safetensors", model(), {"steps": 2}).config.steps == 2


def test_self_tpt_starts_from_the_template_of_the_dataset(data: Data) -> None:
    clip, template = model(), "a satellite photo of {}."
    config = small_config("self-tpt", data, own_template=True)
    training = METHODS["self-tpt"].training(FitContext(clip, data.source, template=template), config)
    assert torch.equal(training.parameters["context"], clip.text.embed_words("a satellite photo of"))
    fitted = METHODS["self-tpt"].fit(FitContext(clip, data.source, template=template), config)
    found = fitted.for_classes(NAMES, template).classifier
    expected = adapt(clip, prompt_of(fitted), NAMES, dataclasses.replace(config.adapt, template=template))
    other = fitted.for_classes(NAMES, TEMPLATE).classifier
    assert found is not None
    assert other is not None
    assert torch.equal(found.weights, expected.weights)
    assert not torch.equal(found.weights, other.weights)
    without = METHODS["self-tpt"].training(
        FitContext(clip, data.source, template=template), small_config("self-tpt", data)
    )
    assert torch.equal(without.parameters["context"], clip.text.embed_words("a photo of a"))


def test_read_only_cache_of_learned_parameters_is_read_and_not_changed(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New parameters are not written."""
    config = small_config("kgcoop", data)

    def fit(mode: Any) -> Tensor:
        context = FitContext(model(), data.source, cache=Cache(mode, None, tmp_path), on_error=raise_error)
        return METHODS["kgcoop"].fit(context, config).tensors["context"]

    first = fit("read-only")
    assert list(tmp_path.iterdir()) == []
    expected = fit("on")
    assert torch.equal(first, expected)
    monkeypatch.setattr(FitContext, "features", None)  # training would call it
    assert torch.equal(fit("read-only"), expected)


def test_failing_cache_does_not_stop_training(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that the user gives must be writable; the cache need not be."""
    config, expected = (
        small_config("kgcoop", data),
        METHODS["kgcoop"].fit(FitContext(model(), data.source), small_config("kgcoop", data)),
    )

    def fail(path: Path, *_: Any) -> None:
        raise SelfTPTError(f"cannot write {path}: no space left")

    monkeypatch.setattr("selftpt.training.checkpoints.write_tensors", fail)
    with pytest.warns(SelfTPTWarning, match="not saved: cannot write"):
        found = METHODS["kgcoop"].fit(FitContext(model(), data.source, cache=Cache(folder=tmp_path)), config)
    assert torch.equal(found.tensors["context"], expected.tensors["context"])
    with pytest.raises(SelfTPTError, match="no space left"):
        METHODS["kgcoop"].fit(FitContext(model(), data.source, tmp_path / "folder"), config)


def test_folders_recorded_in_a_file_are_not_used(data: Data, tmp_path: Path) -> None:
    """A folder or repository that is named in an untrusted file is neither read, nor written, nor loaded."""
    case = FittedCase("difftpt", data, tmp_path / "learned")
    case.fitted.save(tmp_path / "fitted")
    loaded = FittedMethod.load(tmp_path / "fitted", case.model)
    assert (loaded.config.generated, loaded.config.diffusion) == ("", "")
    named = FittedMethod.load(tmp_path / "fitted", case.model, {"generated": "folder"})
    assert named.config.generated == "folder"


def test_methods_with_the_same_configuration_have_separate_files(data: Data, tmp_path: Path) -> None:
    def train(context: FitContext, config: Any) -> Any:
        training = METHODS["kgcoop"].train(context, config)  # type: ignore[misc]
        training.state.parameters[0].add_(1)
        return training

    config, context = small_config("kgcoop", data), FitContext(model(), data.source, tmp_path, Cache())
    first = METHODS["kgcoop"].fit(context, config).tensors["context"]
    other = dataclasses.replace(METHODS["kgcoop"], train=train).fit(context, config).tensors["context"]
    assert not torch.equal(first, other)


def test_training_works_in_inference_mode(data: Data) -> None:
    with torch.inference_mode():
        training = METHODS["self-tpt"].training(FitContext(model(), data.source), small_config("self-tpt", data))
        training.step()
    training.step()
    with pytest.raises(SelfTPTError, match="clip does not learn from labelled images"):
        METHODS["clip"].training(FitContext(model()))


@pytest.mark.parametrize("order", [1, -1])
def test_settings_that_depend_on_each_other_are_changed_together(order: int) -> None:
    changes = [("unsure_above", 0.6), ("unsure_below", 0.9)]
    config = configure(METHODS["tda"], dict(changes[::order]))
    assert (config.unsure_above, config.unsure_below) == (0.6, 0.9)
    assert configure(METHODS["proda"], {"prompts": 6, "prompts_per_step": 3}).prompts == 6


def test_predict_iter_predict_and_predict_proba_agree(data: Data, tmp_path: Path) -> None:
    predictor = FittedCase("tpt", data, tmp_path).predictor()
    predictions, probabilities = predictor.predict(data.images), predictor.predict_proba(data.images)
    assert list(predictor.iter_predict(data.images)) == predictions
    assert probabilities.shape == (len(data.images), len(NAMES))
    for prediction, row in zip(predictions, probabilities, strict=True):
        assert row[list(prediction.labels)].tolist() == list(prediction.probabilities)
    assert predictor.predict(data.images[1]) == predictor.predict(data.images[1:2])[0]
    missing = [tmp_path / "none.jpg", data.images[0]]
    assert np.isnan(predictor.predict_proba(missing, on_error=lambda error: None)).all(1).tolist() == [True, False]
    with pytest.raises(SelfTPTError, match="no such file"):
        predictor.predict(tmp_path / "none.jpg")


def test_top_is_checked_at_the_call(data: Data) -> None:
    predictor = METHODS["clip"].fit(FitContext(model())).for_classes(NAMES)
    with pytest.raises(SelfTPTError, match="top must be"):
        predictor.predict(data.images, top=0)


def test_damaged_learned_file_is_set_aside(data: Data, tmp_path: Path) -> None:
    config, context = small_config("kgcoop", data), FitContext(model(), data.source, tmp_path, Cache())
    expected = METHODS["kgcoop"].fit(context, config).tensors["context"]
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(SelfTPTWarning, match="learning again"):
        assert torch.equal(METHODS["kgcoop"].fit(context, config).tensors["context"], expected)
    assert (tmp_path / f"{file.name}.damaged").exists()


def test_predict_command_accepts_cache_options(
    predict: Run, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`off` writes nothing; a folder that cannot be created gives a note, not an error."""
    learned = ["coop", "--source", files / "photos", "--set", "learn.epochs=1", "--names", "cat,dog", "--json"]
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "cache"))
    first = predict(*learned, "--cache-mode", "off")
    assert first.code == 0, first.err
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("SELFTPT_CACHE", "/proc/nowhere")
    again = predict(*learned)
    assert again.code == 0, again.err
    assert again.out == first.out
    assert "not cached" in again.err
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "cache"))
    assert predict(*learned).out == predict(*learned, "--cache-mode", "read-only").out == first.out
    refused(predict(*learned, "--cache-gb", "0"), "--cache-gb must be a number above 0")


def test_fitted_methods_can_be_inspected(run: Run, data: Data, tmp_path: Path) -> None:
    FittedCase("self-tpt", data, tmp_path / "learned").fitted.save(tmp_path / "fitted")
    views = run("inspect", tmp_path / "fitted").out
    for words in (
        "fitted-method file, format 2",
        "method: self-tpt",
        "learn.contrast.views: ",
        "classes: 3: blue whale",
        "learn.lr: 0.002",
        "adapt.steps: 10",
    ):
        assert words in views
    assert "selftpt unknown" not in views
