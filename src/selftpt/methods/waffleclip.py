"""WaffleCLIP: the descriptors of visdesc are random words and random characters, the same for every class."""

from __future__ import annotations

import functools
import math
import random
import statistics
import string
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from open_clip.tokenizer import SimpleTokenizer

from selftpt.classifier import Classifier
from selftpt.config import INT_LIMIT, Config, setting
from selftpt.methods.method import FittedMethod, Method
from selftpt.methods.visdesc import described, relative_clause

CHARACTERS = string.ascii_letters + string.digits
SHORTEST = 4  # letters of a word


@dataclass(frozen=True)
class WaffleClipConfig(Config):
    """How much is drawn, and the repetition."""

    pairs: int = setting(15, "pairs of random words and random characters", above=0)
    seed: int = setting(1, "seed of words and characters: the repetition", minimum=0, below=INT_LIMIT)


@functools.cache
def vocabulary() -> list[str]:
    """The whole words of CLIP's vocabulary, in its order."""
    words = (piece.removesuffix("</w>") for piece in SimpleTokenizer().encoder if piece.endswith("</w>"))
    return [word for word in words if word.isascii() and word.isalpha() and len(word) >= SHORTEST]


def draw(names: Sequence[str], pairs: int, seed: int) -> list[str]:
    """`pairs` times some random words, then groups of random characters: about as many and as long as in the names.

    The names are as they were given, where a name with `_` is one word, as in the authors' code.
    """
    rng = random.Random(seed)
    split = [name.split() for name in names]
    letters = [Fraction(sum(map(len, some)), len(some)) for some in split]
    words = max(1, round(statistics.mean(Fraction(len(some)) for some in split)))
    length = max(1, round(statistics.mean(letters)))
    groups = round(statistics.mean(Fraction(len(some) - 1) for some in split)) + 1
    longest = math.ceil(statistics.mean(Fraction(max(map(len, some))) for some in split))
    size = longest // groups + 1
    drawn = []
    for _ in range(pairs):
        drawn.append(" ".join(rng.choice(vocabulary())[:length] for _ in range(words)))
        drawn.append(", ".join("".join(rng.choices(CHARACTERS, k=size)) for _ in range(groups)))
    return drawn


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Sentences of random descriptors, the same for every class."""

    def tails() -> list[list[str]]:
        drawn = draw(names, fitted.config.pairs, fitted.config.seed)
        return [[f", {relative_clause(one)}." for one in drawn]] * len(names)

    return described(fitted, names, "A photo of a ", tails)


WAFFLECLIP = Method(
    "waffleclip",
    WaffleClipConfig(),
    classify,
    uses_seed=True,
)
