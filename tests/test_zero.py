"""ZERO: votes of many images at once equal a slow reference for each image, and ties are broken by rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt import SelfTPTError
from selftpt.adaptation import zero_shot
from selftpt.classifier import confident_views, entropy
from selftpt.data.views import ViewSpec, image_and_crops
from selftpt.methods import METHODS, FitContext
from selftpt.methods.zero import ZERO, ZeroConfig, vote
from tests.helpers.models import model
from tests.oracle import zero as oracle

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
    confidence_ratio=st.sampled_from([0.1, 0.3, 0.5, 1.0]),
)
def test_vote_equals_the_reference(seed: int, views: int, classes: int, confidence_ratio: float) -> None:
    probabilities = draw(seed, 4, views, classes)
    found = vote(probabilities, confidence_ratio)
    assert torch.allclose(found.sum(-1), torch.ones(4))
    for row, views_of_image in zip(found, probabilities.tolist(), strict=True):
        winner, votes = oracle.predict(views_of_image, confidence_ratio)
        votes[winner] += votes.count(max(votes)) > 1
        assert row.argmax() == winner
        torch.testing.assert_close(row, torch.tensor(votes) / sum(votes))


def confident_in(label: int, certainty: float) -> list[float]:
    """Return probabilities of three classes, of which one is likely."""
    return [certainty if c == label else (1 - certainty) / 2 for c in range(3)]


@pytest.mark.parametrize(
    ("rest", "winner"),
    [
        ([confident_in(1, 0.5), confident_in(0, 0.6)], 0),  # the more confident view decides, although it comes later
        ([confident_in(1, 0.6), confident_in(0, 0.5)], 1),
        ([confident_in(2, 0.6), confident_in(1, 0.5)], 1),  # the first view whose class is tied decides
        ([confident_in(1, 0.5), confident_in(2, 0.6)], 1),
        # No view is of a tied class: the probabilities of the most confident view decide.
        ([[0.2, 0.3, 0.5], [0.3, 0.1, 0.6]], 0),
        ([[0.3, 0.1, 0.6], [0.2, 0.3, 0.5]], 0),
    ],
)
@pytest.mark.parametrize("voters_first", [True, False])
def test_ties_are_broken_by_the_other_views_in_order_of_entropy(
    rest: list[list[float]], winner: int, voters_first: bool
) -> None:
    """Not in input order, in which views after the first K may be voters."""
    voters = [confident_in(0, 0.9), confident_in(1, 0.9)]
    probabilities = torch.tensor([[*voters, *rest] if voters_first else [*rest, *voters]])
    assert torch.allclose(vote(probabilities, 0.5), torch.eye(3)[:2].sum(0) / 3 + torch.eye(3)[winner] / 3)


@pytest.mark.parametrize(
    "views", [[confident_in(0, 0.9), confident_in(1, 0.8)], [confident_in(1, 0.8), confident_in(0, 0.9)]]
)
def test_ties_are_broken_by_the_last_voter_if_all_views_vote(views: list[list[float]]) -> None:
    assert torch.allclose(vote(torch.tensor([views]), 1.0), torch.tensor([1 / 3, 2 / 3, 0]))


def test_confident_views_have_the_lowest_entropy() -> None:
    probabilities = draw(0, 5, 64, 7)
    chosen = confident_views(probabilities, 0.3)
    assert chosen.shape == (5, 19)
    for views, kept in zip(probabilities.tolist(), chosen.tolist(), strict=True):
        by_entropy = sorted(range(64), key=lambda v: oracle.entropy(views[v]))
        assert kept == by_entropy[:19]
    assert confident_views(probabilities, 0.1).shape == (5, 6)
    assert entropy(torch.tensor([0.0, 1.0])) == 0


def test_predictor_votes_with_zero_shot_class_vectors() -> None:
    predictor = ZERO.fit(FitContext(model()), ZeroConfig(views=10)).for_classes(NAMES, TEMPLATE)
    features = F.normalize(torch.randn(6, 10, model().dimension, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = predictor(features)
    probabilities = zero_shot(model(), NAMES, TEMPLATE).probabilities(features).tolist()
    assert found.argmax(1).tolist() == [oracle.predict(views, 0.3)[0] for views in probabilities]
    assert torch.equal(torch.cat([predictor(one[None]) for one in features]), found)


def test_views_and_cost_follow_from_the_configuration() -> None:
    assert METHODS["zero"] is ZERO
    assert ZERO.views(ZeroConfig(views=10)) == image_and_crops(10)
    assert ZERO.cost(ZERO.config) == "64 views"
    assert ZERO.cost(ZeroConfig(views=8)) == "8 views"


def test_views_are_the_image_and_its_crops() -> None:
    assert image_and_crops(10) == [ViewSpec(), ViewSpec(9, 0)]
    assert [spec.views for spec in image_and_crops(10)] == [1, 9]
    assert [spec.augmix for spec in image_and_crops(10, augmix=True)] == [False, True]
    assert [spec.views for spec in image_and_crops(1, augmix=True)] == [1]


@pytest.mark.parametrize("wrong", [{"views": 0}, {"views": 6.4}, {"confidence_ratio": 0}, {"confidence_ratio": 1.5}])
def test_invalid_configuration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match=f"ZeroConfig.{next(iter(wrong))} must be"):
        ZeroConfig(**wrong)
