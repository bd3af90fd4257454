"""What holds for every method of the table: seeds, files, few and many classes, company, and weights left alone."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from selftpt import training
from selftpt.classifier import Classifier
from selftpt.config import Config, kind_of
from selftpt.data.cache import Cache
from selftpt.data.decoding import ImageError
from selftpt.data.features import Block, FeatureProvider
from selftpt.data.sources import Source, images_in
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.methods import METHODS, FitContext, FittedMethod, Predictor
from selftpt.methods.selection import configure
from selftpt.models import Model
from selftpt.models.loading import _digest
from tests.helpers.commands import Run, refused
from tests.helpers.folders import make_generated, make_model, make_photos
from tests.helpers.methods import raise_error
from tests.helpers.models import model

NAMES = ("red fox", "blue whale", "kite")
SENTENCE = "a photo of a {}."
THINGS = tuple(f"thing {i}" for i in range(1000))
SMALL = {  # of all methods that have such settings
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
class World:
    """Labelled images to learn from, and others to answer for."""

    folder: Path
    source: Source
    images: list[Path]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    source = Source.from_folder(make_photos(folder / "source", each=2))
    (folder / "descriptors.json").write_text(json.dumps({name: ["red", "a tail"] for name in (*NAMES, *THINGS)}))
    asked = images_in(make_photos(folder / "asked", ("x", "y"), each=2))
    make_generated(folder / "generated", asked, SMALL["views"] - 1)
    return World(folder, source, asked)


def small_config(name: str, world: World, **more: Any) -> Any:
    method = METHODS[name]
    own = {key: str(world.folder / file) for key, file in (("descriptors", "descriptors.json"), ("generated",) * 2)}
    changes = {key: value for key, value in (SMALL | own).items() if kind_of(method.config, key.split("."))}
    return configure(method, changes | more)


def blocks_of(fitted: FittedMethod, images: list[Path], on_error: Any = raise_error) -> list[Block]:
    """What a fitted method sees of images."""
    specs = fitted.method.views(fitted.config)
    provider = FeatureProvider(fitted.model, specs, Cache(), fixed_batch=True, on_error=on_error)
    return list(provider.blocks(images, pixels=fitted.inputs == "pixels"))


class Asked:
    """A method fitted in a folder, and its answers for the world's images."""

    def __init__(self, name: str, world: World, folder: Path, own: Model | None = None, **changes: Any) -> None:
        self.method, self.model, self.world = METHODS[name], own or model(), world
        self.config = small_config(name, world, **changes)
        source = world.source if self.method.needs_labels else None
        context = FitContext(self.model, source, folder, Cache(), on_error=raise_error)
        self.fitted = self.method.fit(context, self.config)

    def views(self) -> Tensor:
        """What the method sees of the images, [N, V, ...]."""
        return torch.cat([block.views for block in blocks_of(self.fitted, self.world.images)])

    def predictor(self, names: tuple[str, ...] = NAMES) -> Predictor:
        return self.fitted.for_classes(names, SENTENCE)

    def answer(self, names: tuple[str, ...] = NAMES) -> Tensor:
        return self.predictor(names)(self.views())


def check_probabilities(answer: Tensor, shape: tuple[int, int]) -> None:
    assert tuple(answer.shape) == shape
    assert answer.dtype == torch.float32
    assert not answer.requires_grad
    assert (answer >= 0).all()
    torch.testing.assert_close(answer.sum(1), torch.ones(len(answer)))


@every_method
def test_probabilities_the_same_each_time(name: str, world: World, tmp_path: Path) -> None:
    first = Asked(name, world, tmp_path / "first").answer()
    check_probabilities(first, (len(world.images), len(NAMES)))
    assert torch.equal(Asked(name, world, tmp_path / "second").answer(), first)


@pytest.mark.parametrize("name", SEEDS)
def test_another_seed_answers_another(name: str, world: World, tmp_path: Path) -> None:
    answers = [Asked(name, world, tmp_path, **{SEEDS[name]: seed}).answer() for seed in (1, 2)]
    assert not torch.equal(*answers)


@every_method
@pytest.mark.parametrize("count", [2, pytest.param(1000, marks=pytest.mark.slow)])
def test_few_and_many_classes(name: str, count: int, world: World, tmp_path: Path) -> None:
    """Of names that the source does not have."""
    answer = Asked(name, world, tmp_path).answer(THINGS[:count])
    check_probabilities(answer, (len(world.images), count))


