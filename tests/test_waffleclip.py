"""WaffleCLIP: what is drawn, and the mean of cosines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from selftpt.classifier import Classifier
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.methods import METHODS, Job
from selftpt.methods.waffleclip import CHARACTERS, Settings, draw, vocabulary
from tests.oracle import described
from tests.small import Small, name_of, relative, small

NAMES = ["cat", "red kite", "bird on the lake"]


def classifier(small: Small, names: list[str] = NAMES, **settings: int) -> Classifier:
    job = Job(small.model, None, Path("nowhere"), lambda error: None)
    made = METHODS["waffleclip"].fit(job, Settings(**settings))(names, "a photo of a {}.")
    assert isinstance(made, Classifier)
    return made


@pytest.mark.parametrize("kind", ["vit", "worldwide", "siglip"])
def test_it_is_the_mean_of_cosines(kind: str) -> None:
    tiny = small(kind, torch.float64)
    drawn = torch.randn(2, tiny.spec.dimension, generator=torch.Generator().manual_seed(0))
    pictures = F.normalize(drawn.double(), dim=-1)
    found = classifier(tiny, pairs=3)(pictures[:, None])
    sentences = [f"A photo of a {{}}, {described.clause(one)}." for one in draw(NAMES, 3, 1)]
    wanted = described.probabilities(tiny, pictures, NAMES, [sentences] * 3, tiny.model.scale)
    assert relative(found, wanted) < 1e-9


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.text("abcdef", min_size=1), min_size=1, max_size=6).map(" ".join), min_size=2, max_size=9),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_what_is_drawn_is_as_long_as_the_names(names: list[str], pairs: int, seed: int) -> None:
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


def test_words_are_whole_and_many() -> None:
    words = vocabulary()
    assert {"photo", "striped", "wooden"} <= set(words)
    assert len(words) == len(set(words)) > 10_000
    assert all(word.isalpha() and len(word) >= 4 for word in words)


def test_the_seed_is_the_repetition() -> None:
    tiny = small("vit")
    first = classifier(tiny)
    assert torch.equal(first.weights, classifier(tiny).weights)
    assert not torch.allclose(first.weights, classifier(tiny, seed=2).weights, atol=1e-3)
    assert METHODS["waffleclip"].draws
    assert METHODS["waffleclip"].seeded(7) == Settings(seed=7)


def test_two_names_of_the_same_words_have_the_same_sentences() -> None:
    with pytest.warns(SelfTPTWarning, match="equal class names: red kite"):
        a, b, _ = classifier(small("vit"), ["red kite", "red_kite", "Cat"]).weights
    assert torch.equal(a, b)


def test_names_that_leave_little_room() -> None:
    """In 32 positions, the sentences of long names lose their end; names that do not fit at all are refused."""
    tiny = small("layerscale")
    with pytest.warns(SelfTPTWarning, match="sentences lose their end"):
        classifier(tiny, [name_of(20), "cat"])
    with pytest.raises(SelfTPTError, match="too long"):
        classifier(tiny, [name_of(40), "cat"])


@pytest.mark.parametrize("wrong", [{"pairs": 0}, {"seed": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SelfTPTError):
        Settings(**wrong)


@pytest.mark.parametrize("names", [["cat", ""], ["cat"], []])
def test_wrong_names_are_refused(names: list[str]) -> None:
    with pytest.raises(SelfTPTError):
        classifier(small("vit"), names)
