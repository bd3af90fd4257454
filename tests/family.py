"""What tests of methods that learn from pictures share: a job on small pictures, and what each such method must do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from selftpt.config import TrainConfig
from selftpt.data.sources import read_folder
from selftpt.files import read_tensors
from selftpt.methods import Job, Method
from selftpt.training import RunFiles, source_features
from tests.folders import make_photos
from tests.small import Small, model

OTHERS = ["blue bird", "cat", "boat on the lake", "dog"]
PLAIN = "a photo of a {}."


def _refuse(error: Exception) -> None:
    raise error


def make_job(folder: Path, kind: str = "vit", classes: tuple[str, ...] = ("red_fox", "blue whale", "kite")) -> Job:
    """Nine pictures of three classes, unless there are some already."""
    photos = folder / "photos"
    return Job(
        model(kind), read_folder(photos if photos.exists() else make_photos(photos, classes)), folder / "out", _refuse
    )


def seen(job: Job, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """What there is to learn from: features of crops [N, crops, D] and labels [N]."""
    return source_features(job.model, job.teacher.few(config.shots, config.seed), config, _refuse)


def taught(method: Method, settings: Any, job: Job) -> dict[str, Tensor]:
    """What is kept of what the method learns."""
    method.fit(job, settings)
    (file,) = job.folder.glob("*.safetensors")
    return read_tensors(file, method.name)[1]


def words(small: Small, text: str) -> Tensor:
    """The embeddings [M, d] of words."""
    return small.embedding[torch.tensor(small.encode(text))].clone()


def changed(settings: Any, **learn: Any) -> Any:
    return dataclasses.replace(settings, learn=dataclasses.replace(settings.learn, **learn))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def check_method(method: Method, settings: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By seed the same, by another not; kept, and found without learning; resumed to the same bits; in chunks alike.

    settings: of two epochs at least, with a prompt that is drawn in part.
    """
    first = taught(method, settings, make_job(folder / "a"))
    assert not same(first, taught(method, changed(settings, seed=2), make_job(folder / "b")))
    chunked = taught(method, changed(settings, chunk=2), make_job(folder / "c"))
    for key, tensor in first.items():
        assert torch.allclose(chunked[key], tensor, atol=1e-5), key

    keep = RunFiles.keep

    def stop(self: RunFiles, state: Any, epochs: int, lines: Any) -> None:
        keep(self, state, epochs, lines)
        raise KeyboardInterrupt

    job = make_job(folder / "d")
    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            method.fit(job, settings)
    assert same(taught(method, settings, job), first)

    drawn = torch.randn(5, 1, job.model.dimension, generator=torch.Generator().manual_seed(0))
    features = torch.nn.functional.normalize(drawn, dim=-1)
    wanted = method.fit(job, settings)(OTHERS, PLAIN)(features)
    with monkeypatch.context() as patch:
        patch.setattr("selftpt.methods.method.source_features", None)  # it would be called to learn
        again = method.fit(job, settings)(OTHERS, PLAIN)
    assert torch.equal(again(features), wanted)
    assert wanted.shape == (5, len(OTHERS))
    assert torch.allclose(wanted.sum(-1), torch.ones(5))
    assert torch.allclose(again(features[:1]), wanted[:1], atol=1e-6)  # no matter what other pictures there are

    two = make_job(folder / "e", classes=("cat", "dog"))
    assert method.fit(two, settings)(["kite", "bird"], PLAIN)(features).shape == (5, 2)
