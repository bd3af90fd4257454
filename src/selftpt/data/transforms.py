"""The preprocessing of a model, and random resized crops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose
from torchvision.transforms.functional import pil_to_tensor

from selftpt.data.augmix import augmix


@dataclass(frozen=True)
class Preprocess:
    """The preprocessing of a model: resize and crop, then normalisation with mean and standard deviation.

    Attributes:
        size: Height and width of the image tower's input.
        mean: Mean of each channel, [3, 1, 1].
        std: Standard deviation of each channel, [3, 1, 1].
        interpolation: The interpolation of resized images.
    """

    size: tuple[int, int]
    mean: Tensor
    std: Tensor
    interpolation: Image.Resampling
    _geometry: Callable[[Image.Image], Image.Image]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Preprocess:
        """Make the preprocessing of an open_clip model.

        Args:
            config: The settings that open_clip stores with the model, `visual.preprocess_cfg`.

        Returns:
            The preprocessing.
        """
        cfg = PreprocessCfg(**config)
        height, width = (cfg.size, cfg.size) if isinstance(cfg.size, int) else tuple(cfg.size)[-2:]
        resampling = Image.Resampling.BILINEAR if cfg.interpolation == "bilinear" else Image.Resampling.BICUBIC
        *geometry, _to_tensor, normalize = image_transform_v2(cfg, is_train=False).transforms
        mean, std = (torch.tensor(values)[:, None, None] for values in (normalize.mean, normalize.std))
        return cls((height, width), mean, std, resampling, Compose(geometry))

    def __call__(self, image: Image.Image) -> Tensor:
        """Resize and crop an image to the input size.

        Args:
            image: The image, in RGB.

        Returns:
            Pixels [3, S, S], uint8.
        """
        pixels: Tensor = pil_to_tensor(self._geometry(image))
        return pixels

    def views(
        self,
        image: Image.Image,
        crops: int,
        rng: random.Random,
        whole: bool = True,
        mixed: bool = False,
        only: int | None = None,
    ) -> Tensor:
        """Make views of an image: the image itself, and random resized crops, each flipped with probability 1/2.

        Args:
            image: The image, in RGB.
            crops: The number of random crops.
            rng: The generator of all random numbers.
            whole: Whether the image itself is the first view.
            mixed: Whether AugMix is applied to the crops.
            only: The index of a crop, if only this crop is needed. It equals the crop with this index among all crops.

        Returns:
            Views [views, 3, S, S], uint8.
        """
        height, width = self.size
        views = [self(image)] if whole else []
        for index in range(crops):
            left, upper, right, lower = box = random_box(*image.size, rng)
            flip = rng.random() < 0.5
            mix_rng = random.Random(rng.random()) if mixed else None
            if only not in (None, index):
                continue
            # Not `image.crop`, which applies Pillow's global size limit.
            crop = image.transform((right - left, lower - upper), Image.Transform.EXTENT, box)
            crop = crop.resize((width, height), self.interpolation)
            if flip:
                crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            views.append(pil_to_tensor(augmix(crop, mix_rng) if mix_rng else crop))
        return torch.stack(views)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalise pixels with mean and standard deviation.

        Args:
            pixels: Pixels [B, 3, S, S], uint8 or already normalised floats.

        Returns:
            Normalised floats [B, 3, S, S]. Floats are returned as they are.
        """
        if pixels.dtype != torch.uint8:
            return pixels
        return pixels.float().div_(255).sub_(self.mean.to(pixels.device)).div_(self.std.to(pixels.device))


def random_box(
    width: int, height: int, rng: random.Random, scale: tuple[float, float] = (0.08, 1.0)
) -> tuple[int, int, int, int]:
    """Draw the box of a random resized crop, as torchvision's `RandomResizedCrop` does.

    The aspect ratio is log-uniform in 3/4 to 4/3. After ten boxes that do not fit into the image, the largest central
    box with an allowed aspect ratio is returned.

    Args:
        width: Width of the image.
        height: Height of the image.
        rng: The generator of all random numbers.
        scale: The range of the area relative to the image, in which it is uniform.

    Returns:
        Left, upper, right and lower edge of the box.
    """
    low, high = 3 / 4, 4 / 3
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, upper = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, upper, left + w, upper + h
    w, h = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h
