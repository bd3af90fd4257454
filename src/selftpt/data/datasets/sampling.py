"""Parts of labelled images: halves of the classes, fractions, fewer classes, fewer images."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence

from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError


def half(source: Source, new: bool) -> Source:
    """The base classes, which are the first half of the labels and the middle one, or else the new ones."""
    count = len(source.names)
    middle = (count + 1) // 2
    return _classes(source, range(middle, count) if new else range(middle))


def some_classes(source: Source, count: int, seed: int) -> Source:
    """So many classes, drawn at random, in their old order."""
    if not 1 <= count <= len(source.names):
        raise SelfTPTError(f"cannot take {count} of {len(source.names)} classes")
    return _classes(source, sorted(random.Random(seed).sample(range(len(source.names)), count)))


def fraction(source: Source, share: float, seed: int) -> Source:
    """A share of the images of each class, at least one; a smaller share is part of a larger one."""
    if not 0 < share <= 1:
        raise SelfTPTError(f"a share of the images must be above 0 and at most 1, not {share:g}")
    rng = random.Random(seed)
    chosen: list[int] = []
    for places in by_label(source).values():
        rng.shuffle(places)
        chosen += places[: max(1, round(share * len(places)))]
    return _images(source, chosen)


def limit(source: Source, count: int) -> Source:
    """`count` images, a fixed choice: the first of each class, the second of each, and so on.

    Classes take turns in an order that is drawn once, so that a part of a turn is of all kinds.
    """
    if count < 1:
        raise SelfTPTError(f"at least one image is needed, not {count}")
    order = random.Random(0).sample(range(len(source.names)), len(source.names))
    grouped = by_label(source)
    turns = [(turn, order[label], place) for label in grouped for turn, place in enumerate(grouped[label])]
    return _images(source, (place for _, _, place in sorted(turns)[:count]))


def by_label(source: Source) -> dict[int, list[int]]:
    """The places in the list that each class has, classes in order of appearance."""
    places: dict[int, list[int]] = {}
    for place, label in enumerate(source.labels):
        places.setdefault(label, []).append(place)
    return places


def _images(source: Source, places: Iterable[int]) -> Source:
    """The images at these places, in the order of the list."""
    return source.select(sorted(places))


def _classes(source: Source, labels: Sequence[int]) -> Source:
    """The classes of these labels, labelled from 0."""
    new = {label: i for i, label in enumerate(labels)}
    kept = source.select([i for i, label in enumerate(source.labels) if label in new])
    names = tuple(source.names[label] for label in labels)
    return dataclasses.replace(kept, names=names, labels=tuple(new[label] for label in kept.labels))
