"""SwapPrompt: loss, gradient and steps equal a slow reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt import SelfTPTError
from selftpt.config import ContrastConfig
from selftpt.data.views import ViewSpec
from selftpt.methods import METHODS, FitContext, Predictor
from selftpt.methods.swapprompt import SWAPPROMPT, SwapPromptConfig, objective, pseudo_labels, tune
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.training import learning_rate
from tests.helpers.models import Small, model, random_prompt, relative, small
from tests.oracle import reference
from tests.oracle import swapprompt as oracle

NAMES = ("red fox", "blue whale", "kite etc.")  # CLIP joins both full stops of the last name
TEMPLATE = "a photo of a {}."


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(drawn, dim=-1).to(dtype)


def encoder_of(tiny: Small, length: int, chunk: int | None = None) -> TextEncoder:
    tokens = class_tokens(tiny.model.text.tokenizer, NAMES, length, ContrastConfig())
    return TextEncoder(tiny.model.text, tokens, length, ("end",), chunk=chunk)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 30), classes=st.integers(2, 4), shots=st.integers(1, 5))
def test_pseudo_labels_equal_the_reference(seed: int, count: int, classes: int, shots: int) -> None:
    probabilities = (3 * draw(seed, count, classes)).softmax(-1)
    assert pseudo_labels(probabilities, shots).tolist() == oracle.assignments(probabilities.tolist(), shots)
    assert pseudo_labels(probabilities, None).tolist() == probabilities.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["vit", "custom-text", "worldwide", "coca"])
@pytest.mark.parametrize("labels", [[1, -1, 2], [-1, -1, -1]], ids=["some", "none"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_loss_and_gradient_equal_the_reference(kind: str, labels: list[int], chunk: int | None) -> None:
    tiny = small(kind, torch.float64)
    online, target = random_prompt(tiny, 3, 0), random_prompt(tiny, 3, 1)
    pairs = draw(2, 3, 2, tiny.model.dimension)
    chosen, scale = SwapPromptConfig(swap=0.7, pseudo=1.3), tiny.model.scale
    encoder = encoder_of(tiny, 3, chunk)
    with torch.no_grad():
        targets = encoder(target)[0]
    loss, (gradient,) = prompt_gradient(
        encoder, online, lambda f: objective(f[0], targets, pairs, torch.tensor(labels), scale, chosen)
    )
    p = online.clone().requires_grad_()
    slow = oracle.loss(tiny, NAMES, p, target, pairs, labels, 1 / scale, (0.7, 1.3))
    assert relative(loss, slow) < 1e-8
    assert relative(gradient, torch.autograd.grad(slow, p)[0]) < 1e-7


def test_tuning_equals_plain_steps() -> None:
    """The reference updates the target prompt after every step, and uses the next crop pair in each epoch."""
    chosen = SwapPromptConfig(
        epochs=3, batch=3, crops=4, length=2, words="photo of", lr=0.05, warmup_lr=0.02, decay=0.6, seed=5
    )
    tiny = small("vit", torch.float64)
    crops, labels = draw(0, 7, 2, 2, tiny.model.dimension), [0, -1, 2, -1, 1, 1, -1]
    found = tune(model("vit"), encoder_of(small("vit"), 2), crops.float(), torch.tensor(labels), chosen)

    online = tiny.embedding[torch.tensor(tiny.encode("photo of"))].clone()
    start, target, momentum = online.clone(), online.clone(), torch.zeros_like(online)
    for epoch in range(3):
        order = torch.randperm(7, generator=torch.Generator().manual_seed(5 * 100_003 + epoch)).tolist()
        for batch in (order[:3], order[3:6]):
            p = online.clone().requires_grad_()
            slow = oracle.loss(
                tiny,
                NAMES,
                p,
                target,
                crops[batch, epoch % 2],
                [labels[i] for i in batch],
                1 / tiny.model.scale,
                (1, 1),
            )
            gradient = torch.autograd.grad(slow, p)[0]
            momentum = 0.9 * momentum + gradient + 5e-4 * online
            online = online - learning_rate(epoch, chosen) * momentum
            target = 0.6 * target + 0.4 * online
    assert relative(found - start, online - start) < 2e-3
    assert (online - start).norm() > 1e-2


def predictor_of(config: SwapPromptConfig, names: tuple[str, ...] = NAMES) -> Predictor:
    return SWAPPROMPT.fit(FitContext(model()), config).for_classes(names, TEMPLATE)


SHORT = SwapPromptConfig(epochs=2, crops=2, batch=4, shots=1, lr=0.05, warmup_lr=0.05, length=2, words="photo of")


def test_predictor_tunes_on_zero_shot_labels() -> None:
    """The prompt is tuned on crops with zero-shot labels, then classifies the images; a call leaves no state."""
    tiny = small("vit")
    views = draw(0, 9, 3, tiny.model.dimension, dtype=torch.float32)
    predictor = predictor_of(SHORT)
    found = predictor(views)
    assert torch.equal(predictor(views), found)
    zero_shot = reference.probabilities(
        views[:, 0], reference.encode(tiny, "hand_crafted", NAMES, torch.empty(0), TEMPLATE), 1 / tiny.model.scale
    )
    labels = torch.tensor(oracle.assignments(zero_shot.tolist(), 1))
    prompt = tune(tiny.model, encoder_of(tiny, 2), views[:, None, 1:], labels, SHORT)
    expected = reference.probabilities(views[:, 0], reference.encode(tiny, "end", NAMES, prompt), 1 / tiny.model.scale)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(found, zero_shot, atol=1e-2)
    assert not torch.allclose(predictor_of(replace(SHORT, seed=2))(views), found, atol=1e-5)


@pytest.mark.parametrize("sizes", [[9], [1, 8], [4, 4, 1], [1] * 9])
def test_blocks_of_any_sizes_equal_one_block(sizes: list[int]) -> None:
    views, predictor = draw(0, 9, 3, model().dimension, dtype=torch.float32), predictor_of(SHORT)
    assert torch.equal(predictor.function(iter(views.split(sizes))), predictor(views))


def test_views_and_cost_follow_from_the_configuration() -> None:
    assert METHODS["swapprompt"] is SWAPPROMPT
    assert SWAPPROMPT.transductive
    assert SWAPPROMPT.views(SwapPromptConfig()) == [ViewSpec(), ViewSpec(4, 0)]
    assert SWAPPROMPT.views(SwapPromptConfig(max_megapixels=5)) == [
        ViewSpec(max_megapixels=5),
        ViewSpec(4, 0, max_megapixels=5),
    ]
    assert SWAPPROMPT.cost(SwapPromptConfig()) == "5 views, tuning"
    assert SWAPPROMPT.cost(SwapPromptConfig(crops=8)) == "9 views, tuning"


def test_chunked_tuning_equals_unchunked() -> None:
    crops, labels = draw(1, 6, 1, 2, model().dimension, dtype=torch.float32), torch.tensor([0, 1, 2, -1, -1, -1])
    chosen = SwapPromptConfig(epochs=2, batch=3, crops=2, lr=0.05, warmup_lr=0.05)
    whole, parts = (tune(model(), encoder_of(small("vit"), 4, c), crops, labels, chosen) for c in (None, 1))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


def test_two_classes_are_tuned_and_classified() -> None:
    predictor = predictor_of(SwapPromptConfig(epochs=1, crops=2), NAMES[:2])
    found = predictor(draw(0, 3, 3, model().dimension, dtype=torch.float32))
    assert found.shape == (3, 2)
    torch.testing.assert_close(found.sum(-1), torch.ones(3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"crops": 3}, "crops must be an even number"),
        ({"crops": None}, "crops must be an even number"),
        ({"crops": 4.5}, "SwapPromptConfig.crops must be"),
        ({"decay": 1.0}, "SwapPromptConfig.decay must be"),
        ({"swap": 0, "pseudo": 0}, "there is no loss"),
        ({"swap": -1}, "SwapPromptConfig.swap must be"),
        ({"pseudo": "1"}, "SwapPromptConfig.pseudo must be"),
        ({"epochs": 0}, "SwapPromptConfig.epochs must be"),
    ],
)
def test_invalid_configuration_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SelfTPTError, match=message):
        SwapPromptConfig(**wrong)
