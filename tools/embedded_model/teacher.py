"""Where a name should land: ImageNet's 1,000 class directions, spread to other nouns by kernel regression."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.embedded_model.ingredients import NAMES, WNIDS
from tools.embedded_model.wordnet import WordNet

if TYPE_CHECKING:
    from tools.embedded_model.sentences import Sentences


@dataclass(frozen=True)
class Space:
    """Image features [n, 1280] to the common space: `projection` [D, 1280], `bias` [D]; class directions [1000, D]."""

    projection: Tensor
    bias: Tensor
    prototypes: Tensor

    @classmethod
    def of(cls, head: Tensor, features: Tensor, known: Tensor, dimension: int, ridge: float = 0.1) -> Space:
        """The dimensions that best keep the scores which the known rows of a head [1000, 1280] give to pictures.

        features: what the tower saw of pictures of known classes; the common space has their mean at its origin.
        """
        head, mean = head - head[known].mean(0), features.mean(0)
        covariance = features.t().cov()
        root = torch.linalg.cholesky(covariance + ridge * covariance.diagonal().mean() * torch.eye(len(covariance)))
        _, _, basis = torch.linalg.svd(head[known] @ root, full_matrices=False)
        basis = basis[:dimension]
        projection = torch.linalg.solve_triangular(root, basis, upper=False, left=False)
        return cls(projection, -projection @ mean, F.normalize(head @ root @ basis.t(), dim=-1))

    def see(self, features: Tensor) -> Tensor:
        """Unit features [n, D] of pictures."""
        return F.normalize(features @ self.projection.t() + self.bias, dim=-1)


@dataclass(frozen=True)
class Kernel:
    """How alike two things are: by name, by definition, by place in WordNet; chosen by `choose`."""

    name: float = 0.2
    gloss: float = 0.5
    place: float = 0.3
    width: float = 0.35
    ridge: float = 0.03


class Nouns:
    """ImageNet's classes and WordNet's nouns: their names' vectors, and those and the places of their meanings.

    definitions: of the first meaning of a noun, for one noun of each meaning.
    below: the classes that are a meaning, or kinds of it.
    """

    def __init__(self, wordnet: WordNet, sentences: Sentences) -> None:
        senses = wordnet.nouns()
        self.names = [*NAMES, *senses]
        meanings = [[wnid[1:]] for wnid in WNIDS] + list(senses.values())
        offsets = sorted({offset for of in meanings for offset in of})
        place = {offset: i for i, offset in enumerate(offsets)}
        rows = [(i, place[offset], 1 / rank) for i, of in enumerate(meanings) for rank, offset in enumerate(of, 1)]
        self.noun, self.meaning = (torch.tensor(column) for column in list(zip(*rows, strict=True))[:2])
        weight = torch.tensor([row[2] for row in rows])
        total = torch.zeros(len(self.names)).index_add(0, self.noun, weight)
        self.weight = weight / total[self.noun]
        first = {of[0]: i for i, of in reversed(list(enumerate(meanings)))}
        self.definitions = {noun: wordnet.meanings[offset].gloss for offset, noun in first.items()}
        self.by_name = sentences(self.names)
        self.by_gloss = sentences([wordnet.meanings[offset].text for offset in offsets])
        self.below: dict[int, list[int]] = {}
        for label, wnid in enumerate(WNIDS):
            for offset in wordnet.ancestors(wnid[1:]) & place.keys():
                self.below.setdefault(place[offset], []).append(label)
        self.by_place = _places([wordnet.ancestors(offset) for offset in offsets], self.meaning[: len(NAMES)])

    def classes(self) -> Nouns:
        """ImageNet's classes alone."""
        alone, count, meaning = copy(self), len(NAMES), self.meaning[: len(NAMES)]
        alone.names, alone.by_name = self.names[:count], self.by_name[:count]
        alone.noun, alone.meaning, alone.weight = self.noun[:count], torch.arange(count), self.weight[:count]
        alone.by_gloss, alone.by_place = self.by_gloss[meaning], self.by_place[meaning]
        alone.below = {i: self.below[of] for i, of in enumerate(meaning.tolist())}
        return alone

    def like(self, others: Tensor, kernel: Kernel) -> Tensor:
        """The kernel between every noun and some classes: [n, len(others)]."""
        chosen = self.meaning[others]  # a class has one meaning, and is the row of its own number
        by_gloss = _rbf(self.by_gloss @ self.by_gloss[chosen].t(), kernel)
        by_meaning = kernel.gloss * by_gloss + kernel.place * (self.by_place @ self.by_place[chosen].t())
        spread = torch.zeros(len(self.names), len(chosen))
        spread.index_add_(0, self.noun, self.weight[:, None] * by_meaning[self.meaning])
        return spread + kernel.name * _rbf(self.by_name @ self.by_name[others].t(), kernel)

    def told(self, prototypes: Tensor, known: Tensor) -> Tensor:
        """What needs no inference, [n, D]: a noun has the mean direction of the known classes that are kinds of it."""
        there, directions = {*known.tolist()}, torch.zeros(len(self.by_gloss), prototypes.shape[1])
        for meaning, classes in self.below.items():
            if kinds := [label for label in classes if label in there]:
                directions[meaning] = F.normalize(prototypes[kinds].mean(0), dim=0)
        told = torch.zeros(len(self.names), prototypes.shape[1])
        return told.index_add_(0, self.noun, self.weight[:, None] * directions[self.meaning])

    def groups(self, classes: Tensor) -> dict[int, list[int]]:
        """Nouns with those of the classes that are kinds of their first meaning: two to twelve, none in two groups."""
        pairs = zip(self.noun.tolist(), self.meaning.tolist(), strict=True)
        first = dict(reversed(list(pairs)))
        name = {meaning: noun for noun, meaning in first.items() if noun >= len(NAMES)}
        there, found = {*classes.tolist()}, {}
        for meaning, below in sorted(self.below.items(), key=lambda item: (-len(item[1]), item[0])):
            kinds = [label for label in below if label in there]
            if meaning in name and 2 <= len(kinds) <= 12:
                found[name[meaning]] = kinds
                there -= {*kinds}
        return found

    def teach(self, prototypes: Tensor, known: Tensor, kernel: Kernel) -> Tensor:
        """Directions [n, D] of all nouns from those of known classes, longer if surer: kernel ridge regression."""
        like = self.like(known, kernel)
        return like @ _solve(like[known], prototypes[known], kernel)

    def teach_words(
        self, names: Tensor, glosses: Tensor | None, prototypes: Tensor, known: Tensor, kernel: Kernel
    ) -> Tensor:
        """The same for words that have no place among the nouns: by vectors [n, 384] of their names and definitions.

        Without definitions, by the names alone.
        """
        ours, like = self.by_name[known], _rbf(names @ self.by_name[known].t(), kernel)
        among = _rbf(ours @ ours.t(), kernel)
        if glosses is not None:
            ours = self.by_gloss[self.meaning[known]]
            like = kernel.name * like + kernel.gloss * _rbf(glosses @ ours.t(), kernel)
            among = kernel.name * among + kernel.gloss * _rbf(ours @ ours.t(), kernel)
        return like @ _solve(among, prototypes[known], kernel)


