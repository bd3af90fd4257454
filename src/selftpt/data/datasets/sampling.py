"""Subsets of labelled images: base and new classes, fractions, some of the classes, some of the images."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence

from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError


def half(source: Source, new: bool) -> Source:
    """Return the images of the base classes or of the new classes.

    The base classes are the first half of the labels, rounded up; the new classes are the others.
    """
    count = len(source.names)
    middle = (count + 1) // 2
    return _classes(source, range(middle, count) if new else range(middle))


def some_classes(source: Source, count: int, seed: int) -> Source:
    """Return the images of `count` random classes. The classes keep their order.

    Raises:
        SelfTPTError: There are fewer classes than `count`.
    """
    if not 1 <= count <= len(source.names):
        raise SelfTPTError(f"cannot take {count} of {len(source.names)} classes")
    return _classes(source, sorted(random.Random(seed).sample(range(len(source.names)), count)))


def fraction(source: Source, share: float, seed: int) -> Source:
    """Return a random fraction of the images of each class, at least one image.

    With the same seed, the images of a smaller fraction are a subset of those of a larger one.

    Raises:
        SelfTPTError: The fraction is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise SelfTPTError(f"the share of the images must be above 0 and at most 1, not {share:g}")
    rng = random.Random(seed)
    chosen: list[int] = []
    for indices in by_label(source).values():
        rng.shuffle(indices)
        chosen += indices[: max(1, round(share * len(indices)))]
    return _images(source, chosen)


def limit(source: Source, count: int) -> Source:
    """Return `count` images, balanced over the classes: the first image of each class, then the second, and so on.

    The choice is always the same. Within a round the classes are in a fixed random order, so that an incomplete round
    does not favour the first classes.

    Raises:
        SelfTPTError: `count` is less than 1.
    """
    if count < 1:
        raise SelfTPTError(f"at least one image is needed, not {count}")
    order = random.Random(0).sample(range(len(source.names)), len(source.names))
    grouped = by_label(source)
    rounds = [(number, order[label], index) for label in grouped for number, index in enumerate(grouped[label])]
    return _images(source, (index for _, _, index in sorted(rounds)[:count]))


def by_label(source: Source) -> dict[int, list[int]]:
    """Return the indices of the images of each label. Labels are in the order of their first appearance."""
    indices: dict[int, list[int]] = {}
    for index, label in enumerate(source.labels):
        indices.setdefault(label, []).append(index)
    return indices


def _images(source: Source, indices: Iterable[int]) -> Source:
    """Return the images with these indices. They keep their order."""
    return source.select(sorted(indices))


def _classes(source: Source, labels: Sequence[int]) -> Source:
    """Return the images of these classes, with labels from 0."""
    new = {label: i for i, label in enumerate(labels)}
    kept = source.select([i for i, label in enumerate(source.labels) if label in new])
    names = tuple(source.names[label] for label in labels)
    return dataclasses.replace(kept, names=names, labels=tuple(new[label] for label in kept.labels))
