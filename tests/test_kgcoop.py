"""KgCoOp equals a reference implementation of its equations."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import TrainConfig
from selftpt.errors import SelfTPTError
from selftpt.methods.kgcoop import KGCOOP, KgcoopConfig, distance, loss
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import tokenize
from selftpt.objective import prompt_gradient
from tests.helpers.methods import OTHERS, changed, check_method, learned, make_context, train_data, words
from tests.helpers.models import random_prompt, relative, small
from tests.oracle import kgcoop, reference
from tests.oracle.reference_sgd import minimise
from tests.test_objective import NAMES, SCALE, batch_of

TEMPLATE = "a centered photo of {}, in the rain."


def test_defaults_are_the_authors_settings() -> None:
    assert KgcoopConfig() == KgcoopConfig(
        TrainConfig(batch=128, epochs=100, lr=0.002, length=4), 8.0, "a photo of a {}."
    )


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 6), st.integers(0, 2**31))
def test_distance_equals_the_reference(classes: int, dimension: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, classes, dimension, generator=generator, dtype=torch.float64)
    assert distance(a, b).item() == pytest.approx(kgcoop.distance(a, b).item(), abs=1e-12)
    assert distance(a, 3 * a).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", ["vit", "vit-quickgelu", "worldwide", "siglip", "clipa"])
def test_loss_and_gradient_equal_the_reference(kind: str) -> None:
    model = small(kind, torch.float64)
    batch, p = batch_of(model, len(NAMES)), random_prompt(model, 3).requires_grad_()
    expected = kgcoop.loss(model, NAMES, p, batch.image_features, batch.labels, 1 / SCALE, 8.0, TEMPLATE)
    (by_prompt,) = torch.autograd.grad(expected, p)
    text = model.model.text
    tokens = tokenize(NAMES, text.tokenizer, model.context)
    loss_of_classes = functools.partial(
        loss, batch=batch, hand_crafted=encode_template(text, tokens, TEMPLATE), weight=8.0
    )
    for chunk in (None, 2):
        encoder = TextEncoder(text, tokens, 3, ["end"], chunk=chunk)
        value, (found,) = prompt_gradient(encoder, p.detach(), lambda classes: loss_of_classes(classes[0]))
        assert value.item() == pytest.approx(expected.item(), rel=1e-9)
        assert relative(found, by_prompt) < 1e-9


@pytest.mark.parametrize("kind", ["vit", "siglip"])
def test_training_equals_plain_sgd_steps(kind: str, tmp_path: Path) -> None:
    """Then the class vectors of other names are compared."""
    settings = changed(KgcoopConfig(template=TEMPLATE), epochs=3, batch=4, lr=0.02, warmup_lr=0.01)
    context, exact = make_context(tmp_path, kind), small(kind, torch.float64)
    names = [name.replace("_", " ") for name in context.source.names]

    def gradients(parameters: Any, images: Tensor, labels: Tensor) -> list[Tensor]:
        p = parameters[0].detach().clone().requires_grad_()
        value = kgcoop.loss(exact, names, p, images, labels, 1 / context.model.scale, 8.0, TEMPLATE)
        return list(torch.autograd.grad(value, p))

    start = words(exact, "a photo of a")
    (expected,) = minimise(
        [start], gradients, *train_data(context, settings.learn), epochs=3, batch=4, lr=0.02, warmup=0.01
    )
    found = learned(KGCOOP, settings, context)["context"]
    assert (found - expected).norm() < 2e-4 * expected.norm()
    assert (expected - start).norm() > 1e-2
    classifier = KGCOOP.fit(context, settings).for_classes(OTHERS, "{} texture.").classifier
    assert isinstance(classifier, Classifier)
    classes = reference.encode(exact, "end", OTHERS, found.double())
    assert relative(classifier.weights, classes / classes.norm(dim=-1, keepdim=True)) < 1e-4
    classifier.save(tmp_path / "classifier")
    assert Classifier.load(tmp_path / "classifier").origin["settings"]["template"] == TEMPLATE


def test_higher_weight_keeps_class_vectors_closer_to_the_hand_crafted_ones(tmp_path: Path) -> None:
    """The distance decreases as the weight increases."""
    distances = []
    for weight in (0.0, 8.0, 200.0):
        settings = changed(KgcoopConfig(weight=weight), epochs=8, batch=9, warmup_lr=0.002, words="kite")
        classifier: Any = KGCOOP.fit(make_context(tmp_path), settings).for_classes(NAMES, "{}").classifier
        model = small("vit")
        hand_crafted = reference.encode(model, "hand_crafted", NAMES, torch.zeros(0, 32), KgcoopConfig.template)
        distances.append(distance(classifier.weights, hand_crafted).item())
    assert distances[0] > distances[1] > distances[2]


def test_determinism_resuming_reuse_chunking_and_single_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_method(KGCOOP, changed(KgcoopConfig(), epochs=2, length=5, lr=0.1), tmp_path, monkeypatch)


@pytest.mark.parametrize("wrong", [{"weight": -1.0}, {"weight": float("nan")}, {"template": "no place for a name"}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError):
        KgcoopConfig(**wrong)
