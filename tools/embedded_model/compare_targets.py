"""Compare settings of the target regression by cross-validation over ImageNet classes.

Run it with `python -m tools.embedded_model --compare-settings --images DIR`.
"""

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
from tools.embedded_model.image_features import CLASS_NAMES
from tools.embedded_model.targets import EmbeddingSpace, Kernel, Vocabulary, accuracy, neighbour_directions
from tools.embedded_model.text_training import add_shared_component

KERNEL_WEIGHTS = [(1, 0, 0), (0.2, 0.5, 0.3), (0.3, 0.7, 0), (0.1, 0.6, 0.3), (0.2, 0.4, 0.4), (0.1, 0.4, 0.5)]
EXPONENTS = (0.0, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Fold:
    """A fold of the cross-validation.

    Attributes:
        known: Labels of the classes that the regression uses.
        others: Labels of the classes that it predicts.
        space: Embedding space, fitted to images of the known classes.
        images: L2-normalised features of images of all classes [N, D].
        labels: Their labels [N].
    """

    known: Tensor
    others: Tensor
    space: EmbeddingSpace
    images: Tensor
    labels: Tensor

    def accuracy(self, class_vectors: Tensor, classes: Tensor) -> float:
        """Return the accuracy on images of some sorted classes [C], by their vectors [C, D]."""
        some = torch.isin(self.labels, classes)
        return accuracy(self.images[some], class_vectors, torch.searchsorted(classes, self.labels[some]))

    def predict_targets(
        self, vocabulary: Vocabulary, kernel: Kernel, hyponym_weight: float = 1.0, neighbour_weight: float = 1.0
    ) -> Tensor:
        """Predict the targets of nouns [N, D]."""
        prototypes = self.space.prototypes
        return vocabulary.predict_targets(prototypes, self.known, kernel, hyponym_weight, neighbour_weight)[0]

    def mixed_accuracy(self, vectors: Tensor) -> float:
        """Return the mean accuracy on lists of 25 known and 75 other classes, which resemble lists that users write."""
        rng, scores = random.Random(0), []
        for _ in range(40):
            drawn = rng.sample(self.known.tolist(), 25) + rng.sample(self.others.tolist(), 75)
            classes = torch.tensor(sorted(drawn))
            scores.append(self.accuracy(vectors[classes], classes))
        return statistics.mean(scores)


def compare_settings(head: Tensor, features: Tensor, labels: Tensor, vocabulary: Vocabulary, classes: Tensor) -> None:
    """Print the accuracy of each setting, over five folds of the given classes."""
    folds = []
    for others in classes[torch.randperm(len(classes))].chunk(5):
        known = classes[~torch.isin(classes, others)]
        space = EmbeddingSpace.fit(head, features[torch.isin(labels, known)], known, DIMENSIONS)
        folds.append(Fold(known, others.sort().values, space, space.project(features), labels))
    neighbours = vocabulary.visual_neighbours
    rows = [i for i, name in enumerate(vocabulary.names) if i < len(CLASS_NAMES) or name.lower() in neighbours]
    compare_kernels(folds, vocabulary.subset(torch.arange(len(CLASS_NAMES))))
    compare_neighbour_weights(folds, vocabulary.subset(torch.tensor(rows)))
    groups = vocabulary.class_groups(classes)
    compare_hyponym_weights(folds, vocabulary.subset(torch.tensor(sorted({*rows, *groups}))), classes)


def compare_kernels(folds: list[Fold], class_vocabulary: Vocabulary) -> None:
    """Print the accuracy on lists of other classes, without hyponyms and visual neighbours."""
    print("other classes, by kernel")
    scores = []
    for weights, width, ridge in itertools.product(KERNEL_WEIGHTS, (0.2, 0.35, 0.5), (0.01, 0.03, 0.1, 0.3)):
        kernel = Kernel(*weights, width, ridge, neighbour_ridge=math.inf)
        predicted = [
            (fold, F.normalize(fold.predict_targets(class_vocabulary, kernel, 0, 0)[fold.others], dim=-1))
            for fold in folds
        ]
        scores.append((statistics.mean(fold.accuracy(vectors, fold.others) for fold, vectors in predicted), kernel))
        print(f"{scores[-1][0]:.1%} {kernel}", flush=True)
    print("best:", *max(scores, key=lambda score: score[0]))


def compare_neighbour_weights(folds: list[Fold], vocabulary: Vocabulary) -> None:
    """Print the accuracy by the ridge and the weight of visual neighbours, and by the confidence exponent.

    A weight of 0 is the accuracy for words that are not in the table of visual neighbours.
    """
    print("other classes; lists of 25 known and 75 other classes by exponent; by ridge and weight of visual neighbours")
    for ridge in (math.inf, 0.3, 1.0, 3.0):
        predicted = []
        for fold in folds:
            without, others = copy(vocabulary), {CLASS_NAMES[label].lower() for label in fold.others}
            without.visual_neighbours = {
                name: labels for name, labels in vocabulary.visual_neighbours.items() if name not in others
            }
            predicted.append((fold, fold.predict_targets(without, Kernel(neighbour_ridge=ridge), 0, 0)))
        for weight in (0.0, 0.5, 1.0, 2.0):
            alone, mixed = [], []
            for fold, directions in predicted:
                known, prototypes = fold.known, fold.space.prototypes
                targets = directions + weight * neighbour_directions(
                    vocabulary.names, vocabulary.visual_neighbours, prototypes, known
                )
                targets[known] = prototypes[known]
                alone.append(fold.accuracy(F.normalize(targets[fold.others], dim=-1), fold.others))
                mixed.append(
                    [fold.mixed_accuracy(add_shared_component(targets, exponent)[:, :-1]) for exponent in EXPONENTS]
                )
            by_exponent = [
                f"{statistics.mean(scores):.1%} {exponent}"
                for exponent, scores in zip(EXPONENTS, zip(*mixed, strict=True), strict=True)
            ]
            print(f"{statistics.mean(alone):.1%} ridge {ridge} weight {weight};", *by_exponent, flush=True)


def compare_hyponym_weights(folds: list[Fold], vocabulary: Vocabulary, classes: Tensor) -> None:
    """Print the accuracy on images of classes when the class list is the names of their hypernyms."""
    groups = vocabulary.class_groups(classes)
    group_of = {label: i for i, group in enumerate(groups.values()) for label in group}
    print(f"names of {len(groups)} groups of classes: images of all and of other classes, by the weight of hyponyms")
    for weight in (0.0, 0.5, 1.0, 2.0):
        scores = []
        for fold in folds:
            vectors = add_shared_component(fold.predict_targets(vocabulary, Kernel(), weight))[[*groups], :-1]
            grouped = torch.isin(fold.labels, torch.tensor([*group_of]))
            for rows in (grouped, grouped & torch.isin(fold.labels, fold.others)):
                group_labels = torch.tensor([group_of[label] for label in fold.labels[rows].tolist()])
                scores.append(accuracy(fold.images[rows], vectors, group_labels))
        print(f"{statistics.mean(scores[::2]):.1%} {statistics.mean(scores[1::2]):.1%} {weight}", flush=True)
