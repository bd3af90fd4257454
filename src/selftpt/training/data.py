"""Training data: features or pixels of random crops of labelled images."""

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
    """Encode random crops of labelled images, one crop per epoch unless `config.crops` is given.

    Args:
        model: The frozen model.
        source: The labelled images. If it has features instead, they are returned.
        config: The number of crops or epochs, and the maximum image size.
        cache: Where the features are cached.
        on_error: Called for every image that cannot be used; the image is then left out.

    Returns:
        L2-normalised features [N, crops, D] and labels [N] of the images that can be used.

    Raises:
        SelfTPTError: The features do not fit the model, or no image of a class can be used.
    """
    if source.features is not None:
        if source.features.shape[-1] != model.dimension:
            raise SelfTPTError(
                f"the features of the source have {source.features.shape[-1]} dimensions, and those of {model.id} have "
                f"{model.dimension}: give features of this model"
            )
        return differentiable(source.features).float().cpu(), _labels(source, torch.ones(len(source), dtype=torch.bool))
    provider = FeatureProvider(model, [_view_spec(config)], cache, fixed_batch=True, on_error=on_error)
    features = provider(source.images)
    usable = ~features.isnan().flatten(1).any(1)
    return features if usable.all() else features[usable], _labels(source, usable)


class Crops:
    """Pixels of the random crops that `source_features` encodes, computed on demand.

    Args:
        model: Its preprocessing is applied to the crops.
        images: The images.
        spec: The number of crops per image, and how they are made.
    """

    def __init__(self, model: Model, images: Sequence[ImageInput], spec: ViewSpec) -> None:
        self.model, self.images, self.spec = model, images, spec

    def __call__(self, chosen: Tensor, epoch: int) -> Tensor:
        """Return one crop of each of the images with indices `chosen` [B], for an epoch: uint8 [B, 3, S, S]."""
        images = [self.images[i] for i in chosen.tolist()]
        return torch.cat(list(in_threads(lambda image: self.crop(image, epoch), images, ahead=len(images))))

    def crop(self, image: ImageInput, epoch: int) -> Tensor:
        """Return the crop of an image for an epoch: uint8 [1, 3, S, S].

        Raises:
            ImageError: The image cannot be used.
        """
        return self.spec.make_views(self.model.preprocess, LazyImage(image), epoch % self.spec.crops)


def source_crops(
    model: Model, source: Source, config: TrainConfig, on_error: Callable[[ImageError], None]
) -> tuple[Crops, Tensor]:
    """Check labelled images, and return random crops of them, for methods that need pixels instead of features.

    Args:
        model: The frozen model.
        source: The labelled images.
        config: The number of crops or epochs, and the maximum image size.
        on_error: Called for every image that cannot be used; the image is then left out.

    Returns:
        The crops and the labels [N] of the images that can be used.

    Raises:
        SelfTPTError: The source has features instead of images, or no image of a class can be used.
    """
    if source.features is not None:
        raise SelfTPTError("this method learns from pixels: give a source with images instead of features")
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
    """Return the labels [N] of the usable images; raise an error if a class has none."""
    labels = torch.tensor(source.labels)
    for label, name in enumerate(source.names):
        if not usable[labels == label].any():
            raise SelfTPTError(f"the class {name!r} has no image that can be read: add images or remove the class")
    return labels[usable]