def right(pictures: Tensor, vectors: Tensor, labels: Tensor) -> float:
    """The share of pictures [n, D] that are nearest to the vector [C, D] of their own class [n]."""
    return ((pictures @ vectors.t()).argmax(1) == labels).float().mean().item()


def _solve(like: Tensor, directions: Tensor, kernel: Kernel) -> Tensor:
    return torch.linalg.solve(like + kernel.ridge * torch.eye(len(like)), directions)


def _rbf(cosine: Tensor, kernel: Kernel) -> Tensor:
    return ((cosine - 1) / kernel.width).exp()


def _places(ancestors: Sequence[frozenset[str]], classes: Tensor) -> Tensor:
    """Unit vectors of which the cosine tells how much two meanings share: ancestors, the rare ones counting more.

    Only what the classes are kinds of has a column, but the lengths are those of all.
    """
    count: dict[str, int] = {}
    for offset in itertools.chain.from_iterable(ancestors):
        count[offset] = count.get(offset, 0) + 1
    surprise = {offset: -torch.tensor(n / len(ancestors)).log().item() for offset, n in count.items()}
    columns = {o: i for i, o in enumerate(sorted({o for c in classes.tolist() for o in ancestors[c]}))}
    places = torch.zeros(len(ancestors), len(columns))
    for row, of in enumerate(ancestors):
        length = (
            math.fsum(surprise[o] ** 2 for o in of) ** 0.5 or 1.0
        )  # all are kinds of the first, which tells nothing
        for o in of & columns.keys():
            places[row, columns[o]] = surprise[o] / length
    return places
