"""ZERO: the fast vote and the slow one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt import SelfTPTError
from selftpt.adaptation import zero_shot
from selftpt.methods import METHODS, Job
from selftpt.methods.views import confident_views, entropy, views_of
from selftpt.methods.zero import Settings, vote
from tests.oracle import zero as oracle
from tests.small import model

NAMES = ("red fox", "blue whale", "kite")
TEMPLATE = "a photo of a {}."


def draw(seed: int, *shape: int, sharp: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    views=st.integers(1, 24),
    classes=st.integers(2, 6),
    confident=st.sampled_from([0.1, 0.3, 0.5, 1.0]),
)
def test_the_vote(seed: int, views: int, classes: int, confident: float) -> None:
    probabilities = draw(seed, 4, views, classes)
    found = vote(probabilities, confident)
    assert torch.allclose(found.sum(-1), torch.ones(4))
    for row, picture in zip(found, probabilities.tolist(), strict=True):
        winner, votes = oracle.predict(picture, confident)
        votes[winner] += votes.count(max(votes)) > 1
        assert row.argmax() == winner
        torch.testing.assert_close(row, torch.tensor(votes) / sum(votes))


def sure(label: int, certainty: float) -> list[float]:
    """Probabilities of three classes, one of them likely."""
    return [certainty if c == label else (1 - certainty) / 2 for c in range(3)]


@pytest.mark.parametrize(
    ("rest", "winner"),
    [
        ([sure(1, 0.5), sure(0, 0.6)], 1),  # the first of them, though it is less sure
        ([sure(2, 0.5), sure(1, 0.6)], 1),  # the first that is for a tied class
        ([[0.2, 0.3, 0.5], sure(2, 0.6)], 1),  # none is: what the first of them says of the tied ones
    ],
)
def test_ties_are_broken_by_those_that_come_after(rest: list[list[float]], winner: int) -> None:
    probabilities = torch.tensor([[sure(0, 0.9), sure(1, 0.9), *rest]])
    assert torch.allclose(vote(probabilities, 0.5), torch.eye(3)[:2].sum(0) / 3 + torch.eye(3)[winner] / 3)


def test_the_confident_are_those_of_least_entropy() -> None:
    probabilities = draw(0, 5, 64, 7)
    chosen = confident_views(probabilities, 0.3)
    assert chosen.shape == (5, 19)
    for picture, kept in zip(probabilities.tolist(), chosen.tolist(), strict=True):
        by_entropy = sorted(range(64), key=lambda v: oracle.entropy(picture[v]))
        assert kept == by_entropy[:19]
    assert confident_views(probabilities, 0.1).shape == (5, 6)
    assert entropy(torch.tensor([0.0, 1.0])) == 0


def test_the_method(tmp_path: Path) -> None:
    method, eyes = METHODS["zero"], model()
    predictor = method.fit(Job(eyes, None, tmp_path, print), Settings(views=10))(NAMES, TEMPLATE)
    shown = torch.nn.functional.normalize(torch.randn(6, 10, eyes.dimension), dim=-1)
    found = predictor(shown)
    seen = zero_shot(eyes, NAMES, TEMPLATE).probabilities(shown).tolist()
    assert found.argmax(1).tolist() == [oracle.predict(picture, 0.3)[0] for picture in seen]
    assert torch.equal(torch.cat([predictor(one[None]) for one in shown]), found)
    assert method.looks(Settings(views=10)) == views_of(10)
    assert [look.views for look in views_of(10)] == [1, 9]
    assert [look.augmix for look in views_of(10, augmix=True)] == [False, True]
    assert [look.views for look in views_of(1, augmix=True)] == [1]


@pytest.mark.parametrize("wrong", [{"views": 0}, {"confident": 0}, {"confident": 1.5}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SelfTPTError):
        Settings(**wrong)  # type: ignore[arg-type]
