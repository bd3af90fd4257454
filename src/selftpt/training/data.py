"""What is learned from: features or pixels of random crops of labelled images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selftpt.config import TrainConfig
from selftpt.data.cache import Cache
from selftpt.data.decoding import ImageError, ImageInput
from selftpt.data.features import BATCH, FeatureProvider
from selftpt.data.sources import Source
from selftpt.data.threads import in_threads
from selftpt.data.views import LazyImage, ViewSpec
from selftpt.errors import SelfTPTError
from selftpt.gradients import differentiable
from selftpt.models import Model


def source_features(
    model: Model, source: Source, config: TrainConfig, cache: Cache, on_error: Callable[[ImageError], None]
) -> tuple[Tensor, Tensor]:
    """L2-normalised features [N, crops, D] of random crops of the source's images, and their labels [N].

    There are as many crops as epochs, unless the configuration says fewer. Images that cannot be used are left out.
    """
    if source.features is not None:
        if source.features.shape[-1] != model.dimension:
            raise SelfTPTError(
                f"the source has features of {source.features.shape[-1]} dimensions, {model.id} has {model.dimension}"
            )
        return differentiable(source.features).float().cpu(), _labels(source, torch.ones(len(source), dtype=torch.bool))
    provider = FeatureProvider(model, [_view_spec(config)], cache, fixed_batch=True, on_error=on_error)
    features = provider(source.images)
    usable = ~features.isnan().flatten(1).any(1)
    return features if usable.all() else features[usable], _labels(source, usable)


class Crops:
    """Pixels of random crops of images: those of `source_features`, made when they are needed."""

    def __init__(self, model: Model, images: Sequence[ImageInput], spec: ViewSpec) -> None:
        self.model, self.images, self.spec = model, images, spec

    def __call__(self, chosen: Tensor, epoch: int) -> Tensor:
        """One crop of each of the chosen images [B] for an epoch: uint8 [B, 3, S, S]."""
        images = [self.images[i] for i in chosen.tolist()]
        return torch.cat(list(in_threads(lambda image: self.crop(image, epoch), images, ahead=len(images))))

    def crop(self, image: ImageInput, epoch: int) -> Tensor:
        """The crop of an image for an epoch: uint8 [1, 3, S, S].

        Raises:
            ImageError: The image cannot be used.
        """
        return self.spec.make_views(self.model.preprocess, LazyImage(image), epoch % self.spec.crops)


def source_crops(
    model: Model, source: Source, config: TrainConfig, on_error: Callable[[ImageError], None]
) -> tuple[Crops, Tensor]:
    """Pixels of random crops of the source's images, and their labels [N], as `source_features` for features."""
    if source.features is not None:
        raise SelfTPTError("this method learns from pixels: give a source of images, not of features")
    crops = Crops(model, source.images, _view_spec(config))

    def check(image: ImageInput) -> ImageError | None:
        try:
            crops.crop(image, 0)
        except ImageError as error:
            return error
        return None

    usable = []
    for error in in_threads(check, source.images, ahead=BATCH):
        usable.append(error is None)
        if error is not None:
            on_error(error)
    crops.images = [image for image, good in zip(source.images, usable, strict=True) if good]
    return crops, _labels(source, torch.tensor(usable))


def _view_spec(config: TrainConfig) -> ViewSpec:
    return ViewSpec(config.crops or config.epochs, max_megapixels=config.max_megapixels)


def _labels(source: Source, usable: Tensor) -> Tensor:
    """The labels of usable images [N]; refused if a class has none."""
    labels = torch.tensor(source.labels)
    for label, name in enumerate(source.names):
        if not usable[labels == label].any():
            raise SelfTPTError(f"the class {name!r} has no image that can be read")
    return labels[usable]
