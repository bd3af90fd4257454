"""Threads share a model, processes share a cache and learned parameters, and no result changes."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import selftpt
from selftpt.config import AdaptConfig, LearnConfig, PredictConfig
from selftpt.data.cache import Cache
from selftpt.data.sources import Source, images_in
from selftpt.errors import SelfTPTWarning
from selftpt.methods import METHODS, FitContext
from selftpt.methods.selection import configure
from tests.helpers.folders import make_photos
from tests.helpers.models import model

pytestmark = pytest.mark.slow

THREADS = 8
NAMES = [f"{colour} {thing}" for colour in ("red", "blue") for thing in ("kite", "boat", "bird", "frog")]


def work(kind: str, photos: Path, number: int) -> list[Tensor]:
    """Run all three stages and a method that tunes per image; names and seeds depend on `number`."""
    own = model(kind)
    names = NAMES[number % 4 :]
    prompt = selftpt.learn(own, photos, LearnConfig(epochs=1, seed=number, chunk=2), cache=Cache("off"))
    classifier = selftpt.adapt(own, prompt, names, AdaptConfig(steps=2))
    images = images_in(photos)[: 2 + number % 3]
    answers = list(classifier.predict(images, top=len(names), config=PredictConfig(views=3, seed=number)))
    tpt = METHODS["tpt"].fit(FitContext(own), configure(METHODS["tpt"], {"views": 4}))
    tuned = list(tpt.for_classes(names).predict(images, top=len(names)))
    found = [torch.tensor([p.probabilities for p in predictions]) for predictions in (answers, tuned)]
    return [prompt.context, classifier.weights, own.encode_text(names), *found]


@pytest.mark.parametrize("kind", ["vit", "siglip", "resnet"])
def test_threads_that_share_a_model_get_the_results_of_one_thread(kind: str, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos")
    expected = [work(kind, photos, number) for number in range(THREADS)]
    start = threading.Barrier(THREADS)

    def one(number: int) -> list[Tensor]:
        start.wait(60)
        return work(kind, photos, number)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(one, range(THREADS)))
    for alone, together in zip(expected, found, strict=True):
        for one_tensor, other in zip(alone, together, strict=True):
            assert torch.equal(one_tensor, other)


def test_threads_that_share_a_classifier_and_a_cache_get_the_same_results(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos")
    images, cache = images_in(photos), Cache(folder=tmp_path / "cache")
    predictor = METHODS["zero"].fit(FitContext(model()), configure(METHODS["zero"], {"views": 4})).for_classes(NAMES)
    expected = list(predictor.predict(images))

    def one(_number: int) -> list[Any]:
        return list(predictor.predict(images, cache=cache))

    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as pool:
        warnings.simplefilter("error", SelfTPTWarning)
        assert list(pool.map(one, range(THREADS))) == [expected] * THREADS


def in_processes(target: Callable[..., None], *args: Any) -> list[Any]:
    """Return the results of two new processes that run at the same time."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=target, args=(queue, *args)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return answers


def learn_in_process(queue: Any, photos: Path, folder: Path) -> None:
    warnings.simplefilter("error", SelfTPTWarning)
    cache = Cache(folder=folder / "cache")
    fit_context = FitContext(model(), Source.from_folder(photos), folder / "learned", cache)
    fitted = METHODS["self-tpt"].fit(fit_context, configure(METHODS["self-tpt"], {"learn.epochs": 4}))
    queue.put(fitted.tensors["context"].tolist())


def test_processes_that_share_a_cache_learn_the_same_parameters(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos")
    first, second = in_processes(learn_in_process, photos, tmp_path)
    alone = FitContext(model(), Source.from_folder(photos), tmp_path / "other", Cache(folder=tmp_path / "others"))
    expected = METHODS["self-tpt"].fit(alone, configure(METHODS["self-tpt"], {"learn.epochs": 4}))
    assert first == second == expected.tensors["context"].tolist()
    names = sorted(path.name for path in (tmp_path / "learned").iterdir())
    assert [name.rpartition(".safetensors")[2] for name in names] == ["", ".log.jsonl"]
    steps = (tmp_path / "learned" / names[1]).read_text().splitlines()
    assert steps == next((tmp_path / "other").glob("*.jsonl")).read_text().splitlines()
