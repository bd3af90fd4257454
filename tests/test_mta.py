"""MTA: the modes of many images at once equal a slow reference for each image."""

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
from selftpt.data.views import ViewSpec
from selftpt.methods import METHODS, FitContext
from selftpt.methods.mta import MTA, MtaConfig, mode, squared_bandwidth
from tests.helpers.models import model
from tests.oracle import mta as oracle

NAMES = ("red fox", "blue whale", "kite")
TEMPLATE = "a photo of a {}."


def draw(seed: int, count: int, views: int, spread: float = 1.0, dimension: int = 6) -> tuple[Tensor, Tensor]:
    """Return L2-normalised features, of which the last quarter are outliers, and probabilities of four classes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centre = normal(count, 1, dimension).repeat(1, views, 1)
    centre[:, -(views // 4) :] = normal(count, 1, dimension)
    features = F.normalize(centre + spread * normal(count, views, dimension), dim=-1)
    return features, (10 * features @ F.normalize(normal(4, dimension), dim=-1).t()).softmax(-1)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    views=st.integers(5, 12),
    spread=st.floats(0.05, 2),
    affinity=st.floats(0, 8),
    entropic=st.floats(0.05, 1),
)
def test_mode_equals_the_reference(seed: int, views: int, spread: float, affinity: float, entropic: float) -> None:
    features, probabilities = draw(seed, 3, views, spread)
    found = mode(features, probabilities, affinity, entropic)
    for i in range(3):
        expected = oracle.mode(features[i], probabilities[i], affinity, entropic)
        torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-4)


def test_bandwidth_equals_the_reference() -> None:
    features, _ = draw(0, 2, 11)
    for found, views in zip(squared_bandwidth(features).sqrt(), features, strict=True):
        torch.testing.assert_close(found, torch.tensor(oracle.bandwidths(views), dtype=torch.float64))


def test_outlying_views_hardly_move_the_mode() -> None:
    """They do move the mean."""
    features, probabilities = draw(1, 8, 64, spread=0.2, dimension=16)
    middle = F.normalize(features[:, :48].mean(1), dim=-1)
    found = mode(features, probabilities, 4.0, 0.2)
    mean = F.normalize(features.mean(1), dim=-1)
    assert ((found * middle).sum(-1) > (mean * middle).sum(-1)).all()


@pytest.mark.parametrize("views", [1, 2, 3, 64])
def test_mode_of_equal_views_is_the_view(views: int) -> None:
    """A blank image has equal views, up to rounding errors."""
    one = F.normalize(torch.randn(5, 1, 24), dim=-1).repeat(1, views, 1)
    for features in (one, F.normalize(one + 1e-7 * torch.randn_like(one), dim=-1)):
        found = mode(features, torch.full((5, views, 3), 1 / 3), 4.0, 0.2)
        torch.testing.assert_close(found, one[:, 0], rtol=0, atol=1e-5)


def test_predictor_compares_class_vectors_with_the_mode() -> None:
    """A batch equals its images one by one, and the result is zero-shot classification of the mode."""
    config = MtaConfig(views=9, affinity=2.0, spread=0.5)
    predictor = MTA.fit(FitContext(model()), config).for_classes(NAMES, TEMPLATE)
    features = F.normalize(torch.randn(4, 9, model().dimension, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = predictor(features)
    torch.testing.assert_close(torch.cat([predictor(one[None]) for one in features]), found)
    classifier = zero_shot(model(), NAMES, TEMPLATE)
    for row, views in zip(found, features.double(), strict=True):
        centre = oracle.mode(views, classifier.probabilities(views), 2.0, 0.5)
        torch.testing.assert_close(row.double(), classifier.probabilities(centre), rtol=0, atol=1e-4)


def test_views_and_cost_follow_from_the_configuration() -> None:
    assert METHODS["mta"] is MTA
    assert MTA.views(MtaConfig(views=9)) == [ViewSpec(), ViewSpec(8, 0)]
    assert MTA.cost(MTA.config) == "64 views"
    assert MTA.cost(MtaConfig(views=8)) == "8 views"


@pytest.mark.parametrize("wrong", [{"views": 0}, {"views": "9"}, {"spread": 0}, {"affinity": -1}, {"affinity": None}])
def test_invalid_configuration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match=f"MtaConfig.{next(iter(wrong))} must be"):
        MtaConfig(**wrong)
