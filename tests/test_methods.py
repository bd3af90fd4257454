"""What holds for every method of the table: seeds, files, few and many classes, company, and weights left alone."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from selftpt import training
from selftpt.classifier import Classifier
from selftpt.config import kind_of
from selftpt.data.decoding import ImageError
from selftpt.data.sources import Source, images_in, read_folder
from selftpt.methods import METHODS, Eyes, Job, Method, Predictor
from selftpt.methods.prediction import MethodPredictor, chosen_settings
from selftpt.models import Model
from selftpt.models.loading import _digest
from tests.commands import Run, refused
from tests.folders import make_generated, make_model, make_photos
from tests.small import model

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
SEEDS = {name: "learn.seed" if method.learns else "seed" for name, method in METHODS.items() if method.draws}


@dataclass
class World:
    """Labelled pictures to learn from, and others to answer for."""

    folder: Path
    source: Source
    pictures: list[Path]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    source = read_folder(make_photos(folder / "source", each=2))
    (folder / "descriptors.json").write_text(json.dumps({name: ["red", "a tail"] for name in (*NAMES, *THINGS)}))
    asked = images_in(make_photos(folder / "asked", ("x", "y"), each=2))
    make_generated(folder / "generated", asked, SMALL["views"] - 1)
    return World(folder, source, asked)


def fail(error: ImageError) -> None:
    raise error


def small_settings(name: str, world: World, **more: Any) -> Any:
    method = METHODS[name]
    own = {key: str(world.folder / file) for key, file in (("descriptors", "descriptors.json"), ("generated",) * 2)}
    changes = {key: value for key, value in (SMALL | own).items() if kind_of(method.settings, key.split("."))}
    return chosen_settings(method, changes | more)


class Asked:
    """A method fitted in a folder, and what it answers for the world's pictures."""

    def __init__(self, name: str, world: World, folder: Path, eyes: Model | None = None, **changes: Any) -> None:
        self.method, self.model, self.world = METHODS[name], eyes or model(), world
        self.settings = small_settings(name, world, **changes)
        source = world.source if self.method.learns else None
        self.fitted = self.method.fit(Job(self.model, source, folder, fail), self.settings)

    def shown(self) -> Tensor:
        """What the method sees of the pictures, [N, V, ...]."""
        return torch.cat(
            [shown for _, shown in Eyes(self.model, fail)(self.method, self.settings, self.world.pictures)]
        )

    def predictor(self, names: tuple[str, ...] = NAMES) -> Predictor:
        return self.fitted(names, SENTENCE)

    def answer(self, names: tuple[str, ...] = NAMES) -> Tensor:
        return self.predictor(names)(self.shown())


def check_probabilities(answer: Tensor, shape: tuple[int, int]) -> None:
    assert tuple(answer.shape) == shape
    assert answer.dtype == torch.float32
    assert not answer.requires_grad
    assert (answer >= 0).all()
    torch.testing.assert_close(answer.sum(1), torch.ones(len(answer)))


@every_method
def test_probabilities_the_same_each_time(name: str, world: World, tmp_path: Path) -> None:
    first = Asked(name, world, tmp_path / "first").answer()
    check_probabilities(first, (len(world.pictures), len(NAMES)))
    assert torch.equal(Asked(name, world, tmp_path / "second").answer(), first)


@pytest.mark.parametrize("name", SEEDS)
def test_another_seed_answers_another(name: str, world: World, tmp_path: Path) -> None:
    answers = [Asked(name, world, tmp_path, **{SEEDS[name]: seed}).answer() for seed in (1, 2)]
    assert not torch.equal(*answers)


@every_method
@pytest.mark.parametrize("count", [2, 1000])
def test_few_and_many_classes(name: str, count: int, world: World, tmp_path: Path) -> None:
    """Of names that the source does not have."""
    answer = Asked(name, world, tmp_path).answer(THINGS[:count])
    check_probabilities(answer, (len(world.pictures), count))


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
    predictor = before.predictor()
    if isinstance(predictor, Classifier):
        predictor.save(tmp_path / "classifier")
        assert torch.equal(Classifier.load(tmp_path / "classifier", before.model)(before.shown()), answer)


