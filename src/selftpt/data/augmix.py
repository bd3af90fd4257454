"""AugMix of a crop, as the authors of TPT use it: chains of mild operations, mixed with each other and with the crop.

Hendrycks et al., AugMix, ICLR 2020. Every number is drawn from the generator given, so that threads do not disturb
each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

CHAINS, DEPTH, SEVERITY = 3, 3, 1

Operation = Callable[[Image.Image, random.Random], Image.Image]


def level(rng: random.Random, most: float) -> float:
    """A strength: between a hundredth of `most` and, at severity 1, a tenth."""
    return rng.uniform(0.1, SEVERITY) * most / 10


def either_way(rng: random.Random, value: float) -> float:
    """The value or its opposite."""
    return -value if rng.random() > 0.5 else value


def _autocontrast(image: Image.Image, _rng: random.Random) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, _rng: random.Random) -> Image.Image:
    return ImageOps.equalize(image)


def _posterize(image: Image.Image, rng: random.Random) -> Image.Image:
    return ImageOps.posterize(image, 4 - int(level(rng, 4)))


def _solarize(image: Image.Image, rng: random.Random) -> Image.Image:
    return ImageOps.solarize(image, 256 - int(level(rng, 256)))


def _rotate(image: Image.Image, rng: random.Random) -> Image.Image:
    return image.rotate(either_way(rng, int(level(rng, 30))), Image.Resampling.BILINEAR)


def _shear_x(image: Image.Image, rng: random.Random) -> Image.Image:
    return _move(image, 1, either_way(rng, level(rng, 0.3)), 0, 0, 1, 0)


def _shear_y(image: Image.Image, rng: random.Random) -> Image.Image:
    return _move(image, 1, 0, 0, either_way(rng, level(rng, 0.3)), 1, 0)


def _translate_x(image: Image.Image, rng: random.Random) -> Image.Image:
    return _move(image, 1, 0, either_way(rng, int(level(rng, image.width / 3))), 0, 1, 0)


def _translate_y(image: Image.Image, rng: random.Random) -> Image.Image:
    return _move(image, 1, 0, 0, 0, 1, either_way(rng, int(level(rng, image.height / 3))))


def _move(image: Image.Image, *affine: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)


OPERATIONS: tuple[Operation, ...] = (
    _autocontrast,
    _equalize,
    _posterize,
    _rotate,
    _solarize,
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
)


def augmix(crop: Image.Image, rng: random.Random) -> Image.Image:
    """The crop, in RGB, blended with a mix of three chains of one to three operations.

    The chains have Dirichlet(1, 1, 1) weights, the crop has a Beta(1, 1) weight, which is uniform.
    """
    drawn = [rng.expovariate(1) for _ in range(CHAINS)]
    own = rng.random()
    mix: NDArray[np.float32] = own * np.asarray(crop, np.float32)
    for share in drawn:
        changed = crop
        for _ in range(rng.randint(1, DEPTH)):
            changed = rng.choice(OPERATIONS)(changed, rng)
        mix += (1 - own) * share / sum(drawn) * np.asarray(changed, np.float32)
    return Image.fromarray(mix.round().clip(0, 255).astype(np.uint8))
