"""CoOp, in the set-up of the Self-TPT paper and in its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from selftpt.cli.options import parse_setting
from selftpt.config import LearnConfig
from selftpt.errors import SelfTPTError
from selftpt.evaluation.bench import Bench, Run
from selftpt.evaluation.runs import Runs
from selftpt.methods import Job
from selftpt.methods.coop import COOP, Settings, coops_own
from selftpt.methods.prediction import chosen_settings
from selftpt.prompt import Prompt, initial_context
from tests.family import changed, make_job, seen
from tests.oracle import plain
from tests.oracle.descent import descend
from tests.small import model, small


@pytest.mark.parametrize(
    ("shots", "classes", "epochs"),
    [(16, 50, 200), (8, 50, 200), (4, 50, 100), (2, 50, 100), (1, 50, 50), (16, 1000, 50), (1, 1000, 50),
     (16, 500, 50), (16, 499, 200), (12, 50, 200), (3, 50, 100)],
)  # fmt: skip
def test_epochs_by_shots(shots: int, classes: int, epochs: int) -> None:
    found = coops_own(COOP.settings.learn, shots, classes)
    assert found == LearnConfig(cpt=0, gm=0, batch=32, epochs=epochs, lr=0.002, length=4, words="a photo of a")


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_changed_stands(order: int) -> None:
    """Whichever is said first."""
    changes = [("recipe", "coop"), ("learn.epochs", 30), ("learn.batch", 8), ("learn.lr", 0.1), ("learn.length", 16)]
    settings = chosen_settings(COOP, dict(changes[::order]))
    assert coops_own(settings.learn, 16, 50) == LearnConfig(cpt=0, gm=0, batch=8, epochs=30, lr=0.1, length=16)
    settings = chosen_settings(COOP, {"learn.batch": 8})
    assert coops_own(settings.learn, 16, 50).epochs == 200


@pytest.mark.parametrize(
    ("shots", "recipe", "epochs", "batch"),
    [(16, "coop", 100, 32), (1, "coop", 50, 32), (None, "coop", 100, 32), (16, "paper", 10, 4)],
)
def test_shots_are_counted(
    shots: int | None, recipe: Any, epochs: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are three pictures a class, in one class a single one."""
    asked: list[LearnConfig] = []
    monkeypatch.setattr(Job, "prompt", lambda self, config: asked.append(config))
    make_job(tmp_path)
    for path in sorted((tmp_path / "photos" / "kite").iterdir())[1:]:
        path.unlink()
    COOP.fit(make_job(tmp_path), changed(Settings(recipe=recipe), shots=shots))
    assert [(config.epochs, config.batch) for config in asked] == [(epochs, batch)]


@pytest.mark.parametrize("kind", ["vit", "worldwide", "siglip", "clipa"])
def test_no_words_at_all(kind: str) -> None:
    """CoOp's few-shot paper starts from 16 vectors of N(0, 0.02)."""
    settings = chosen_settings(COOP, dict(map(parse_setting, ["learn.words=", "learn.length=16"])))
    found = initial_context(model(kind), settings.learn.length, settings.learn.words, torch.Generator().manual_seed(1))
    assert found.shape == (16, model(kind).text.width)
    assert found.std() == pytest.approx(0.02, rel=0.2)


def test_it_learns_by_cross_entropy_in_its_own_batches(tmp_path: Path) -> None:
    """From drawn vectors, by the plain walk; nine pictures are one batch of CoOp's, and two of the paper's."""
    settings = changed(Settings(recipe="coop"), epochs=3, lr=0.05, warmup_lr=0.01, length=2, words="")
    job, exact = make_job(tmp_path), small("vit", torch.float64)
    names = [name.replace("_", " ") for name in job.teacher.names]

    def gradients(parameters: Any, images: Tensor, labels: Tensor) -> list[Tensor]:
        p = parameters[0].detach().clone().requires_grad_()
        classes = plain.encode(exact, "end", names, p)
        return list(torch.autograd.grad(plain.cross_entropy(images, classes, labels, 1 / job.model.scale), p))

    start = torch.empty(2, 32).normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    (wanted,) = descend([start], gradients, *seen(job, settings.learn), epochs=3, batch=9, lr=0.05, warmup=0.01)
    COOP.fit(job, settings)
    (file,) = job.folder.glob("*.safetensors")
    prompt = Prompt.load(file)
    assert (prompt.context - wanted).norm() < 2e-4 * wanted.norm()
    assert (wanted - start).norm() > 0.1 * wanted.norm()
    assert prompt.origin["settings"]["batch"] == 32


def test_the_protocol_s_epochs_are_the_paper_s_recipe(tmp_path: Path) -> None:
    def epochs(**changes: Any) -> int:
        bench = Bench(model(), "cross-dataset", None, Runs(tmp_path), changes=changes)
        found: int = bench.settings(Run("coop", "eurosat", 1)).learn.epochs
        return found

    assert epochs() == epochs(recipe="paper") == 5
    assert epochs(recipe="coop") == LearnConfig.epochs
    assert epochs(**{"recipe": "coop", "learn.epochs": 5}) == 5


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(SelfTPTError, match="recipe must be one of paper, coop, not 'cocoa'"):
        chosen_settings(COOP, {"recipe": "cocoa"})
