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

from selftpt.config import PredictConfig, above, setting
from selftpt.methods.method import Fitted, Job, Method
from selftpt.methods.visdesc import described, relative_clause

CHARACTERS = string.ascii_letters + string.digits
SHORTEST = 4  # letters of a word


@dataclass(frozen=True)
class Settings:
    """How much is drawn, and the repetition."""

    pairs: int = setting(15, "pairs of random words and random characters")
    seed: int = setting(1, "seed of words and characters: the repetition")

    def __post_init__(self) -> None:
        above(0, self, "pairs")
        PredictConfig(seed=self.seed)


@functools.cache
def vocabulary() -> list[str]:
    """The whole words of CLIP's vocabulary, in its order."""
    words = (piece.removesuffix("</w>") for piece in SimpleTokenizer().encoder if piece.endswith("</w>"))
    return [word for word in words if word.isascii() and word.isalpha() and len(word) >= SHORTEST]


def draw(names: Sequence[str], pairs: int, seed: int) -> list[str]:
    """`pairs` times some random words, then groups of random characters: about as many and as long as in the names.

    names: clean ones.
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


def fit(job: Job, settings: Settings) -> Fitted:
    """Sentences of random descriptors."""

    def tails(names: Sequence[str]) -> list[list[str]]:
        return [[f", {relative_clause(one)}." for one in draw(names, settings.pairs, settings.seed)]] * len(names)

    return lambda names, _template: described(job.model, names, "A photo of a ", tails, "waffleclip", settings)


WAFFLECLIP = Method(
    "waffleclip", "mean of sentences with random words and characters", "Roth et al., ICCV 2023", Settings(), fit
)
