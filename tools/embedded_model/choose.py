"""Settings of the teacher, compared on ImageNet classes that it was not told of."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.embedded_model.export import DIMENSIONS
from tools.embedded_model.ingredients import NAMES
from tools.embedded_model.student import in_cone
from tools.embedded_model.teacher import Kernel, Nouns, Space, by_looks, right

MIXES = [(1, 0, 0), (0.2, 0.5, 0.3), (0.3, 0.7, 0), (0.1, 0.6, 0.3), (0.2, 0.4, 0.4), (0.1, 0.4, 0.5)]

REACHES = (0.0, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Fold:
    """Classes the teacher is told of and others, and pictures of all: unit features [n, D] and labels [n]."""

    known: Tensor
    others: Tensor
    space: Space
    pictures: Tensor
    labels: Tensor

    def right(self, vectors: Tensor, classes: Tensor) -> float:
        """The share of the pictures of some sorted classes [C] that is told right by their vectors [C, D]."""
        some = torch.isin(self.labels, classes)
        return right(self.pictures[some], vectors, torch.searchsorted(classes, self.labels[some]))

    def teach(self, nouns: Nouns, kernel: Kernel, kinds: float = 1.0, looks: float = 1.0) -> Tensor:
        """Directions of nouns [n, D], as long as they are sure."""
        return nouns.teach(self.space.prototypes, self.known, kernel, kinds, looks)[0]

    def mixed(self, vectors: Tensor) -> float:
        """The share that is right in lists of 25 known classes and 75 others, as those are which people write."""
        rng, hits = random.Random(0), []
        for _ in range(40):
            drawn = rng.sample(self.known.tolist(), 25) + rng.sample(self.others.tolist(), 75)
            some = torch.tensor(sorted(drawn))
            hits.append(self.right(vectors[some], some))
        return statistics.mean(hits)


def choose(head: Tensor, features: Tensor, labels: Tensor, nouns: Nouns, seen: Tensor) -> None:
    """Print how well each setting does, by five folds of the seen classes."""
    folds = []
    for others in seen[torch.randperm(len(seen))].chunk(5):
        known = seen[~torch.isin(seen, others)]
        space = Space.of(head, features[torch.isin(labels, known)], known, DIMENSIONS)
        folds.append(Fold(known, others.sort().values, space, space.see(features), labels))
    alike = [i for i, name in enumerate(nouns.names) if i < len(NAMES) or name.lower() in nouns.looks]
    choose_kernel(folds, nouns.only(torch.arange(len(NAMES))))
    choose_looks(folds, nouns.only(torch.tensor(alike)))
    choose_kinds(folds, nouns.only(torch.tensor(sorted({*alike, *nouns.groups(seen)}))), seen)


def choose_kernel(folds: list[Fold], classes: Nouns) -> None:
    """The classes that the teacher was not told of, among themselves, of which it does not know what they look like."""
    print("classes not told of, by kernel")
    scores = []
    for mix, width, ridge in itertools.product(MIXES, (0.2, 0.35, 0.5), (0.01, 0.03, 0.1, 0.3)):
        kernel = Kernel(*mix, width, ridge, doubt=math.inf)
        taught = [(fold, F.normalize(fold.teach(classes, kernel, 0, 0)[fold.others], dim=-1)) for fold in folds]
        scores.append((statistics.mean(fold.right(vectors, fold.others) for fold, vectors in taught), kernel))
        print(f"{scores[-1][0]:.1%} {kernel}", flush=True)
    print("best:", *max(scores, key=lambda score: score[0]))


def choose_looks(folds: list[Fold], nouns: Nouns) -> None:
    """How much it counts what others look like (doubt) and what a thing looks like itself (weight), and the reach.

    Without weight, as if a class had no row in the table.
    """
    print("classes not told of; lists of 25 known classes and 75 others, by reach; for each doubt and weight of looks")
    for doubt in (math.inf, 0.3, 1.0, 3.0):
        taught = []
        for fold in folds:
            strangers, own = copy(nouns), {NAMES[label].lower() for label in fold.others}
            strangers.looks = {name: classes for name, classes in nouns.looks.items() if name not in own}
            taught.append((fold, fold.teach(strangers, Kernel(doubt=doubt), 0, 0)))
        for weight in (0.0, 0.5, 1.0, 2.0):
            alone, mixed = [], []
            for fold, directions in taught:
                known, prototypes = fold.known, fold.space.prototypes
                targets = directions + weight * by_looks(nouns.names, nouns.looks, prototypes, known)
                targets[known] = prototypes[known]
                alone.append(fold.right(F.normalize(targets[fold.others], dim=-1), fold.others))
                mixed.append([fold.mixed(in_cone(targets, reach)[:, :-1]) for reach in REACHES])
            told = [
                f"{statistics.mean(some):.1%} {reach}"
                for reach, some in zip(REACHES, zip(*mixed, strict=True), strict=True)
            ]
            print(f"{statistics.mean(alone):.1%} doubt {doubt} looks {weight};", *told, flush=True)


def choose_kinds(folds: list[Fold], nouns: Nouns, seen: Tensor) -> None:
    """Pictures of classes, by the names of what they are kinds of."""
    groups = nouns.groups(seen)
    place = {label: i for i, group in enumerate(groups.values()) for label in group}
    print(
        f"names of {len(groups)} groups of classes, pictures of all and of classes not told of, by the weight of kinds"
    )
    for weight in (0.0, 0.5, 1.0, 2.0):
        hits = []
        for fold in folds:
            vectors = in_cone(fold.teach(nouns, Kernel(), weight))[[*groups], :-1]
            some = torch.isin(fold.labels, torch.tensor([*place]))
            for part in (some, some & torch.isin(fold.labels, fold.others)):
                where = torch.tensor([place[label] for label in fold.labels[part].tolist()])
                hits.append(right(fold.pictures[part], vectors, where))
        print(f"{statistics.mean(hits[::2]):.1%} {statistics.mean(hits[1::2]):.1%} {weight}", flush=True)
