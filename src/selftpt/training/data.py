"""What is learned from: features or pixels of random crops of labelled images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from selftpt.config import TrainConfig
from selftpt.data.decoding import ImageError
from selftpt.data.features import GROUP, FeatureStore, ViewSpec
from selftpt.data.sources import Source
from selftpt.data.threads import in_threads
from selftpt.errors import SelfTPTError
from selftpt.models import Model


def source_features(
    model: Model, source: Source, config: TrainConfig, on_error: Callable[[ImageError], None]
) -> tuple[Tensor, Tensor]:
    """Unit features [N, crops, D] of random crops of the source's pictures, and their labels [N].

    Crops are as many as epochs, unless the settings say fewer. Pictures that cannot be used are left out.
    """
    features = FeatureStore(model, _look(config), on_error)(source.paths)
    usable = ~features.isnan().flatten(1).any(1)
    return features if usable.all() else features[usable], _labels(source, usable)


class Crops:
    """Pixels of random crops of pictures: those of `source_features`, cut when they are asked for."""

    def __init__(self, model: Model, paths: Sequence[Path], look: ViewSpec) -> None:
        self.model, self.paths, self.look = model, paths, look

    def __call__(self, chosen: Tensor, epoch: int) -> Tensor:
        """One crop of each of the chosen pictures [B] for an epoch: uint8 [B, 3, S, S]."""
        paths = [self.paths[i] for i in chosen.tolist()]
        cuts = []
        for cut in in_threads(lambda path: self._cut(path, epoch), paths, ahead=len(paths)):
            if isinstance(cut, ImageError):
                raise cut
            cuts.append(cut)
        return torch.cat(cuts)

    def _cut(self, path: Path, epoch: int) -> Tensor | ImageError:
        return self.look.cut(self.model.preprocess, path, epoch % self.look.crops)


def source_crops(
    model: Model, source: Source, config: TrainConfig, on_error: Callable[[ImageError], None]
) -> tuple[Crops, Tensor]:
    """Pixels of random crops of the source's pictures, and their labels [N], as `source_features` for features."""
    crops, usable = Crops(model, source.paths, _look(config)), []
    for cut in in_threads(lambda path: crops._cut(path, 0), source.paths, ahead=GROUP):
        usable.append(isinstance(cut, Tensor))
        if isinstance(cut, ImageError):
            on_error(cut)
    crops.paths = [path for path, good in zip(source.paths, usable, strict=True) if good]
    return crops, _labels(source, torch.tensor(usable))


def _look(config: TrainConfig) -> ViewSpec:
    return ViewSpec(config.crops or config.epochs, max_megapixels=config.max_megapixels)


def _labels(source: Source, usable: Tensor) -> Tensor:
    """The labels of usable pictures [N]; refused if a class has none."""
    labels = torch.tensor(source.labels)
    for label, name in enumerate(source.names):
        if not usable[labels == label].any():
            raise SelfTPTError(f"the class {name!r} has no picture that can be read")
    return labels[usable]
