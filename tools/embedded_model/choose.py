"""Settings of the teacher, compared on ImageNet classes that it was not told of."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.embedded_model.export import DIMENSIONS
from tools.embedded_model.student import in_cone
from tools.embedded_model.teacher import Kernel, Nouns, Space, right

MIXES = [(1, 0, 0), (0.2, 0.5, 0.3), (0.3, 0.7, 0), (0.1, 0.6, 0.3), (0.2, 0.4, 0.4), (0.1, 0.4, 0.5)]


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

    def teach(self, nouns: Nouns, kernel: Kernel, told: float = 0.0) -> Tensor:
        """Directions of nouns [n, D], as long as they are sure."""
        directions = nouns.teach(self.space.prototypes, self.known, kernel)
        typical = directions[self.known].norm(dim=-1).median()
        return (directions + told * nouns.told(self.space.prototypes, self.known)) / typical


def choose(head: Tensor, features: Tensor, labels: Tensor, nouns: Nouns, seen: Tensor) -> None:
    """Print how well each setting does, by five folds of the seen classes."""
    folds = []
    for others in seen[torch.randperm(len(seen))].chunk(5):
        known = seen[~torch.isin(seen, others)]
        space = Space.of(head, features[torch.isin(labels, known)], known, DIMENSIONS)
        folds.append(Fold(known, others.sort().values, space, space.see(features), labels))
    choose_kernel(folds, nouns.classes())
    choose_reach(folds, nouns.classes())
    choose_told(folds, nouns, seen)


def choose_kernel(folds: list[Fold], classes: Nouns) -> None:
    """The classes that the teacher was not told of, among themselves."""
    print("classes not told of, by kernel")
    scores = []
    for mix, width, ridge in itertools.product(MIXES, (0.2, 0.35, 0.5), (0.01, 0.03, 0.1, 0.3)):
        kernel = Kernel(*mix, width, ridge)
        taught = [(fold, F.normalize(fold.teach(classes, kernel)[fold.others], dim=-1)) for fold in folds]
        scores.append((statistics.mean(fold.right(vectors, fold.others) for fold, vectors in taught), kernel))
        print(f"{scores[-1][0]:.1%} {kernel}", flush=True)
    print("best:", *max(scores, key=lambda score: score[0]))


def choose_reach(folds: list[Fold], classes: Nouns) -> None:
    """Lists of known classes and others together, as those are which people write."""
    print("lists of 25 known classes and 75 others, by the reach of vague directions")
    for reach in (0.0, 0.1, 0.2, 0.3, 0.4):
        hits, rng = [], random.Random(0)
        for fold in folds:
            targets = fold.teach(classes, Kernel())
            targets[fold.known] = fold.space.prototypes[fold.known]
            vectors = in_cone(targets, reach)[:, :-1]
            for _ in range(40):
                drawn = rng.sample(fold.known.tolist(), 25) + rng.sample(fold.others.tolist(), 75)
                some = torch.tensor(sorted(drawn))
                hits.append(fold.right(vectors[some], some))
        print(f"{statistics.mean(hits):.1%} {reach}", flush=True)


def choose_told(folds: list[Fold], nouns: Nouns, seen: Tensor) -> None:
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
