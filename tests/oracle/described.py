"""Reference implementation of visdesc and WaffleCLIP: every sentence is encoded and compared separately."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from tests.helpers.models import Small
from tests.oracle import reference


def score(small: Small, image: Tensor, name: str, sentences: Sequence[str]) -> Tensor:
    """Return the mean cosine of an image [D] and sentences, in which {} stands for the class name."""
    no_prompt = small.embedding[:0]
    total = torch.zeros((), dtype=image.dtype)
    for sentence in sentences:
        (text,) = reference.encode(small, "hand_crafted", [name], no_prompt, sentence)
        total = total + (text @ image) / (text.norm() * image.norm())
    return total / len(sentences)


def probabilities(
    small: Small, images: Tensor, names: Sequence[str], sentences: Sequence[Sequence[str]], scale: float
) -> Tensor:
    """Return the probabilities [N, C] of images [N, D], given the sentences of each name."""
    rows = []
    for image in images:
        scores = torch.stack([score(small, image, name, own) for name, own in zip(names, sentences, strict=True)])
        rows.append(torch.exp(scale * scores) / torch.exp(scale * scores).sum())
    return torch.stack(rows)


def clause(descriptor: str) -> str:
    """Return the clause with which the authors of visdesc append a descriptor to a class name."""
    starts = {"which is": ["a", "an"], "which": ["has", "often", "typically", "may", "can"], "which is ": ["used"]}
    for words, beginnings in starts.items():
        for beginning in beginnings:
            if descriptor[: len(beginning)] == beginning:
                return f"{words.strip()} {descriptor}"
    return f"which has {descriptor}"


def sizes(names: Sequence[str]) -> tuple[int, int, int, int]:
    """Return WaffleCLIP's number of words, letters per word, character groups and characters per group.

    The rule is that of the authors' code. Names are used as given: words are separated by spaces only, so a name with
    `_` is one word.
    """
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
