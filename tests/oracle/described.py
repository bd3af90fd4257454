"""visdesc and WaffleCLIP read out loud: every sentence walked alone, every cosine taken alone."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from tests.oracle import plain
from tests.small import Small


def score(small: Small, picture: Tensor, name: str, sentences: Sequence[str]) -> Tensor:
    """The mean over sentences, which have {} for the name, of their cosine with a picture [D]."""
    nothing = small.embedding[:0]
    total = torch.zeros((), dtype=picture.dtype)
    for sentence in sentences:
        (text,) = plain.encode(small, "hand", [name], nothing, sentence)
        total = total + (text @ picture) / (text.norm() * picture.norm())
    return total / len(sentences)


def probabilities(
    small: Small, pictures: Tensor, names: Sequence[str], sentences: Sequence[Sequence[str]], scale: float
) -> Tensor:
    """[N, C], of pictures [N, D]; sentences for each name."""
    rows = []
    for picture in pictures:
        scores = torch.stack([score(small, picture, name, some) for name, some in zip(names, sentences, strict=True)])
        rows.append(torch.exp(scale * scores) / torch.exp(scale * scores).sum())
    return torch.stack(rows)


def clause(descriptor: str) -> str:
    """How the authors of visdesc join a descriptor to a class name."""
    starts = {"which is": ["a", "an"], "which": ["has", "often", "typically", "may", "can"], "which is ": ["used"]}
    for words, beginnings in starts.items():
        for beginning in beginnings:
            if descriptor[: len(beginning)] == beginning:
                return f"{words.strip()} {descriptor}"
    return f"which has {descriptor}"


def sizes(names: Sequence[str]) -> tuple[int, int, int, int]:
    """Of WaffleCLIP: words and letters of each, groups and characters of each, by the rule of the authors' code."""
    count = len(names)
    words = max(1, round(Fraction(sum(len(name.split(" ")) for name in names), count)))
    letters = Fraction(0)
    for name in names:
        own = name.split(" ")
        letters += Fraction(sum(len(word) for word in own), len(own))
    groups = round(Fraction(sum(name.count(" ") for name in names), count)) + 1
    longest = Fraction(sum(max(len(word) for word in name.split(" ")) for name in names), count)
    characters = int(longest) if longest == int(longest) else int(longest) + 1
    characters += groups - characters % groups
    return words, round(letters / count), groups, characters // groups
