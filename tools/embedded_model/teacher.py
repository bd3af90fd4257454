"""Where a name should land: ImageNet's 1,000 class directions, spread to other nouns by kernel regression."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.embedded_model.ingredients import NAMES, WNIDS, Looks
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

    def blind_to(self, change: Tensor) -> Space:
        """The same, but class directions have nothing of a change of features [1280].

        Pictures keep it: it makes all their cosines smaller, but does not change which is the largest.
        """
        away = F.normalize(self.projection @ change, dim=0)
        rest = self.prototypes - torch.outer(self.prototypes @ away, away)
        return replace(self, prototypes=F.normalize(rest, dim=-1))

    def see(self, features: Tensor) -> Tensor:
        """Unit features [n, D] of pictures."""
        return F.normalize(features @ self.projection.t() + self.bias, dim=-1)


@dataclass(frozen=True)
class Kernel:
    """How alike two things are: by name, by definition, by place in WordNet; chosen by `choose`.

    ridge: how much is doubted what classes look like; doubt: the same of other nouns.
    """

    name: float = 0.2
    gloss: float = 0.5
    place: float = 0.3
    width: float = 0.35
    ridge: float = 0.03
    doubt: float = 1.0


class Nouns:
    """ImageNet's classes and WordNet's nouns: their names' vectors, and those and the places of their meanings.

    first [n]: the meaning of a noun that is most common. below: the classes that are a meaning, or kinds of it.
    kind: what each meaning is a kind of, by name.
    """

    def __init__(self, wordnet: WordNet, sentences: Sentences, looks: Looks) -> None:
        senses = wordnet.nouns()
        self.names, self.looks = [*NAMES, *senses], looks
        meanings = [[wnid[1:]] for wnid in WNIDS] + list(senses.values())
        offsets = sorted({offset for of in meanings for offset in of})
        place = {offset: i for i, offset in enumerate(offsets)}
        self.first = torch.tensor([place[of[0]] for of in meanings])
        rows = [(i, place[offset], 1 / rank) for i, of in enumerate(meanings) for rank, offset in enumerate(of, 1)]
        self.noun, self.meaning = (torch.tensor(column) for column in list(zip(*rows, strict=True))[:2])
        weight = torch.tensor([row[2] for row in rows])
        total = torch.zeros(len(self.names)).index_add(0, self.noun, weight)
        self.weight = weight / total[self.noun]
        self.definitions = [wordnet.meanings[of[0]].gloss for of in meanings]
        self.kind = [wordnet.kind(offset) for offset in offsets]
        self.by_name = sentences(self.names)
        self.by_gloss = sentences([wordnet.meanings[offset].text for offset in offsets])
        self.below: dict[int, list[int]] = {}
        for label, wnid in enumerate(WNIDS):
            for offset in wordnet.ancestors(wnid[1:]) & place.keys():
                self.below.setdefault(place[offset], []).append(label)
        self.by_place = _places([wordnet.ancestors(offset) for offset in offsets], self.first[: len(NAMES)])

    def only(self, rows: Tensor) -> Nouns:
        """Some of them: sorted rows, the classes among them."""
        some, entries = copy(self), torch.isin(self.noun, rows)
        meanings, some.meaning = self.meaning[entries].unique(return_inverse=True)
        some.noun, some.weight = torch.searchsorted(rows, self.noun[entries]), self.weight[entries]
        some.names, some.definitions = ([of[i] for i in rows] for of in (self.names, self.definitions))
        some.first, some.by_name = torch.searchsorted(meanings, self.first[rows]), self.by_name[rows]
        some.by_gloss, some.by_place = self.by_gloss[meanings], self.by_place[meanings]
        some.kind = [self.kind[i] for i in meanings]
        some.below = {i: self.below[of] for i, of in enumerate(meanings.tolist()) if of in self.below}
        return some

    def kinds(self, prototypes: Tensor, known: Tensor) -> Tensor:
        """The mean direction of the known classes that are kinds of each meaning, or zeros: [meanings, D]."""
        there, directions = {*known.tolist()}, torch.zeros(len(self.by_gloss), prototypes.shape[1])
        for meaning, classes in self.below.items():
            if kinds := [label for label in classes if label in there]:
                directions[meaning] = prototypes[kinds].mean(0)
        return directions

    def groups(self, classes: Tensor) -> dict[int, list[int]]:
        """Nouns with those of the classes that are kinds of their first meaning: two to twelve, none in two groups."""
        name = {meaning: noun for noun, meaning in reversed([*enumerate(self.first.tolist())][len(NAMES) :])}
        there, found = {*classes.tolist()}, {}
        for meaning, below in sorted(self.below.items(), key=lambda item: (-len(item[1]), item[0])):
            kinds = [label for label in below if label in there]
            if meaning in name and 2 <= len(kinds) <= 12:
                found[name[meaning]] = kinds
                there -= {*kinds}
        return found

    def teach(
        self, prototypes: Tensor, known: Tensor, kernel: Kernel, kinds: float = 1.0, looks: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Directions [n, D] of all nouns, and [senses, D] of each in each of its meanings; longer if surer.

        Kernel ridge regression from known classes, which come out about 1 long, and from the nouns of which one knows
        what they look like. What one knows of a noun and its kinds is added, with weights.
        """
        seen = by_looks(self.names, self.looks, prototypes, known)
        alike = seen.any(dim=1).nonzero()[:, 0] if kernel.doubt < math.inf else known[:0]
        points = torch.cat([known, alike])
        given = torch.cat([prototypes[known], F.normalize(seen[alike], dim=-1)])
        doubt = torch.tensor([kernel.ridge] * len(known) + [kernel.doubt] * len(alike))
        among = self._names(points, points, kernel) + self._meanings(self.first[points], points, kernel)
        among.diagonal().add_(doubt)
        solved = torch.linalg.solve(among, given)
        by_name, by_meaning = (
            torch.cat([like(some, points, kernel) @ solved for some in torch.arange(count).split(4096)])
            for like, count in ((self._names, len(self.names)), (self._meanings, len(self.by_gloss)))
        )
        typical = (by_name[known] + by_meaning[self.first[known]]).norm(dim=-1).median()
        by_meaning = by_meaning / typical + kinds * self.kinds(prototypes, known)
        nouns = by_name / typical + looks * seen
        only = (self.weight == 1)[:, None]  # of several senses one does not know which it is that looks so
        senses = by_name[self.noun] / typical + by_meaning[self.meaning] + looks * only * seen[self.noun]
        return nouns.index_add(0, self.noun, self.weight[:, None] * by_meaning[self.meaning]), senses

    def _names(self, rows: Tensor, points: Tensor, kernel: Kernel) -> Tensor:
        return kernel.name * _rbf(self.by_name[rows] @ self.by_name[points].t(), kernel)

    def _meanings(self, meanings: Tensor, points: Tensor, kernel: Kernel) -> Tensor:
        others = self.first[points]
        by_gloss = _rbf(self.by_gloss[meanings] @ self.by_gloss[others].t(), kernel)
        return kernel.gloss * by_gloss + kernel.place * (self.by_place[meanings] @ self.by_place[others].t())

    def teach_words(
        self, names: Tensor, glosses: Tensor | None, prototypes: Tensor, known: Tensor, kernel: Kernel
    ) -> Tensor:
        """The same for words that have no place among the nouns: by vectors [n, 384] of their names and definitions.

        Without definitions, by the names alone.
        """
        ours = self.by_name[known]
        like, among = (_rbf(of @ ours.t(), kernel) for of in (names, ours))
        if glosses is not None:
            ours = self.by_gloss[self.first[known]]
            by_gloss = (_rbf(of @ ours.t(), kernel) for of in (glosses, ours))
            like, among = (kernel.name * a + kernel.gloss * b for a, b in zip((like, among), by_gloss, strict=True))
        solved = torch.linalg.solve(among + kernel.ridge * torch.eye(len(known)), prototypes[known])
        directions: Tensor = like @ solved / (among @ solved).norm(dim=-1).median()
        return directions


