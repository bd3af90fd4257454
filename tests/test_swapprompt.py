"""SwapPrompt: its loss, its gradient and its steps, against the slow ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt import SelfTPTError
from selftpt.config import ContrastConfig
from selftpt.data.features import ViewSpec
from selftpt.methods import METHODS, Job
from selftpt.methods.swapprompt import Settings, objective, pseudo_labels, tune
from selftpt.models.text import TextEncoder
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import prompt_gradient
from selftpt.training import learning_rate
from tests.oracle import plain
from tests.oracle import swapprompt as oracle
from tests.small import Small, model, random_prompt, relative, small

NAMES = ("red fox", "blue whale", "kite")
TEMPLATE = "a photo of a {}."


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(drawn, dim=-1).to(dtype)


def encoder_of(tiny: Small, length: int, chunk: int | None = None) -> TextEncoder:
    tokens = class_tokens(tiny.model.text.tokenizer, NAMES, length, ContrastConfig())
    return TextEncoder(tiny.model.text, tokens, length, ("end",), chunk=chunk)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 30), classes=st.integers(2, 4), shots=st.integers(1, 5))
def test_pseudo_labels(seed: int, count: int, classes: int, shots: int) -> None:
    probabilities = (3 * draw(seed, count, classes)).softmax(-1)
    assert pseudo_labels(probabilities, shots).tolist() == oracle.assignments(probabilities.tolist(), shots)
    assert pseudo_labels(probabilities, None).tolist() == probabilities.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["vit", "custom-text", "worldwide", "coca"])
@pytest.mark.parametrize("labels", [[1, -1, 2], [-1, -1, -1]], ids=["some", "none"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_the_loss_and_its_gradient(kind: str, labels: list[int], chunk: int | None) -> None:
    tiny = small(kind, torch.float64)
    online, target = random_prompt(tiny, 3, 0), random_prompt(tiny, 3, 1)
    pairs = draw(2, 3, 2, tiny.model.dimension)
    chosen, scale = Settings(swap=0.7, pseudo=1.3), tiny.model.scale
    encoder = encoder_of(tiny, 3, chunk)
    with torch.no_grad():
        taught = encoder(target)[0]
    loss, (gradient,) = prompt_gradient(
        encoder, online, lambda f: objective(f[0], taught, pairs, torch.tensor(labels), scale, chosen)
    )
    p = online.clone().requires_grad_()
    slow = oracle.loss(tiny, NAMES, p, target, pairs, labels, 1 / scale, (0.7, 1.3))
    assert relative(loss, slow) < 1e-8
    assert relative(gradient, torch.autograd.grad(slow, p)[0]) < 1e-7


def test_tuning_equals_a_loop_of_plain_steps() -> None:
    """The target follows the online prompt after every step; each epoch takes the next pair; SGD written out."""
    chosen = Settings(
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


def test_the_method(tmp_path: Path) -> None:
    """Zero-shot labels of the pictures, tuning on their crops, and the pictures again; nothing stays of a call."""
    method, tiny = METHODS["swapprompt"], small("vit")
    assert method.whole
    chosen = Settings(epochs=2, crops=2, batch=4, shots=1, lr=0.05, warmup_lr=0.05, length=2, words="photo of")
    shown = draw(0, 9, 3, tiny.model.dimension, dtype=torch.float32)
    predictor = method.fit(Job(tiny.model, None, tmp_path, print), chosen)(NAMES, TEMPLATE)
    found = predictor(shown)
    assert torch.equal(predictor(shown), found)
    zero_shot = plain.probabilities(
        shown[:, 0], plain.encode(tiny, "hand", NAMES, torch.empty(0), TEMPLATE), 1 / tiny.model.scale
    )
    labels = torch.tensor(oracle.assignments(zero_shot.tolist(), 1))
    prompt = tune(tiny.model, encoder_of(tiny, 2), shown[:, None, 1:], labels, chosen)
    wanted = plain.probabilities(shown[:, 0], plain.encode(tiny, "end", NAMES, prompt), 1 / tiny.model.scale)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert not torch.allclose(found, zero_shot, atol=1e-2)
    other = method.fit(Job(tiny.model, None, tmp_path, print), replace(chosen, seed=2))(NAMES, TEMPLATE)
    assert not torch.allclose(other(shown), found, atol=1e-5)
    assert method.looks(Settings()) == [ViewSpec(), ViewSpec(4, 0)]


def test_a_long_list_in_chunks_is_tuned_the_same() -> None:
    crops, labels = draw(1, 6, 1, 2, model().dimension, dtype=torch.float32), torch.tensor([0, 1, 2, -1, -1, -1])
    chosen = Settings(epochs=2, batch=3, crops=2, lr=0.05, warmup_lr=0.05)
    whole, parts = (tune(model(), encoder_of(small("vit"), 4, c), crops, labels, chosen) for c in (None, 1))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


def test_two_classes(tmp_path: Path) -> None:
    chosen = Settings(epochs=1, crops=2)
    predictor = METHODS["swapprompt"].fit(Job(model(), None, tmp_path, print), chosen)(NAMES[:2], TEMPLATE)
    found = predictor(draw(0, 3, 3, model().dimension, dtype=torch.float32))
    assert found.shape == (3, 2)
    torch.testing.assert_close(found.sum(-1), torch.ones(3))


@pytest.mark.parametrize(
    "wrong", [{"crops": 3}, {"crops": None}, {"decay": 1.0}, {"swap": 0, "pseudo": 0}, {"swap": -1}, {"epochs": 0}]
)
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SelfTPTError):
        Settings(**wrong)  # type: ignore[arg-type]
