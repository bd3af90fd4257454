"""Views of an image: the image itself, or random resized crops of it."""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from selftpt.data.decoding import ImageError, ImageInput, open_image
from selftpt.data.transforms import Preprocess

FileFingerprint = tuple[str | int, ...]  # path, size and modification time of a file
MAX_MEGAPIXELS = 80.0


class LazyImage:
    """An image that is decoded when it is first needed, so that several kinds of views share the decoding.

    Args:
        source: The image.
    """

    def __init__(self, source: ImageInput) -> None:
        self.source = source
        self._decoded: dict[float, Image.Image] = {}

    def decode(self, max_megapixels: float) -> Image.Image:
        """Decode the image, once for each value of `max_megapixels`.

        Args:
            max_megapixels: The maximum size.

        Returns:
            The RGB image.

        Raises:
            ImageError: The image cannot be used, or is larger than `max_megapixels`.
        """
        if max_megapixels not in self._decoded:
            self._decoded[max_megapixels] = open_image(self.source, max_megapixels)
        return self._decoded[max_megapixels]


@dataclass(frozen=True)
class ViewSpec:
    """Specification of the views of an image: the image itself, or random resized crops of it.

    Attributes:
        crops: The number of random crops; 0 for the image itself.
        seed: The seed of the crops, the same for every image. None derives a seed from the names of the image's file
            and folder, or from its pixels if it is not a file.
        max_megapixels: The maximum size. Larger images are refused.
        augmix: Whether AugMix is applied to the crops.
    """

    crops: int = 0
    seed: int | None = None
    max_megapixels: float = MAX_MEGAPIXELS
    augmix: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """JSON values that identify the specification."""
        return self.crops, self.seed, self.max_megapixels, *(["augmix"] if self.augmix else [])

    @property
    def views(self) -> int:
        """The number of views."""
        return self.crops or 1

    def __str__(self) -> str:
        if not self.crops:
            return "the image"
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.crops} random crops{seed}{', AugMix' if self.augmix else ''}"

    def fingerprint(self, source: ImageInput) -> FileFingerprint | None:
        """Identify the content of the views.

        Args:
            source: The image.

        Returns:
            The fingerprint of the file; None for an image in memory.
        """
        return fingerprint(source) if isinstance(source, str | os.PathLike) else None

    def make_views(self, preprocess: Preprocess, image: LazyImage, only: int | None = None) -> Tensor:
        """Make the views of an image.

        Args:
            preprocess: The model's preprocessing.
            image: The image.
            only: The index of a crop, if only this crop is needed. It equals the crop with this index among all crops.

        Returns:
            Views [views, 3, S, S], uint8. A float tensor [3, S, S] is taken as preprocessed and returned as
            [1, 3, S, S].

        Raises:
            ImageError: The image cannot be used.
        """
        source = image.source
        if isinstance(source, Tensor) and source.is_floating_point():
            if tuple(source.shape) != (3, *preprocess.size):
                raise ImageError(
                    f"the tensor: a float tensor must be a preprocessed image of shape {[3, *preprocess.size]}, not "
                    f"{list(source.shape)}: preprocess it, or give a uint8 tensor"
                )
            if self.crops:
                raise ImageError(
                    "the tensor: a float tensor is a preprocessed image, and no crops can be made of it: use one view, "
                    "or give a uint8 tensor"
                )
            if not source.isfinite().all():
                raise ImageError("the tensor: it has values that are not finite")
            return source[None].cpu()
        decoded = image.decode(self.max_megapixels)
        rng = random.Random(_own_seed(source, decoded) if self.seed is None else self.seed)
        return preprocess.views(decoded, self.crops, rng, not self.crops, self.augmix, only)


def image_and_crops(
    views: int, augmix: bool = False, seed: int = 0, max_megapixels: float = MAX_MEGAPIXELS
) -> list[ViewSpec]:
    """Specify the image itself and random crops of it.

    Args:
        views: Number of views, including the image itself.
        augmix: Whether AugMix is applied to the crops.
        seed: The seed of the crops, the same for every image.
        max_megapixels: The maximum size of the image.

    Returns:
        The specifications of the image and of its `views - 1` crops; only the former if `views` is 1.
    """
    image, crops = ViewSpec(max_megapixels=max_megapixels), ViewSpec(views - 1, seed, max_megapixels, augmix)
    return [image, crops] if views > 1 else [image]


def fingerprint(path: str | os.PathLike[str]) -> FileFingerprint:
    """Identify the content of a file without reading it.

    Args:
        path: The file.

    Returns:
        The absolute path, size and modification time in nanoseconds; of a missing file only the path.
    """
    absolute = Path(path).absolute()
    try:
        stat = absolute.stat()
    except (OSError, ValueError):
        return (str(absolute),)
    return str(absolute), stat.st_size, stat.st_mtime_ns


def _own_seed(source: ImageInput, decoded: Image.Image) -> bytes:
    """Derive a seed from the image, so that it has the same crops in every run."""
    if isinstance(source, str | os.PathLike):
        return os.fsencode("/".join(Path(source).absolute().parts[-2:]))
    return hashlib.sha256(decoded.tobytes()).digest()


def stack_views(parts: list[Tensor], preprocess: Preprocess) -> Tensor:
    """Concatenate views. If one part is normalised, the others are normalised as well.

    Args:
        parts: Views [V_i, 3, S, S], uint8 or normalised floats.
        preprocess: The model's preprocessing.

    Returns:
        Views [V, 3, S, S], where V is the sum of all V_i.
    """
    if any(part.is_floating_point() for part in parts):
        parts = [preprocess.normalize(part) for part in parts]
    return torch.cat(parts)
