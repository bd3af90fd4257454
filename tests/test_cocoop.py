"""CoCoOp equals a reference implementation of its equations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt.config import TrainConfig
from selftpt.losses import Head
from selftpt.methods import cocoop as fast
from selftpt.methods.cocoop import COCOOP, CocoopConfig, image_prompts, initial_meta_net
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import tokenize
from tests.helpers.methods import OTHERS, PLAIN, changed, check_method, learned, make_context, train_data, words
from tests.helpers.models import Small, random_prompt, relative, small
from tests.oracle import cocoop
from tests.oracle.reference_sgd import minimise
from tests.test_objective import NAMES, SCALE, batch_of


def network_of(model: Small) -> Head:
    """Return a random network, in which some hidden units are active and some are not."""
    generator = torch.Generator().manual_seed(3)
    width = model.embedding.shape[1]
    shapes = [(4, model.spec.dimension), (4,), (width, 4), (width,)]
    return Head(*((0.3 * torch.randn(shape, generator=generator)).to(model.embedding.dtype) for shape in shapes))


def test_defaults_are_the_authors_settings() -> None:
    assert CocoopConfig() == CocoopConfig(TrainConfig(batch=1, epochs=10, lr=0.002, length=4, words="a photo of a"))
    assert COCOOP.cost(COCOOP.config) == "1 view, text encoding of all class names"


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_prompts_of_images_equal_the_reference(count: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    images, context, network = (
        random_tensor(count, 6),
        random_tensor(length, 5),
        Head(random_tensor(3, 6), random_tensor(3), random_tensor(5, 3), random_tensor(5)),
    )
    found = image_prompts(images, context, network)
    for image, prompt in zip(images, found, strict=True):
        assert relative(prompt, cocoop.prompt_of(image, context, network)) < 1e-12


@pytest.mark.parametrize("kind", ["vit", "vit-quickgelu", "worldwide", "siglip", "clipa"])
def test_loss_and_gradients_equal_the_reference(kind: str) -> None:
    """For three images at once, with and without chunks."""
    model = small(kind, torch.float64)
    batch = batch_of(model, len(NAMES))
    parameters = [random_prompt(model, 3), *network_of(model)]
    expected, gradients = cocoop.gradients(model, NAMES, parameters, batch.image_features, batch.labels, 1 / SCALE)
    text = model.model.text
    tokens = tokenize(NAMES, text.tokenizer, model.context)
    for chunk in (None, 2):
        encoder = TextEncoder(text, tokens, 3, ["end"], chunk=chunk)
        value, found = fast.gradients(encoder, parameters, batch.image_features, batch.labels, SCALE)
        assert value.item() == pytest.approx(expected.item(), rel=1e-9)
        for one, other in zip(found, gradients, strict=True):
            assert other.norm() > 0
            assert relative(one, other) < 1e-9
        assert not any(parameter.requires_grad for parameter in parameters)


@pytest.mark.parametrize("kind", ["vit", "siglip"])
def test_training_equals_plain_sgd_steps(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training starts from words and the random network. Then the probabilities for other class names are compared."""
    monkeypatch.setattr(fast, "REDUCTION", 4)  # otherwise the small model would have a single hidden unit
    settings = changed(CocoopConfig(), epochs=2, lr=0.02, warmup_lr=0.01)
    context, exact = make_context(tmp_path, kind), small(kind, torch.float64)
    names = [name.replace("_", " ") for name in context.source.names]
    tau = 1 / context.model.scale

    def gradients(parameters: Any, images: Tensor, labels: Tensor) -> list[Tensor]:
        return cocoop.gradients(exact, names, parameters, images, labels, tau)[1]

    d, width = exact.spec.dimension, exact.embedding.shape[1]
    network = initial_meta_net(d, width, torch.Generator().manual_seed(1))
    start = [words(exact, "a photo of a"), *network]
    features, labels = train_data(context, settings.learn)
    expected = minimise(start, gradients, features, labels, epochs=2, batch=1, lr=0.02, warmup=0.01)
    found = learned(COCOOP, settings, context)
    for name, tensor, before in zip(("context", *Head._fields), expected, start, strict=True):
        assert (found[name] - tensor).norm() < 2e-4 * tensor.norm(), name
        assert (tensor - before).norm() > 1e-2, name
    few_features = features[:4, :1]
    probabilities = COCOOP.fit(context, settings).for_classes(OTHERS, PLAIN)(few_features)
    kept = [found[name].double() for name in ("context", *Head._fields)]
    expected_probabilities = cocoop.probabilities(exact, OTHERS, kept, few_features[:, 0].double(), tau)
    assert relative(probabilities, expected_probabilities) < 1e-4


@pytest.mark.parametrize(("dimension", "hidden"), [(512, 32), (24, 1), (8, 1)])
def test_network_is_initialised_like_torch_linear_layers(dimension: int, hidden: int) -> None:
    network = initial_meta_net(dimension, 100, torch.Generator().manual_seed(0))
    assert [tuple(t.shape) for t in network] == [(hidden, dimension), (hidden,), (100, hidden), (100,)]
    for tensor, inputs in zip(network, (dimension, dimension, hidden, hidden), strict=True):
        assert tensor.abs().max() <= inputs**-0.5
    assert network.w1.abs().max() > 0.8 * dimension**-0.5
    assert network.w2.abs().max() > 0.8 * hidden**-0.5


def test_determinism_resuming_reuse_chunking_and_single_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_method(COCOOP, changed(CocoopConfig(), epochs=2, length=5, lr=0.1), tmp_path, monkeypatch)