@every_method
def test_a_batch_is_one_by_one(name: str, world: World, tmp_path: Path) -> None:
    """And nothing is left of a picture when the next one comes."""
    asked = Asked(name, world, tmp_path)
    predictor, shown = asked.predictor(), asked.shown()
    together = predictor(shown)
    assert torch.equal(predictor(shown), together), "it remembers"
    if asked.method.whole:  # it adapts to its company
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
    method: Method = METHODS[name]
    if isinstance(Asked(name, world, tmp_path).predictor(), Classifier):
        assert method.cost == "1 view"
        assert not method.whole
    else:
        assert method.cost != "1 view" or method.whole or method.needs != "features"


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


def test_predict_is_the_method_itself(predict: Run, place: Path) -> None:
    """The command says what the library says."""
    from selftpt.models import load_model

    eyes = load_model(str(place / "model"), device="cpu")
    for name, template in (("clip", "{} it is."), ("waffleclip", SENTENCE)):
        ready = MethodPredictor(eyes, METHODS[name], METHODS[name].settings, ["cat", "dog"], template)
        wanted = [list(p.probabilities) for p in ready.predict(images_in(place / "photos" / "kite"))]
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
        (["tpt", "--names", "cat,dog", "--set", "lr=1e30"], ["lower the rate"]),
        (["clip", "--names", "cat,dog", "--template", "a photo."], ["{}"]),
        (["clip", "--names", "cat,dog", "--classifier", "file"], ["--classifier", "--method"]),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else "",
)
def test_a_senseless_wish_is_refused(predict: Run, arguments: list[str], words: list[str]) -> None:
    refused(predict(*arguments), *words)


def test_a_bad_picture_is_left_out(run: Run, place: Path, tmp_path: Path) -> None:
    photos = make_photos(tmp_path, ("a",), each=2)
    (photos / "a" / "0.png").write_text("no picture")
    command = ["predict", photos, "--model", place / "model", "--names", "cat,dog", "--json", "--method"]
    for method in (["clip"], ["zero", "--set", "views=2"]):  # with one look and with two
        answer = run(*command, *method)
        assert answer.code == 0
        assert [Path(json.loads(line)["path"]).name for line in answer.out.splitlines()] == ["1.png"]
        assert [line for line in answer.err.splitlines() if "0.png" in line][1:] == []
        assert "1 of 2 pictures were left out" in answer.err


@pytest.mark.parametrize("method", ["clip", "tda"])
def test_no_picture(run: Run, place: Path, method: str) -> None:
    refused(run("predict", "-", "--model", place / "model", "--method", method, "--names", "cat,dog"), "no picture")


@pytest.mark.parametrize("name", ["coop", "kgcoop"])
def test_only_unreadable_pictures_are_counted(name: str, world: World, tmp_path: Path) -> None:
    """Not those that are beyond the number of shots, neither when it is learned nor when it is found again."""
    settings = small_settings(name, world, **{"learn.shots": 1})
    for _ in range(2):
        job = Job(model(), world.source, tmp_path, fail)
        METHODS[name].fit(job, settings)
        assert job.unreadable == 0


def test_pixels_are_shown_as_they_are(world: World, tmp_path: Path) -> None:
    """For a method that asks for them, block by block, without the pictures that cannot be read."""
    broken = tmp_path / "broken.png"
    broken.write_text("no picture")
    told: list[ImageError] = []
    method = dataclasses.replace(METHODS["clip"], pixels=lambda _settings, _model: True)
    paths = [world.pictures[0], broken, *world.pictures[1:]]
    blocks: Iterator[tuple[Tensor, Tensor]] = Eyes(model(), told.append)(method, method.settings, paths)
    usable, shown = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    assert usable.tolist() == [0, 2, 3, 4]
    assert shown.dtype == torch.uint8
    assert tuple(shown.shape[:3]) == (4, 1, 3)
    assert len(told) == 1
    assert "broken.png" in str(told[0])
