"""TDA: all pictures at once against a loop over the stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt import SelfTPTError
from selftpt.adaptation import zero_shot
from selftpt.data.features import ViewSpec
from selftpt.methods import METHODS, Job, tda
from selftpt.methods.tda import Settings, adapted_logits, keep, look
from tests.oracle import tda as oracle
from tests.small import model

NAMES = ("red fox", "blue whale", "kite")
TEMPLATE = "a photo of a {}."


def draw(seed: int, count: int, views: int, classes: int, dimension: int = 5) -> tuple[Tensor, Tensor]:
    """Unit features [N, V, D] and class vectors [C, D]."""
    generator = torch.Generator().manual_seed(seed)
    shown = torch.randn(count, views, dimension, generator=generator, dtype=torch.float64)
    weights = torch.randn(classes, dimension, generator=generator, dtype=torch.float64)
    return F.normalize(shown, dim=-1), F.normalize(weights, dim=-1)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 40),
    views=st.sampled_from([1, 1, 2, 25]),
    classes=st.integers(2, 5),
    shots=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    block=st.sampled_from([1, 7, 512]),
)
def test_the_stream(seed: int, count: int, views: int, classes: int, shots: tuple[int, int], block: int) -> None:
    shown, weights = draw(seed, count, views, classes)
    hyper = oracle.Hyper(shots, alpha=(2.0, 0.7), beta=(5.0, 1.5), entropies=(0.1, 0.6))
    chosen = Settings(
        positive_shots=shots[0], negative_shots=shots[1], negative_weight=0.7, negative_sharpness=1.5,
        unsure_above=0.1, unsure_below=0.6,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tda, "BLOCK", block)
        found = adapted_logits(look(shown, weights, 6.0), chosen)
    torch.testing.assert_close(found, torch.stack(oracle.run(shown, weights, 6.0, hyper)))


def test_both_caches_are_used() -> None:
    """Or the comparison above would be of nothing."""
    shown, weights = draw(0, 60, 1, 4)
    stream = look(shown, weights, 6.0)
    whole = adapted_logits(stream, Settings())
    for name in ("positive_weight", "negative_weight"):
        without = adapted_logits(stream, Settings(**{name: 0.0}))
        assert (whole - without).abs().max() > 1e-3
    assert torch.equal(adapted_logits(stream, Settings(positive_weight=0, negative_weight=0)), stream.logits)


def test_what_is_kept_and_for_how_long() -> None:
    """Two of a class; a third comes in only if it is surer than the less sure one, not if it is just as sure."""
    entered, left = keep([0, 2, 3, 5, 6], [1, 1, 1, 1, 0], [0.5, 0.3, 0.5, 0.4, 0.9], 2, end=8)
    assert dict(zip(entered.tolist(), left.tolist(), strict=True)) == {0: 5, 2: 8, 5: 8, 6: 8}


def test_the_method(tmp_path: Path) -> None:
    """The seed draws the order; answers come in the order of the pictures; a second call knows nothing of the first."""
    method, eyes = METHODS["tda"], model()
    assert method.whole
    shown = F.normalize(torch.randn(20, 1, eyes.dimension, generator=torch.Generator().manual_seed(3)), dim=-1)
    job = Job(eyes, None, tmp_path, print)
    first, second = (method.fit(job, method.seeded(seed))(NAMES, TEMPLATE) for seed in (1, 2))
    found = first(shown)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    classifier = zero_shot(eyes, NAMES, TEMPLATE)
    slow = oracle.run(shown[order].double(), classifier.weights.double(), eyes.scale, oracle.Hyper())
    for place, logits in zip(order.tolist(), slow, strict=True):
        torch.testing.assert_close(found[place].double(), logits.softmax(-1), rtol=0, atol=1e-4)
    assert torch.equal(first(shown), found)
    assert not torch.allclose(second(shown), found)
    assert method.looks(Settings()) == [ViewSpec()]
    assert method.looks(Settings(views=64)) == [ViewSpec(), ViewSpec(63, 0, augmix=True)]


@pytest.mark.parametrize(
    "wrong",
    [{"views": 0}, {"positive_shots": 0}, {"negative_weight": -1}, {"unsure_above": 0.5}, {"seed": -1}],
)
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SelfTPTError):
        Settings(**wrong)  # type: ignore[arg-type]
