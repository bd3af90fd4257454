"""Helpers for tests of methods that learn from images: a context with small images, and checks for every method."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from selftpt.config import TrainConfig
from selftpt.data.cache import Cache
from selftpt.data.sources import Source
from selftpt.methods import FitContext, Method
from selftpt.training import RunFiles
from tests.helpers.folders import make_photos
from tests.helpers.models import Small, model

OTHERS = ["blue bird", "cat", "boat on the lake", "dog"]
PLAIN = "a photo of a {}."


def raise_error(error: Exception) -> None:
    raise error


def make_context(
    folder: Path, kind: str = "vit", classes: tuple[str, ...] = ("red_fox", "blue whale", "kite")
) -> FitContext:
    """Return a context with the images in `folder`; create nine images of three classes if there are none."""
    photos = folder / "photos"
    source = Source.from_folder(photos if photos.exists() else make_photos(photos, classes))
    return FitContext(model(kind), source, folder / "out", Cache(), on_error=raise_error)


def train_data(context: FitContext, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Return the training data: features of crops [N, crops, D] and labels [N]."""
    return context.features(config)


def learned(method: Method, config: Any, context: FitContext) -> dict[str, Tensor]:
    """Fit the method and return its learned tensors."""
    return dict(method.fit(context, config).tensors)


def words(small: Small, text: str) -> Tensor:
    """Return the embeddings [M, d] of the tokens of a text."""
    return small.embedding[torch.tensor(small.encode(text))].clone()


def changed(config: Any, **learn: Any) -> Any:
    return dataclasses.replace(config, learn=dataclasses.replace(config.learn, **learn))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def check_method(method: Method, config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check determinism, resuming, reuse, chunking and single steps of a method that learns.

    `config` must have at least two epochs and a partly random initial prompt.
    """
    first = learned(method, config, make_context(folder / "a"))
    assert not same(first, learned(method, changed(config, seed=2), make_context(folder / "b")))
    chunked = learned(method, changed(config, chunk=2), make_context(folder / "c"))
    for key, tensor in first.items():
        assert torch.allclose(chunked[key], tensor, atol=1e-5), key

    keep = RunFiles.keep

    def stop(self: RunFiles, state: Any, epochs: int, lines: Any) -> None:
        keep(self, state, epochs, lines)
        raise KeyboardInterrupt

    context = make_context(folder / "d")
    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            method.fit(context, config)
    assert same(learned(method, config, context), first)

    random_features = torch.randn(5, 1, context.model.dimension, generator=torch.Generator().manual_seed(0))
    features = torch.nn.functional.normalize(random_features, dim=-1)
    expected = method.fit(context, config).for_classes(OTHERS, PLAIN)(features)
    with monkeypatch.context() as patch:
        patch.setattr(FitContext, "features", None)  # training would call it
        again = method.fit(context, config).for_classes(OTHERS, PLAIN)
    assert torch.equal(again(features), expected)
    assert expected.shape == (5, len(OTHERS))
    assert torch.allclose(expected.sum(-1), torch.ones(5))
    assert torch.allclose(again(features[:1]), expected[:1], atol=1e-6)  # independent of the other images

    two = make_context(folder / "e", classes=("cat", "dog"))
    assert method.fit(two, config).for_classes(["kite", "bird"], PLAIN)(features).shape == (5, 2)
    check_single_steps(method, config, context)


def check_single_steps(method: Method, config: Any, context: FitContext) -> None:
    """Check that calling `step` by hand, on features in memory and without files, equals a complete run."""
    learn = method.train_config(context, config)
    learn = learn if isinstance(learn, TrainConfig) else learn.learn
    features, labels = context.features(learn)
    source = Source.from_features(features, labels.tolist(), context.source.names)
    memory = FitContext(context.model, source, on_error=raise_error)
    complete = dict(method.fit(memory, config).tensors)

    training = method.training(memory, config)
    name, start = next((name, value.clone()) for name, value in training.parameters.items())
    other = dataclasses.replace(memory, initial={name: start + 0.1})
    assert torch.equal(method.training(other, config).parameters[name], start + 0.1)
    losses = [
        training.step(epoch, number)
        for epoch in range(learn.epochs)
        for number in range(max(1, len(labels) // learn.batch))
    ]
    assert all(losses)
    assert not torch.equal(training.parameters[name], start)
    for key, value in training.parameters.items():
        assert torch.equal(value.detach().cpu(), complete[key]), key