@every_method
def test_what_was_learned_is_found_again(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Asked(name, world, tmp_path)
    answer = before.answer()

    def never(*_: object) -> None:
        raise AssertionError("it learns again")

    monkeypatch.setattr(training.RunFiles, "finish", never)
    assert torch.equal(Asked(name, world, tmp_path).answer(), answer)
    classifier = before.predictor().classifier
    if classifier is not None:
        classifier.save(tmp_path / "classifier")
        assert torch.equal(Classifier.load(tmp_path / "classifier", before.model)(before.views()), answer)


@every_method
def test_a_batch_is_one_by_one(name: str, world: World, tmp_path: Path) -> None:
    """And nothing is left of a image when the next one comes."""
    asked = Asked(name, world, tmp_path)
    predictor, shown = asked.predictor(), asked.views()
    together = predictor(shown)
    assert torch.equal(predictor(shown), together), "it remembers"
    if asked.method.transductive:  # it adapts to all images
        return
    alone = torch.cat([predictor(one[None]) for one in shown])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    turned = predictor(shown.flip(0)).flip(0)
    torch.testing.assert_close(turned, together, rtol=0, atol=1e-5)


@every_method
def test_the_model_is_left_alone(name: str, world: World, tmp_path: Path) -> None:
    asked = Asked(name, world, tmp_path)
    clip = asked.model.clip
    before, training_mode = _digest(clip, {}), clip.training
    asked.answer()
    assert _digest(clip, {}) == before
    assert not any(p.requires_grad or p.grad is not None for p in clip.parameters())
    assert clip.training == training_mode
    assert not any(module._forward_hooks for module in clip.modules())


@every_method
def test_a_classifier_or_a_declared_need(name: str, world: World, tmp_path: Path) -> None:
    """What needs only names gives a classifier; all else says in the table what it needs."""
    asked = Asked(name, world, tmp_path)
    method, cost = asked.method, asked.method.cost(asked.config)
    if asked.predictor().classifier is not None:
        assert cost == "1 view"
        assert not method.transductive
    else:
        assert cost != "1 view" or method.transductive or method.needs != "features"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    make_model(folder / "model")
    make_photos(folder / "photos", each=2)
    return folder


@pytest.fixture
def predict(run: Run, place: Path) -> Callable[..., Any]:
    return functools.partial(run, "predict", place / "photos" / "kite", "--model", place / "model", "--method")


def test_predict_by_a_method(predict: Run, place: Path) -> None:
    answer = predict("clip", "--names", "cat,dog", "--json")
    rows = [json.loads(line) for line in answer.out.splitlines()]
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png"]
    assert all({*row["names"]} == {"cat", "dog"} for row in rows)


def test_predict_by_a_method_that_learns(predict: Run, place: Path) -> None:
    learned = ["coop", "--source", place / "photos", "--set", "learn.epochs=1", "--names", "cat,dog", "--json"]
    first, again = predict(*learned), predict(*learned)
    assert first.code == 0, first.err
    assert first.out == again.out


def test_predict_command_equals_the_library(predict: Run, place: Path) -> None:
    from selftpt.models import load_model

    own = load_model(str(place / "model"), device="cpu")
    for name, template in (("clip", "{} it is."), ("waffleclip", SENTENCE)):
        predictor = METHODS[name].fit(FitContext(own)).for_classes(["cat", "dog"], template)
        wanted = [list(p.probabilities) for p in predictor.predict(images_in(place / "photos" / "kite"))]
        answer = predict(name, "--names", "cat,dog", "--template", template, "--json")
        assert [json.loads(line)["probabilities"] for line in answer.out.splitlines()] == wanted


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
def test_a_senseless_wish_is_refused(predict: Run, arguments: list[str], words: list[str]) -> None:
    refused(predict(*arguments), *words)


def test_a_bad_image_is_left_out(run: Run, place: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path, ("a",), each=2)
    (photos / "a" / "0.png").write_text("no image")
    command = ["predict", photos, "--model", place / "model", "--names", "cat,dog", "--json", "--method"]
    for method in (["clip"], ["zero", "--set", "views=2"]):  # with one look and with two
        answer = run(*command, *method)
        assert answer.code == 0
        assert [Path(json.loads(line)["path"]).name for line in answer.out.splitlines()] == ["1.png"]
        assert [line for line in answer.err.splitlines() if "0.png" in line][1:] == []
        assert "1 of 2 images were left out" in answer.err


@pytest.mark.parametrize("method", ["clip", "tda"])
def test_no_image(run: Run, place: Path, method: str) -> None:
    refused(run("predict", "-", "--model", place / "model", "--method", method, "--names", "cat,dog"), "no image")


@pytest.mark.parametrize("name", ["coop", "kgcoop"])
def test_only_unreadable_images_are_counted(name: str, world: World, tmp_path: Path) -> None:
    """Not those beyond the number of shots, neither after training nor when the learned file is found again."""
    config = small_config(name, world, **{"learn.shots": 1})
    for _ in range(2):
        context = FitContext(model(), world.source, tmp_path, Cache(), on_error=raise_error)
        METHODS[name].fit(context, config)
        assert context.unreadable == 0


def test_pixels_are_given_as_they_are(world: World, tmp_path: Path) -> None:
    """To a method that needs them, without the images that cannot be read."""
    broken = tmp_path / "broken.png"
    broken.write_text("no image")
    errors: list[ImageError] = []
    fitted = dataclasses.replace(METHODS["clip"], inputs="pixels").fit(FitContext(model()))
    blocks = blocks_of(fitted, [world.images[0], broken, *world.images[1:]], errors.append)
    pixels = torch.cat([block.views for block in blocks])
    assert torch.cat([block.indices for block in blocks]).tolist() == [0, 2, 3, 4]
    assert pixels.dtype == torch.uint8
    assert tuple(pixels.shape[:3]) == (4, 1, 3)
    assert len(errors) == 1
    assert "broken.png" in str(errors[0])


@every_method
def test_methods_pickle(name: str) -> None:
    assert pickle.loads(pickle.dumps(METHODS[name])) == METHODS[name]


@every_method
def test_fitted_methods_pickle_save_and_load(name: str, world: World, tmp_path: Path) -> None:
    """Without the model, and with the same answers."""
    asked = Asked(name, world, tmp_path / "learned")
    answer = asked.answer()
    packed = pickle.dumps(asked.fitted)
    assert len(packed) < 2_000_000
    asked.fitted.save(tmp_path / "fitted.safetensors")
    places = {field.name: getattr(asked.config, field.name) for field in dataclasses.fields(asked.config)}
    places = {name: value for name, value in places.items() if name in ("descriptors", "generated")}
    copies = [pickle.loads(packed).with_model(asked.model)]
    copies.append(FittedMethod.load(tmp_path / "fitted.safetensors", asked.model, places))
    for fitted in copies:
        assert fitted.config == asked.config
        assert torch.equal(fitted.for_classes(NAMES, SENTENCE)(asked.views()), answer)
    with pytest.raises(SelfTPTError, match="made with vit"):
        pickle.loads(packed).with_model(model("one-layer"))


@every_method
def test_the_table_agrees_with_the_configuration(name: str) -> None:
    method = METHODS[name]
    assert method.needs_labels == (kind_of(method.config, ["learn", "seed"]) is not None)
    assert method.uses_seed == (kind_of(method.config, ["seed"]) is not None)
    assert isinstance(method.config, Config)


def test_a_single_image_costs_one_forward_pass_of_one_image(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    encode = Model.encode_images

    def counted(self: Model, pixels: Tensor) -> Tensor:
        sizes.append(len(pixels))
        return encode(self, pixels)

    monkeypatch.setattr(Model, "encode_images", counted)
    predictor = METHODS["clip"].fit(FitContext(model())).for_classes(NAMES)
    assert len(list(predictor.predict(world.images[0]))) == 1
    classifier = predictor.classifier
    assert classifier is not None
    assert len(list(classifier.predict(world.images[0]))) == 1
    assert sizes == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_method
def test_methods_work_without_gradient_mode(name: str, mode: Any, world: World, tmp_path: Path) -> None:
    wanted = Asked(name, world, tmp_path / "a").answer()
    with mode():
        found = Asked(name, world, tmp_path / "b").answer()
    assert torch.equal(found, wanted)


def test_required_image_tower_is_checked_before_anything_is_learned(world: World) -> None:
    method = dataclasses.replace(METHODS["coop"], requires="transformer image tower")
    with pytest.raises(SelfTPTError, match=r"coop needs a model whose image tower is a ViT of open_clip, not resnet"):
        method.fit(FitContext(model("resnet"), world.source))


def test_read_only_cache_of_learned_parameters(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used and not changed; without them, what is learned is not written."""
    config = small_config("kgcoop", world)

    def fit(mode: Any) -> Tensor:
        context = FitContext(model(), world.source, cache=Cache(mode, None, tmp_path), on_error=raise_error)
        return METHODS["kgcoop"].fit(context, config).tensors["context"]

    first = fit("read-only")
    assert list(tmp_path.iterdir()) == []
    wanted = fit("on")
    assert torch.equal(first, wanted)
    monkeypatch.setattr(FitContext, "features", None)  # it would be called to learn
    assert torch.equal(fit("read-only"), wanted)


def test_failing_cache_does_not_stop_training(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was asked for must be written; the cache need not."""
    config, wanted = (
        small_config("kgcoop", world),
        METHODS["kgcoop"].fit(FitContext(model(), world.source), small_config("kgcoop", world)),
    )

    def fail(path: Path, *_: Any) -> None:
        raise SelfTPTError(f"cannot write {path}: no space left")

    monkeypatch.setattr("selftpt.training.checkpoints.write_tensors", fail)
    with pytest.warns(SelfTPTWarning, match="not kept: cannot write"):
        found = METHODS["kgcoop"].fit(FitContext(model(), world.source, cache=Cache(folder=tmp_path)), config)
    assert torch.equal(found.tensors["context"], wanted.tensors["context"])
    with pytest.raises(SelfTPTError, match="no space left"):
        METHODS["kgcoop"].fit(FitContext(model(), world.source, tmp_path / "folder"), config)


def test_file_does_not_decide_which_places_are_used(world: World, tmp_path: Path) -> None:
    """A folder or a repository in a file from someone else is neither read, nor written, nor loaded."""
    asked = Asked("difftpt", world, tmp_path / "learned")
    asked.fitted.save(tmp_path / "fitted")
    loaded = FittedMethod.load(tmp_path / "fitted", asked.model)
    assert (loaded.config.generated, loaded.config.diffusion) == ("", "")
    named = FittedMethod.load(tmp_path / "fitted", asked.model, {"generated": "folder"})
    assert named.config.generated == "folder"


def test_methods_with_the_same_configuration_are_kept_apart(world: World, tmp_path: Path) -> None:
    def train(context: FitContext, config: Any) -> Any:
        training = METHODS["kgcoop"].train(context, config)  # type: ignore[misc]
        training.state.parameters[0].add_(1)
        return training

    config, context = small_config("kgcoop", world), FitContext(model(), world.source, tmp_path, Cache())
    first = METHODS["kgcoop"].fit(context, config).tensors["context"]
    other = dataclasses.replace(METHODS["kgcoop"], train=train).fit(context, config).tensors["context"]
    assert not torch.equal(first, other)


def test_training_works_in_inference_mode(world: World) -> None:
    with torch.inference_mode():
        training = METHODS["self-tpt"].training(FitContext(model(), world.source), small_config("self-tpt", world))
        training.step()
    training.step()
    with pytest.raises(SelfTPTError, match="clip learns from no images"):
        METHODS["clip"].training(FitContext(model()))


@pytest.mark.parametrize("order", [1, -1])
def test_settings_that_depend_on_each_other_are_changed_together(order: int) -> None:
    changes = [("unsure_above", 0.6), ("unsure_below", 0.9)]
    config = configure(METHODS["tda"], dict(changes[::order]))
    assert (config.unsure_above, config.unsure_below) == (0.6, 0.9)
    assert configure(METHODS["proda"], {"prompts": 6, "prompts_per_step": 3}).prompts == 6


def test_top_is_checked_at_the_call(world: World) -> None:
    predictor = METHODS["clip"].fit(FitContext(model())).for_classes(NAMES)
    with pytest.raises(SelfTPTError, match="top must be"):
        predictor.predict(world.images, top=0)


def test_damaged_learned_file_is_set_aside(world: World, tmp_path: Path) -> None:
    config, context = small_config("kgcoop", world), FitContext(model(), world.source, tmp_path, Cache())
    wanted = METHODS["kgcoop"].fit(context, config).tensors["context"]
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(SelfTPTWarning, match="learning again"):
        assert torch.equal(METHODS["kgcoop"].fit(context, config).tensors["context"], wanted)
    assert (tmp_path / f"{file.name}.damaged").exists()


def test_cache_options_of_predict(predict: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off writes nothing; a folder that cannot be made is a note, not an error."""
    learned = ["coop", "--source", place / "photos", "--set", "learn.epochs=1", "--names", "cat,dog", "--json"]
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
    refused(predict(*learned, "--cache-gb", "0"), "cache_gb must be a number above 0")


def test_fitted_methods_are_inspected(run: Run, world: World, tmp_path: Path) -> None:
    Asked("self-tpt", world, tmp_path / "learned").fitted.save(tmp_path / "fitted")
    shown = run("inspect", tmp_path / "fitted").out
    for words in (
        "a fitted-method",
        "method: self-tpt",
        "classes: 3: blue whale",
        "learn.lr: 0.002",
        "adapt.steps: 10",
    ):
        assert words in shown
    assert "selftpt unknown" not in shown
