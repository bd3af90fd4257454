"""CoOp, in the setting of the Self-TPT paper and by its authors' recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from selftpt.cli.options import parse_setting
from selftpt.config import LearnConfig
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError
from selftpt.evaluation.planning import Plan, Run
from selftpt.methods import FitContext
from selftpt.methods.coop import COOP, CoopConfig, train_config
from selftpt.methods.selection import configure
from selftpt.prompt import initial_context
from tests.helpers.methods import changed, make_context, train_data
from tests.helpers.models import model, small
from tests.oracle import reference
from tests.oracle.reference_sgd import minimise


def context_of(shots: int, classes: int) -> FitContext:
    """Return a context with features of `shots` images per class, but only one image of the first class."""
    labels = [0, *(label for label in range(1, classes) for _ in range(shots))]
    names = [f"class {label}" for label in range(classes)]
    return FitContext(model(), Source.from_features(torch.full((len(labels), 24), 24**-0.5), labels, names))


@pytest.mark.parametrize(
    ("shots", "classes", "epochs"),
    [(16, 50, 200), (8, 50, 200), (4, 50, 100), (2, 50, 100), (1, 50, 50), (16, 1000, 50), (1, 1000, 50),
     (16, 500, 50), (16, 499, 200), (12, 50, 200), (3, 50, 100)],
)  # fmt: skip
def test_recipe_of_coop_sets_epochs_by_shots_and_classes(shots: int, classes: int, epochs: int) -> None:
    found = train_config(context_of(shots, classes), CoopConfig(recipe="coop"))
    assert found == LearnConfig(cpt=0, gm=0, batch=32, epochs=epochs, lr=0.002, length=4, words="a photo of a")


def test_recipe_of_coop_counts_the_shots_that_are_used() -> None:
    few = changed(CoopConfig(recipe="coop"), shots=1)
    assert train_config(context_of(16, 50), few).epochs == 50


def test_recipe_of_the_paper_has_its_settings() -> None:
    assert train_config(context_of(16, 50), CoopConfig()) == LearnConfig(cpt=0, gm=0)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("epochs", "batch"), [(30, 8), (10, 4)])
def test_given_batch_and_epochs_override_the_recipe(order: int, epochs: int, batch: int) -> None:
    """Also if the given values are the defaults of the paper's recipe."""
    changes = [("recipe", "coop"), ("learn.epochs", epochs), ("learn.batch", batch), ("learn.lr", 0.1)]
    config = configure(COOP, dict(changes[::order]))
    assert train_config(context_of(16, 50), config) == LearnConfig(cpt=0, gm=0, batch=batch, epochs=epochs, lr=0.1)
    config = configure(COOP, {"recipe": "coop", "learn.batch": 4})
    assert train_config(context_of(16, 50), config).epochs == 200


@pytest.mark.parametrize("kind", ["vit", "worldwide", "siglip", "clipa"])
def test_context_without_words_is_random(kind: str) -> None:
    """CoOp's few-shot recipe starts from 16 vectors with standard deviation 0.02."""
    config = configure(COOP, dict(map(parse_setting, ["learn.words=", "learn.length=16"])))
    found = initial_context(model(kind), config.learn.length, config.learn.words, torch.Generator().manual_seed(1))
    assert found.shape == (16, model(kind).text.width)
    assert found.std() == pytest.approx(0.02, rel=0.2)


def test_training_equals_plain_steps_in_batches_of_the_recipe(tmp_path: Path) -> None:
    """Nine images are one batch of CoOp's recipe and two batches of the paper's."""
    config = changed(CoopConfig(recipe="coop"), epochs=3, lr=0.05, warmup_lr=0.01, length=2, words="")
    context, exact = make_context(tmp_path), small("vit", torch.float64)
    names = [name.replace("_", " ") for name in context.source.names]

    def gradients(parameters: Any, images: Tensor, labels: Tensor) -> list[Tensor]:
        p = parameters[0].detach().clone().requires_grad_()
        classes = reference.encode(exact, "end", names, p)
        return list(torch.autograd.grad(reference.cross_entropy(images, classes, labels, 1 / context.model.scale), p))

    start = torch.empty(2, 32).normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    data = train_data(context, train_config(context, config))
    (expected,) = minimise([start], gradients, *data, epochs=3, batch=9, lr=0.05, warmup=0.01)
    found = COOP.fit(context, config).tensors["context"]
    assert (found - expected).norm() < 2e-4 * expected.norm()
    assert (expected - start).norm() > 0.1 * expected.norm()


def test_protocol_epochs_apply_to_the_recipe_of_the_paper() -> None:
    def epochs(**changes: Any) -> int | None:
        plan = Plan("cross-dataset", changes=changes)
        found: int | None = plan.settings(Run("coop", "eurosat", 1)).learn.epochs
        return found

    assert epochs() == epochs(recipe="paper") == 5
    assert epochs(recipe="coop") is None
    assert epochs(**{"recipe": "coop", "learn.epochs": 5}) == 5


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(SelfTPTError, match="recipe must be one of paper, coop, not 'cocoa'"):
        configure(COOP, {"recipe": "cocoa"})
