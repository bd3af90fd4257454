"""MTA: the fast mode of many pictures, and the slow one of each."""

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
from selftpt.methods import METHODS, Job
from selftpt.methods.mta import Settings, mode, squared_bandwidth
from tests.oracle import mta as oracle
from tests.small import model

NAMES = ("red fox", "blue whale", "kite")
TEMPLATE = "a photo of a {}."


def draw(seed: int, pictures: int, views: int, spread: float = 1.0, dimension: int = 6) -> tuple[Tensor, Tensor]:
    """Unit features that lie together, but for the last quarter, and their probabilities of four classes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centre = normal(pictures, 1, dimension).repeat(1, views, 1)
    centre[:, -(views // 4) :] = normal(pictures, 1, dimension)
    features = F.normalize(centre + spread * normal(pictures, views, dimension), dim=-1)
    return features, (10 * features @ F.normalize(normal(4, dimension), dim=-1).t()).softmax(-1)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    views=st.integers(5, 12),
    spread=st.floats(0.05, 2),
    affinity=st.floats(0, 8),
    entropic=st.floats(0.05, 1),
)
def test_the_mode(seed: int, views: int, spread: float, affinity: float, entropic: float) -> None:
    features, probabilities = draw(seed, 3, views, spread)
    found = mode(features, probabilities, affinity, entropic)
    for i in range(3):
        wanted = oracle.mode(features[i], probabilities[i], affinity, entropic)
        torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-4)


def test_the_bandwidth() -> None:
    features, _ = draw(0, 2, 11)
    for found, picture in zip(squared_bandwidth(features).sqrt(), features, strict=True):
        torch.testing.assert_close(found, torch.tensor(oracle.bandwidths(picture), dtype=torch.float64))


def test_a_view_that_does_not_fit_in_hardly_counts() -> None:
    """The mean of the views is drawn to those elsewhere; the mode is not."""
    features, probabilities = draw(1, 8, 64, spread=0.2, dimension=16)
    middle = F.normalize(features[:, :48].mean(1), dim=-1)
    found = mode(features, probabilities, 4.0, 0.2)
    mean = F.normalize(features.mean(1), dim=-1)
    assert ((found * middle).sum(-1) > (mean * middle).sum(-1)).all()


@pytest.mark.parametrize("views", [1, 2, 3, 64])
def test_views_that_are_all_the_same(views: int) -> None:
    """As those of a blank picture. Rounding makes them differ a little, or not at all."""
    one = F.normalize(torch.randn(5, 1, 24), dim=-1).repeat(1, views, 1)
    for features in (one, F.normalize(one + 1e-7 * torch.randn_like(one), dim=-1)):
        found = mode(features, torch.full((5, views, 3), 1 / 3), 4.0, 0.2)
        torch.testing.assert_close(found, one[:, 0], rtol=0, atol=1e-5)


def test_the_method(tmp_path: Path) -> None:
    """A batch is what its pictures are one by one, and that is zero-shot of the mode."""
    eyes = model()
    method, chosen = METHODS["mta"], Settings(views=9, affinity=2.0, spread=0.5)
    predictor = method.fit(Job(eyes, None, tmp_path, print), chosen)(NAMES, TEMPLATE)
    shown = F.normalize(torch.randn(4, 9, eyes.dimension, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = predictor(shown)
    torch.testing.assert_close(torch.cat([predictor(one[None]) for one in shown]), found)
    classifier = zero_shot(eyes, NAMES, TEMPLATE)
    for row, views in zip(found, shown.double(), strict=True):
        centre = oracle.mode(views, classifier.probabilities(views), 2.0, 0.5)
        torch.testing.assert_close(row.double(), classifier.probabilities(centre), rtol=0, atol=1e-4)
    assert method.looks(chosen)[1].views == 8


@pytest.mark.parametrize("wrong", [{"views": 0}, {"spread": 0}, {"affinity": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SelfTPTError):
        Settings(**wrong)  # type: ignore[arg-type]
