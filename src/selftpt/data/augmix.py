"""AugMix (Hendrycks et al., ICLR 2020) as the authors of TPT apply it to random crops.

A crop is mixed with the results of several chains of mild operations. All random numbers come from the generator that
the caller passes, so results do not depend on other threads.
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
    """Draw the strength of an operation: at severity 1, between 1 % and 10 % of `most`."""
    return rng.uniform(0.1, SEVERITY) * most / 10


def random_sign(rng: random.Random, value: float) -> float:
    """Return the value with a random sign."""
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
    return image.rotate(random_sign(rng, int(level(rng, 30))), Image.Resampling.BILINEAR)


def _shear_x(image: Image.Image, rng: random.Random) -> Image.Image:
    return _affine(image, 1, random_sign(rng, level(rng, 0.3)), 0, 0, 1, 0)


def _shear_y(image: Image.Image, rng: random.Random) -> Image.Image:
    return _affine(image, 1, 0, 0, random_sign(rng, level(rng, 0.3)), 1, 0)


def _translate_x(image: Image.Image, rng: random.Random) -> Image.Image:
    return _affine(image, 1, 0, random_sign(rng, int(level(rng, image.width / 3))), 0, 1, 0)


def _translate_y(image: Image.Image, rng: random.Random) -> Image.Image:
    return _affine(image, 1, 0, 0, 0, 1, random_sign(rng, int(level(rng, image.height / 3))))


def _affine(image: Image.Image, *coefficients: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)


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
    """Mix a crop with the results of three chains of one to three operations.

    The weights of the chains are drawn from Dirichlet(1, 1, 1), and the weight of the crop from Beta(1, 1), which is
    uniform.

    Args:
        crop: The crop, in RGB.
        rng: The generator of all random numbers.

    Returns:
        A new RGB image of the same size.
    """
    chain_weights = [rng.expovariate(1) for _ in range(CHAINS)]  # normalised exponentials are Dirichlet(1, 1, 1)
    crop_weight = rng.random()
    mix: NDArray[np.float32] = crop_weight * np.asarray(crop, np.float32)
    for weight in chain_weights:
        changed = crop
        for _ in range(rng.randint(1, DEPTH)):
            changed = rng.choice(OPERATIONS)(changed, rng)
        mix += (1 - crop_weight) * weight / sum(chain_weights) * np.asarray(changed, np.float32)
    return Image.fromarray(mix.round().clip(0, 255).astype(np.uint8))
