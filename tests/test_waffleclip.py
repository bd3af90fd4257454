"""WaffleCLIP: random words and characters, and the mean of cosines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from selftpt.classifier import Classifier
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.methods import METHODS, FitContext
from selftpt.methods.waffleclip import CHARACTERS, WAFFLECLIP, WaffleClipConfig, draw, vocabulary
from tests.helpers.models import Small, name_of, relative, small
from tests.oracle import described

NAMES = ["cat", "red kite", "bird on the lake"]


def classifier(small: Small, names: list[str] = NAMES, **config: int) -> Classifier:
    fitted = WAFFLECLIP.fit(FitContext(small.model), WaffleClipConfig(**config))
    found = fitted.for_classes(names, "a photo of a {}.").classifier
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["vit", "worldwide", "siglip"])
@pytest.mark.parametrize("names", [NAMES, ["cat", "red_kite", "bird_on_the lake etc."]], ids=["plain", "raw"])
def test_logits_are_mean_cosines_of_the_sentences(kind: str, names: list[str]) -> None:
    """The sentences have cleaned names; name and descriptor are tokenised together, as in CLIP."""
    tiny = small(kind, torch.float64)
    drawn = torch.randn(2, tiny.spec.dimension, generator=torch.Generator().manual_seed(0))
    images = F.normalize(drawn.double(), dim=-1)
    found = classifier(tiny, names, pairs=3)(images[:, None])
    sentences = [f"A photo of a {{}}, {described.clause(one)}." for one in draw(names, 3, 1)]
    clean = [name.replace("_", " ") for name in names]
    expected = described.probabilities(tiny, images, clean, [sentences] * 3, tiny.model.scale)
    assert relative(found, expected) < 1e-9


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.text("abc_", min_size=1), min_size=1, max_size=6).map(" ".join), min_size=2, max_size=9),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_random_words_have_the_number_and_length_of_those_in_the_names(names: list[str], pairs: int, seed: int) -> None:
    words, letters, groups, characters = described.sizes(names)
    drawn = draw(names, pairs, seed)
    assert len(drawn) == 2 * pairs
    for text, noise in zip(drawn[::2], drawn[1::2], strict=True):
        assert len(text.split(" ")) == words
        assert all(0 < len(word) <= letters for word in text.split(" "))
        assert [len(group) for group in noise.split(", ")] == [characters] * groups
        assert set(noise) <= {*CHARACTERS, ",", " "}
    assert drawn == draw(names, pairs, seed)
    assert draw(names, pairs, seed + 10) != drawn or len("".join(drawn)) < 9


def test_name_with_underscores_counts_as_one_word() -> None:
    """As in the authors' code, words are counted before `_` is replaced by a space."""
    raw, clean = ["river_boat", "red_kite_bird"], ["river boat", "red kite bird"]
    assert described.sizes(raw) != described.sizes(clean)
    for drawn, words, groups in ((draw(raw, 5, 1), 1, 1), (draw(clean, 5, 1), 2, 3)):
        assert {len(text.split()) for text in drawn[::2]} == {words}
        assert {len(noise.split(", ")) for noise in drawn[1::2]} == {groups}
    found, cleaned = (classifier(small("vit"), names) for names in (raw, clean))
    assert found.names == cleaned.names == tuple(clean)
    assert not torch.allclose(found.weights, cleaned.weights, atol=1e-3)


def test_vocabulary_has_many_complete_words() -> None:
    words = vocabulary()
    assert {"photo", "striped", "wooden"} <= set(words)
    assert len(words) == len(set(words)) > 10_000
    assert all(word.isalpha() and len(word) >= 4 for word in words)


def test_seed_determines_the_random_words() -> None:
    tiny = small("vit")
    first = classifier(tiny)
    assert torch.equal(first.weights, classifier(tiny).weights)
    assert not torch.allclose(first.weights, classifier(tiny, seed=2).weights, atol=1e-3)
    assert WAFFLECLIP.stochastic
    assert WAFFLECLIP.seeded(7) == WaffleClipConfig(seed=7)
    assert METHODS["waffleclip"] is WAFFLECLIP
    assert WAFFLECLIP.cost(WaffleClipConfig()) == "1 view"


def test_names_with_the_same_words_have_the_same_sentences() -> None:
    with pytest.warns(SelfTPTWarning, match="equal class names: red kite"):
        a, b, _ = classifier(small("vit"), ["red kite", "red_kite", "Cat"]).weights
    assert torch.equal(a, b)


def test_sentences_of_long_names_are_truncated() -> None:
    """The context length is 32; names that do not fit are refused."""
    tiny = small("layerscale")
    with pytest.warns(SelfTPTWarning, match="sentences are truncated"):
        classifier(tiny, [name_of(20), "cat"])
    with pytest.raises(SelfTPTError, match="too long"):
        classifier(tiny, [name_of(40), "cat"])


@pytest.mark.parametrize("wrong", [{"pairs": 0}, {"pairs": 1.5}, {"seed": -1}, {"seed": None}])
def test_invalid_configuration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match=f"WaffleClipConfig.{next(iter(wrong))} must be"):
        WaffleClipConfig(**wrong)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cat", ""], "class name 2 of 2 is empty"),
        (["cat", " "], "class name 2 of 2 is empty"),
        (["cat"], "only one class name"),
        ([], "no class names"),
    ],
)
def test_invalid_names_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(SelfTPTError, match=message):
        classifier(small("vit"), names)
