"""TDA: processing all images at once equals a loop over the stream."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt import SelfTPTError
from selftpt.adaptation import zero_shot
from selftpt.data.features import Block
from selftpt.data.views import ViewSpec
from selftpt.methods import METHODS, FitContext, Predictor, tda
from selftpt.methods.tda import TDA, TdaConfig, adapted_logits, keep, merge
from tests.helpers.models import model
from tests.oracle import tda as oracle

NAMES = ("red fox", "blue whale", "kite")
TEMPLATE = "a photo of a {}."


def draw(seed: int, count: int, views: int, classes: int, dimension: int = 5) -> tuple[Tensor, Tensor]:
    """Return L2-normalised features [N, V, D] and class vectors [C, D]."""
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
def test_stream_equals_the_reference(
    seed: int, count: int, views: int, classes: int, shots: tuple[int, int], block: int
) -> None:
    shown, weights = draw(seed, count, views, classes)
    hyper = oracle.Hyper(shots, alpha=(2.0, 0.7), beta=(5.0, 1.5), entropies=(0.1, 0.6))
    chosen = TdaConfig(
        positive_shots=shots[0], negative_shots=shots[1], negative_weight=0.7, negative_sharpness=1.5,
        unsure_above=0.1, unsure_below=0.6,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tda, "BLOCK", block)
        found = adapted_logits(merge(shown, weights, 6.0), chosen)
    torch.testing.assert_close(found, torch.stack(oracle.run(shown, weights, 6.0, hyper)))


def test_both_caches_are_used() -> None:
    """Otherwise the comparison above would not test both."""
    shown, weights = draw(0, 60, 1, 4)
    stream = merge(shown, weights, 6.0)
    whole = adapted_logits(stream, TdaConfig())
    for name in ("positive_weight", "negative_weight"):
        without = adapted_logits(stream, TdaConfig(**{name: 0.0}))
        assert (whole - without).abs().max() > 1e-3
    assert torch.equal(adapted_logits(stream, TdaConfig(positive_weight=0, negative_weight=0)), stream.logits)


def test_cache_keeps_the_images_of_lowest_entropy() -> None:
    """The cache has two images per class. A third replaces the one of higher entropy only if its entropy is lower."""
    entered, left = keep([0, 2, 3, 5, 6], [1, 1, 1, 1, 0], [0.5, 0.3, 0.5, 0.4, 0.9], 2, end=8)
    assert dict(zip(entered.tolist(), left.tolist(), strict=True)) == {0: 5, 2: 8, 5: 8, 6: 8}


def predictor_of(**changes: Any) -> Predictor:
    return TDA.fit(FitContext(model()), TdaConfig(**changes)).for_classes(NAMES, TEMPLATE)


def features_of(count: int, views: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return F.normalize(torch.randn(count, views, model().dimension, generator=generator), dim=-1)


def test_seed_determines_the_order_of_the_stream() -> None:
    """Predictions are in input order, and a second call does not depend on the first."""
    features, first = features_of(20), predictor_of(seed=1)
    found = first(features)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    classifier = zero_shot(model(), NAMES, TEMPLATE)
    slow = oracle.run(features[order].double(), classifier.weights.double(), model().scale, oracle.Hyper())
    for place, logits in zip(order.tolist(), slow, strict=True):
        torch.testing.assert_close(found[place].double(), logits.softmax(-1), rtol=0, atol=1e-4)
    assert torch.equal(first(features), found)
    assert not torch.allclose(predictor_of(seed=2)(features), found)
    assert METHODS["tda"].seeded(2) == TdaConfig(seed=2)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), views=st.sampled_from([1, 12]))
def test_blocks_of_any_sizes_equal_one_block(sizes: list[int], views: int) -> None:
    features, predictor = features_of(sum(sizes), views), predictor_of(views=views)
    expected = predictor(features)
    torch.testing.assert_close(predictor.function(iter(features.split(sizes))), expected, rtol=0, atol=1e-6)
    indices = torch.arange(len(features)).split(sizes)
    sources: list[list[Any]] = [[f"{i}.png" for i in some.tolist()] for some in indices]
    blocks = [Block(*each) for each in zip(indices, sources, features.split(sizes), strict=True)]
    found = list(predictor.stream(iter(blocks)))
    assert [len(probabilities) for _, probabilities in found] == sizes
    assert [block.sources for block, _ in found] == sources
    torch.testing.assert_close(torch.cat([probabilities for _, probabilities in found]), expected, rtol=0, atol=1e-6)


def test_stream_without_images_is_empty() -> None:
    assert list(predictor_of().stream(iter([]))) == []


def test_views_are_freed_while_the_stream_is_read() -> None:
    """Only what the caches need is kept of each block, not its views or the memory that they share."""
    alive: list[int] = []

    def blocks() -> Iterator[Block]:
        arrays: list[weakref.ref[np.ndarray]] = []
        for number in range(6):
            array = features_of(4, 12).numpy().copy()
            arrays.append(weakref.ref(array))
            views = torch.from_numpy(array)  # keeps the array alive while its memory is in use
            del array
            yield Block(torch.arange(4 * number, 4 * number + 4), [f"{i}.png" for i in range(4)], views)
            del views
            alive.append(sum(ref() is not None for ref in arrays))

    assert len(list(predictor_of(views=12).stream(blocks()))) == 6
    assert max(alive) <= 2, "the first block, and the one that is being read"


def test_views_and_cost_follow_from_the_configuration() -> None:
    assert METHODS["tda"] is TDA
    assert TDA.transductive
    assert TDA.views(TdaConfig()) == [ViewSpec()]
    assert TDA.views(TdaConfig(views=64)) == [ViewSpec(), ViewSpec(63, 0, augmix=True)]
    assert TDA.cost(TdaConfig()) == "1 view, cache lookup"
    assert TDA.cost(TdaConfig(views=8)) == "8 views, cache lookup"


@pytest.mark.parametrize(
    "wrong",
    [{"views": 0}, {"positive_shots": 0}, {"positive_shots": 1.5}, {"negative_weight": -1}, {"augmix": "yes"},
     {"seed": -1}, {"unsure_below": None}],
)  # fmt: skip
def test_invalid_configuration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match=f"TdaConfig.{next(iter(wrong))} must be"):
        TdaConfig(**wrong)


def test_range_of_entropies_must_not_be_empty() -> None:
    with pytest.raises(SelfTPTError, match=r"unsure_below must be above unsure_above, 0\.5"):
        TdaConfig(unsure_above=0.5)
