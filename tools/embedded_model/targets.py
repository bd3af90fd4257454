"""Target directions of words in the embedding space.

Each of the 1,000 ImageNet classes has a direction, from the classifier of the image backbone. Kernel ridge regression
extends them to the other nouns of WordNet. A target's norm is the confidence in it, about 1 for an ImageNet class.
"""

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

from tools.embedded_model.image_features import CLASS_NAMES, WNIDS, VisualNeighbours
from tools.embedded_model.wordnet import WordNet

if TYPE_CHECKING:
    from tools.embedded_model.sentence_encoder import SentenceEncoder


@dataclass(frozen=True)
class EmbeddingSpace:
    """A projection of image features, and the directions of ImageNet's classes in its output space.

    Attributes:
        projection: Projection of image features [D, 1280].
        bias: Bias of the projection [D].
        prototypes: L2-normalised class directions [1000, D].
    """

    projection: Tensor
    bias: Tensor
    prototypes: Tensor

    @classmethod
    def fit(cls, head: Tensor, features: Tensor, known: Tensor, dimension: int, ridge: float = 0.1) -> EmbeddingSpace:
        """Find the dimensions that best preserve the logits of the known classes.

        Args:
            head: Weights of the ImageNet classifier [1000, 1280].
            features: Features of images of known classes [N, 1280]; their mean becomes the origin.
            known: Labels of the known classes.
            dimension: Number of dimensions, D.
            ridge: Regularisation of the features' covariance, relative to its mean variance.
        """
        head, mean = head - head[known].mean(0), features.mean(0)
        covariance = features.t().cov()
        root = torch.linalg.cholesky(covariance + ridge * covariance.diagonal().mean() * torch.eye(len(covariance)))
        _, _, basis = torch.linalg.svd(head[known] @ root, full_matrices=False)
        basis = basis[:dimension]
        projection = torch.linalg.solve_triangular(root, basis, upper=False, left=False)
        return cls(projection, -projection @ mean, F.normalize(head @ root @ basis.t(), dim=-1))

    def invariant_to(self, shift: Tensor) -> EmbeddingSpace:
        """Return a space whose class directions are orthogonal to a shift of image features [1280].

        Image features are not changed: a shift scales all cosines of an image by the same factor, so the predicted
        class stays the same.
        """
        direction = F.normalize(self.projection @ shift, dim=0)
        rest = self.prototypes - torch.outer(self.prototypes @ direction, direction)
        return replace(self, prototypes=F.normalize(rest, dim=-1))

    def project(self, features: Tensor) -> Tensor:
        """Project image features [N, 1280] to L2-normalised features [N, D]."""
        return F.normalize(features @ self.projection.t() + self.bias, dim=-1)


@dataclass(frozen=True)
class Kernel:
    """Kernel of the regression. The defaults except `neighbour_ridge` were selected with compare_targets.py.

    Attributes:
        name: Weight of the similarity of names.
        definition: Weight of the similarity of definitions.
        hierarchy: Weight of the similarity of positions in WordNet's hierarchy.
        width: Width of the radial basis function of names and definitions.
        ridge: Regularisation for the directions of ImageNet classes.
        neighbour_ridge: Regularisation for the directions that words have from their visual neighbours; infinity
            leaves those words out of the regression.
    """

    name: float = 0.2
    definition: float = 0.5
    hierarchy: float = 0.3
    width: float = 0.35
    ridge: float = 0.03
    neighbour_ridge: float = 1.0


