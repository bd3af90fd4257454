"""WaffleCLIP: VisDesc with random words and random characters as descriptors, the same for every class."""

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
SHORTEST = 4  # minimum number of letters of a word


@dataclass(frozen=True)
class WaffleClipConfig(Config):
    """The number of random descriptors, and the seed."""

    pairs: int = setting(15, "number of descriptors of random words, and of random characters", above=0)
    seed: int = setting(1, "seed of the random words and characters", minimum=0, below=INT_LIMIT)


@functools.cache
def vocabulary() -> list[str]:
    """Return the whole words of CLIP's vocabulary, in its order."""
    words = (piece.removesuffix("</w>") for piece in SimpleTokenizer().encoder if piece.endswith("</w>"))
    return [word for word in words if word.isascii() and word.isalpha() and len(word) >= SHORTEST]


def draw(names: Sequence[str], pairs: int, seed: int) -> list[str]:
    """Draw random descriptors whose sizes follow those of the class names, by the rule of the authors' code.

    Args:
        names: Class names as the user gives them; a name with `_` counts as one word, as in the authors' code.
        pairs: The number of pairs.
        seed: The seed.

    Returns:
        Descriptors [2 * pairs], alternately random words and groups of random characters.
    """
    rng = random.Random(seed)
    split_names = [name.split() for name in names]
    mean_lengths = [Fraction(sum(map(len, parts)), len(parts)) for parts in split_names]
    words = max(1, round(statistics.mean(Fraction(len(parts)) for parts in split_names)))
    length = max(1, round(statistics.mean(mean_lengths)))
    groups = round(statistics.mean(Fraction(len(parts) - 1) for parts in split_names)) + 1
    longest = math.ceil(statistics.mean(Fraction(max(map(len, parts))) for parts in split_names))
    size = longest // groups + 1
    descriptors = []
    for _ in range(pairs):
        descriptors.append(" ".join(rng.choice(vocabulary())[:length] for _ in range(words)))
        descriptors.append(", ".join("".join(rng.choices(CHARACTERS, k=size)) for _ in range(groups)))
    return descriptors


def classify(fitted: FittedMethod, names: Sequence[str], _template: str) -> Classifier:
    """Make a classifier from sentences with random descriptors, the same for every class."""

    def tails() -> list[list[str]]:
        descriptors = draw(names, fitted.config.pairs, fitted.config.seed)
        return [[f", {relative_clause(descriptor)}." for descriptor in descriptors]] * len(names)

    return described(fitted, names, "A photo of a ", tails)


WAFFLECLIP = Method(
    "waffleclip",
    WaffleClipConfig(),
    classify,
    uses_seed=True,
)