def by_looks(names: Sequence[str], looks: Looks, prototypes: Tensor, known: Tensor) -> Tensor:
    """The direction of the known classes that pictures of each thing may be taken for [n, D], or zeros.

    The first counts most. What a known class looks like besides itself is of no use.
    """
    there, own = {*known.tolist()}, {NAMES[label].lower() for label in known}
    directions = torch.zeros(len(names), prototypes.shape[1])
    for i, name in enumerate(map(str.lower, names)):
        ranks = [(label, 1 / rank) for rank, label in enumerate(looks.get(name, ()), 1) if label in there]
        if ranks and name not in own:
            labels, weights = (torch.tensor(column) for column in zip(*ranks, strict=True))
            directions[i] = weights @ prototypes[labels] / weights.sum()
    return directions


def by_drawings(pictures: Tensor, kinds: Tensor, ridge: float = 1.0) -> Tensor:
    """Unit directions [K, D] that tell kinds of drawings apart: pictures [n, D], kinds [n] from 0 to K - 1.

    Linear discriminants, in which what differs within kinds counts less; they have nothing of what all have in common.
    """
    count = torch.bincount(kinds)[:, None]
    means = torch.zeros(len(count), pictures.shape[1]).index_add(0, kinds, pictures) / count
    within = (pictures - means[kinds]).t().cov()
    within += ridge * within.diagonal().mean() * torch.eye(len(within))
    found = torch.linalg.solve(within, (means - means.mean(0)).t()).t()
    common = F.normalize(means.mean(0), dim=0)
    return F.normalize(found - torch.outer(found @ common, common), dim=-1)


def right(pictures: Tensor, vectors: Tensor, labels: Tensor) -> float:
    """The share of pictures [n, D] that are nearest to the vector [C, D] of their own class [n]."""
    return ((pictures @ vectors.t()).argmax(1) == labels).float().mean().item()


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