class Vocabulary:
    """ImageNet's classes followed by WordNet's nouns, with their embeddings.

    A sense is a pair of a noun and one of its synsets. N counts nouns, S synsets and P senses.

    Attributes:
        names: The nouns.
        visual_neighbours: For each lower-case word, the labels of the ImageNet classes that look like the thing it
            names.
        first_synset: Index of the most frequent synset of each noun [N].
        sense_noun: Index of the noun of each sense [P].
        sense_synset: Index of the synset of each sense [P].
        sense_weight: Weight of each sense [P]; the weights of a noun's senses sum to 1.
        definitions: Definition of each noun's first synset.
        hypernyms: Name of each synset's hypernym.
        name_vectors: Sentence embeddings of the names [N, 384].
        definition_vectors: Sentence embeddings of the synsets' synonyms and definitions [S, 384].
        hierarchy_vectors: Encodings of the synsets' ancestors [S, A], with norms of at most 1.
        hyponym_classes: By synset, the ImageNet classes that are the synset or a kind of it.
    """

    def __init__(self, wordnet: WordNet, encoder: SentenceEncoder, visual_neighbours: VisualNeighbours) -> None:
        nouns = wordnet.nouns()
        self.names, self.visual_neighbours = [*CLASS_NAMES, *nouns], visual_neighbours
        synsets_of = [[wnid[1:]] for wnid in WNIDS] + list(nouns.values())
        offsets = sorted({offset for synsets in synsets_of for offset in synsets})
        index = {offset: i for i, offset in enumerate(offsets)}
        self.first_synset = torch.tensor([index[synsets[0]] for synsets in synsets_of])
        senses = [
            (noun, index[offset], 1 / rank)
            for noun, synsets in enumerate(synsets_of)
            for rank, offset in enumerate(synsets, 1)
        ]
        self.sense_noun, self.sense_synset = (torch.tensor(column) for column in list(zip(*senses, strict=True))[:2])
        weight = torch.tensor([sense[2] for sense in senses])
        total = torch.zeros(len(self.names)).index_add(0, self.sense_noun, weight)
        self.sense_weight = weight / total[self.sense_noun]
        self.definitions = [wordnet.synsets[synsets[0]].definition for synsets in synsets_of]
        self.hypernyms = [wordnet.hypernym(offset) for offset in offsets]
        self.name_vectors = encoder(self.names)
        self.definition_vectors = encoder([wordnet.synsets[offset].text for offset in offsets])
        self.hyponym_classes: dict[int, list[int]] = {}
        for label, wnid in enumerate(WNIDS):
            for offset in wordnet.ancestors(wnid[1:]) & index.keys():
                self.hyponym_classes.setdefault(index[offset], []).append(label)
        self.hierarchy_vectors = _hierarchy_vectors(
            [wordnet.ancestors(offset) for offset in offsets], self.first_synset[: len(CLASS_NAMES)]
        )

    def subset(self, rows: Tensor) -> Vocabulary:
        """Return the vocabulary restricted to some nouns.

        Args:
            rows: Sorted indices of nouns, including all ImageNet classes.
        """
        some, senses = copy(self), torch.isin(self.sense_noun, rows)
        synsets, some.sense_synset = self.sense_synset[senses].unique(return_inverse=True)
        some.sense_noun = torch.searchsorted(rows, self.sense_noun[senses])
        some.sense_weight = self.sense_weight[senses]
        some.names, some.definitions = ([column[i] for i in rows] for column in (self.names, self.definitions))
        some.first_synset = torch.searchsorted(synsets, self.first_synset[rows])
        some.name_vectors = self.name_vectors[rows]
        some.definition_vectors = self.definition_vectors[synsets]
        some.hierarchy_vectors = self.hierarchy_vectors[synsets]
        some.hypernyms = [self.hypernyms[i] for i in synsets]
        some.hyponym_classes = {
            i: self.hyponym_classes[synset]
            for i, synset in enumerate(synsets.tolist())
            if synset in self.hyponym_classes
        }
        return some

    def hyponym_directions(self, prototypes: Tensor, known: Tensor) -> Tensor:
        """Return the mean direction of the known classes that are kinds of each synset, or zeros: [S, D]."""
        available, directions = {*known.tolist()}, torch.zeros(len(self.definition_vectors), prototypes.shape[1])
        for synset, classes in self.hyponym_classes.items():
            if hyponyms := [label for label in classes if label in available]:
                directions[synset] = prototypes[hyponyms].mean(0)
        return directions

    def class_groups(self, classes: Tensor) -> dict[int, list[int]]:
        """Group classes under nouns.

        Args:
            classes: Labels of the classes.

        Returns:
            For each noun index, 2 to 12 labels of classes that are hyponyms of the noun's first synset; the groups are
            disjoint.
        """
        noun_of = {
            synset: noun for noun, synset in reversed([*enumerate(self.first_synset.tolist())][len(CLASS_NAMES) :])
        }
        available, groups = {*classes.tolist()}, {}
        for synset, labels in sorted(self.hyponym_classes.items(), key=lambda item: (-len(item[1]), item[0])):
            members = [label for label in labels if label in available]
            if synset in noun_of and 2 <= len(members) <= 12:
                groups[noun_of[synset]] = members
                available -= {*members}
        return groups

    def predict_targets(
        self,
        prototypes: Tensor,
        known: Tensor,
        kernel: Kernel,
        hyponym_weight: float = 1.0,
        neighbour_weight: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Predict the targets of all nouns, and of each of their senses.

        The regression is fitted to the known classes and to the nouns that have visual neighbours. Its predictions are
        scaled so that known classes have a median norm of 1. The weighted mean directions of a noun's hyponyms and
        visual neighbours are then added.

        Args:
            prototypes: Class directions [1000, D].
            known: Labels of the classes that the regression may use.
            kernel: Kernel of the regression.
            hyponym_weight: Weight of the mean direction of the known classes that are kinds of a synset.
            neighbour_weight: Weight of the mean direction of a noun's visual neighbours.

        Returns:
            Targets of the nouns [N, D] and of the senses [P, D].
        """
        neighbours = neighbour_directions(self.names, self.visual_neighbours, prototypes, known)
        has_neighbours = neighbours.any(dim=1).nonzero()[:, 0] if kernel.neighbour_ridge < math.inf else known[:0]
        points = torch.cat([known, has_neighbours])
        values = torch.cat([prototypes[known], F.normalize(neighbours[has_neighbours], dim=-1)])
        ridge = torch.tensor([kernel.ridge] * len(known) + [kernel.neighbour_ridge] * len(has_neighbours))
        gram = self._name_kernel(points, points, kernel) + self._synset_kernel(
            self.first_synset[points], points, kernel
        )
        gram.diagonal().add_(ridge)
        coefficients = torch.linalg.solve(gram, values)
        by_name, by_synset = (
            torch.cat([similarity(rows, points, kernel) @ coefficients for rows in torch.arange(count).split(4096)])
            for similarity, count in (
                (self._name_kernel, len(self.names)),
                (self._synset_kernel, len(self.definition_vectors)),
            )
        )
        typical_norm = (by_name[known] + by_synset[self.first_synset[known]]).norm(dim=-1).median()
        by_synset = by_synset / typical_norm + hyponym_weight * self.hyponym_directions(prototypes, known)
        nouns = by_name / typical_norm + neighbour_weight * neighbours
        # If a noun has several senses, the table does not say which of them the visual neighbours belong to.
        single_sense = (self.sense_weight == 1)[:, None]
        senses = (
            by_name[self.sense_noun] / typical_norm
            + by_synset[self.sense_synset]
            + neighbour_weight * single_sense * neighbours[self.sense_noun]
        )
        weighted = self.sense_weight[:, None] * by_synset[self.sense_synset]
        return nouns.index_add(0, self.sense_noun, weighted), senses

    def _name_kernel(self, rows: Tensor, points: Tensor, kernel: Kernel) -> Tensor:
        return kernel.name * _rbf(self.name_vectors[rows] @ self.name_vectors[points].t(), kernel)

    def _synset_kernel(self, synsets: Tensor, points: Tensor, kernel: Kernel) -> Tensor:
        others = self.first_synset[points]
        by_definition = _rbf(self.definition_vectors[synsets] @ self.definition_vectors[others].t(), kernel)
        by_hierarchy = self.hierarchy_vectors[synsets] @ self.hierarchy_vectors[others].t()
        return kernel.definition * by_definition + kernel.hierarchy * by_hierarchy

    def predict_word_targets(
        self, names: Tensor, definitions: Tensor | None, prototypes: Tensor, known: Tensor, kernel: Kernel
    ) -> Tensor:
        """Predict the targets of words that are not in the vocabulary.

        Args:
            names: Sentence embeddings of the words [M, 384].
            definitions: Sentence embeddings of their definitions [M, 384], or None to use the words alone.
            prototypes: Class directions [1000, D].
            known: Labels of the classes that the regression may use.
            kernel: Kernel of the regression.

        Returns:
            Targets [M, D].
        """
        class_vectors = self.name_vectors[known]
        cross, gram = (_rbf(vectors @ class_vectors.t(), kernel) for vectors in (names, class_vectors))
        if definitions is not None:
            class_vectors = self.definition_vectors[self.first_synset[known]]
            by_definition = (_rbf(vectors @ class_vectors.t(), kernel) for vectors in (definitions, class_vectors))
            cross, gram = (
                kernel.name * a + kernel.definition * b for a, b in zip((cross, gram), by_definition, strict=True)
            )
        coefficients = torch.linalg.solve(gram + kernel.ridge * torch.eye(len(known)), prototypes[known])
        directions: Tensor = cross @ coefficients / (gram @ coefficients).norm(dim=-1).median()
        return directions


def neighbour_directions(
    names: Sequence[str], visual_neighbours: VisualNeighbours, prototypes: Tensor, known: Tensor
) -> Tensor:
    """Return the mean direction [N, D] of those visual neighbours of each word that are known classes.

    Directions are weighted by 1 / rank. The result is zero for words without such neighbours, and for known classes,
    which have a direction of their own.
    """
    available, known_names = {*known.tolist()}, {CLASS_NAMES[label].lower() for label in known}
    directions = torch.zeros(len(names), prototypes.shape[1])
    for i, name in enumerate(map(str.lower, names)):
        ranks = [
            (label, 1 / rank) for rank, label in enumerate(visual_neighbours.get(name, ()), 1) if label in available
        ]
        if ranks and name not in known_names:
            labels, weights = (torch.tensor(column) for column in zip(*ranks, strict=True))
            directions[i] = weights @ prototypes[labels] / weights.sum()
    return directions


def discriminant_directions(images: Tensor, kinds: Tensor, ridge: float = 1.0) -> Tensor:
    """Return the directions of linear discriminant analysis, orthogonal to the mean of the kinds' mean features.

    Args:
        images: Image features [N, D].
        kinds: Kind of each image [N], from 0 to K - 1.
        ridge: Regularisation of the within-kind covariance, relative to its mean variance.

    Returns:
        L2-normalised directions [K, D].
    """
    count = torch.bincount(kinds)[:, None]
    means = torch.zeros(len(count), images.shape[1]).index_add(0, kinds, images) / count
    within = (images - means[kinds]).t().cov()
    within += ridge * within.diagonal().mean() * torch.eye(len(within))
    directions = torch.linalg.solve(within, (means - means.mean(0)).t()).t()
    common = F.normalize(means.mean(0), dim=0)
    return F.normalize(directions - torch.outer(directions @ common, common), dim=-1)


def accuracy(images: Tensor, class_vectors: Tensor, labels: Tensor) -> float:
    """Return the top-1 accuracy of images [N, D] with labels [N].

    The predicted class is the class vector [C, D] with the largest dot product.
    """
    return ((images @ class_vectors.t()).argmax(1) == labels).float().mean().item()


def _rbf(cosine: Tensor, kernel: Kernel) -> Tensor:
    return ((cosine - 1) / kernel.width).exp()


def _hierarchy_vectors(ancestors: Sequence[frozenset[str]], classes: Tensor) -> Tensor:
    """Encode the ancestors of synsets [S, A] so that the dot product of two rows is a weighted overlap.

    Rare ancestors weigh more. Columns exist only for ancestors of classes, but each row is divided by its norm over all
    ancestors.
    """
    count: dict[str, int] = {}
    for offset in itertools.chain.from_iterable(ancestors):
        count[offset] = count.get(offset, 0) + 1
    information = {offset: -torch.tensor(n / len(ancestors)).log().item() for offset, n in count.items()}
    columns = {o: i for i, o in enumerate(sorted({o for c in classes.tolist() for o in ancestors[c]}))}
    vectors = torch.zeros(len(ancestors), len(columns))
    for row, offsets in enumerate(ancestors):
        # The root has no information: everything is a kind of it.
        norm = math.fsum(information[o] ** 2 for o in offsets) ** 0.5 or 1.0
        for o in offsets & columns.keys():
            vectors[row, columns[o]] = information[o] / norm
    return vectors
