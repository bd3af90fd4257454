"""Reference implementation of AugMix from its description: loops over pixels, without Pillow and numpy.

Nothing here is shared with selftpt. Every operation takes rows of pixels and the random parameters drawn for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

Plane = list[list[int]]  # one channel: rows of values from 0 to 255
Image = list[Plane]
Operation = Callable[[Image, random.Random], Image]


def each_value(image: Image, change: Callable[[int], int]) -> Image:
    return [[[change(value) for value in row] for row in plane] for plane in image]


def posterize(image: Image, bits: int) -> Image:
    """Keep the highest bits."""
    return each_value(image, lambda value: value // 2 ** (8 - bits) * 2 ** (8 - bits))


def solarize(image: Image, threshold: int) -> Image:
    """Invert values at or above the threshold."""
    return each_value(image, lambda value: value if value < threshold else 255 - value)


def autocontrast(image: Image) -> Image:
    """Stretch each channel to the range 0 to 255."""
    planes = []
    for plane in image:
        values = [value for row in plane for value in row]
        low, high = min(values), max(values)
        scale = 255 / (high - low) if high > low else 1
        shift = -low * scale if high > low else 0
        planes += each_value([plane], lambda v, scale=scale, shift=shift: max(0, min(255, int(v * scale + shift))))
    return planes


def equalize(image: Image) -> Image:
    """Equalise the histogram of each channel."""
    planes = []
    for plane in image:
        counts = [0] * 256
        for row in plane:
            for value in row:
                counts[value] += 1
        present = [count for count in counts if count]
        step = (sum(present) - present[-1]) // 255 if len(present) > 1 else 0
        if not step:
            planes.append(plane)
            continue
        table, total = [], step // 2
        for count in counts:
            table.append(min(255, total // step))
            total += count
        planes += each_value([plane], lambda value, table=table: table[value])
    return planes


def affine(image: Image, a: float, b: float, c: float, d: float, e: float, f: float) -> Image:
    """Sample pixel centre (x, y) bilinearly at (ax + by + c, dx + ey + f); positions outside the image are black."""
    height, width = len(image[0]), len(image[0][0])

    def sample(plane: Plane, column: int, row: int) -> int:
        x, y = column + 0.5, row + 0.5
        u, v = a * x + b * y + c, d * x + e * y + f
        if not (0 <= u < width and 0 <= v < height):
            return 0
        u, v = u - 0.5, v - 0.5
        left, upper = math.floor(u), math.floor(v)
        columns = [min(max(i, 0), width - 1) for i in (left, left + 1)]
        rows = [min(max(i, 0), height - 1) for i in (upper, upper + 1)]
        above, below = (plane[i][columns[0]] + (plane[i][columns[1]] - plane[i][columns[0]]) * (u - left) for i in rows)
        return int(above + (below - above) * (v - upper))

    return [[[sample(plane, column, row) for column in range(width)] for row in range(height)] for plane in image]


def rotate(image: Image, degrees: int) -> Image:
    """Rotate counter-clockwise about the centre."""
    if degrees == 0:
        return image
    height, width = len(image[0]), len(image[0][0])
    angle = -math.radians(degrees)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return affine(image, cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)


def mix(image: Image, rng: random.Random, operations: Sequence[Operation]) -> list[list[list[float]]]:
    """Return one view before rounding; random numbers are drawn in the same order as in selftpt."""
    height, width = len(image[0]), len(image[0][0])
    gammas = [rng.expovariate(1), rng.expovariate(1), rng.expovariate(1)]
    weights = [gamma / sum(gammas) for gamma in gammas]  # Dirichlet(1, 1, 1)
    m = rng.random()  # Beta(1, 1)
    chains = []
    for _ in weights:
        x = image
        for _ in range(rng.randint(1, 3)):
            x = rng.choice(operations)(x, rng)
        chains.append(x)
    return [
        [
            [
                m * image[p][r][c] + (1 - m) * sum(w * x[p][r][c] for w, x in zip(weights, chains, strict=True))
                for c in range(width)
            ]
            for r in range(height)
        ]
        for p in range(3)
    ]


NAMES = "autocontrast equalize posterize rotate solarize shear_x shear_y translate_x translate_y".split()


def operate(x: Image, name: str, rng: random.Random) -> Image:
    height, width = len(x[0]), len(x[0][0])

    def strength(maximum: float) -> float:
        return rng.uniform(0.1, 1) * maximum / 10

    def sign(value: float) -> float:
        return -value if rng.random() > 0.5 else value

    if name == "autocontrast":
        return autocontrast(x)
    if name == "equalize":
        return equalize(x)
    if name == "posterize":
        return posterize(x, 4 - int(strength(4)))
    if name == "rotate":
        return rotate(x, int(sign(int(strength(30)))))
    if name == "solarize":
        return solarize(x, 256 - int(strength(256)))
    if name == "shear_x":
        return affine(x, 1, sign(strength(0.3)), 0, 0, 1, 0)
    if name == "shear_y":
        return affine(x, 1, 0, 0, sign(strength(0.3)), 1, 0)
    if name == "translate_x":
        return affine(x, 1, 0, sign(int(strength(width / 3))), 0, 1, 0)
    return affine(x, 1, 0, 0, 0, 1, sign(int(strength(height / 3))))


def planes(rows: Sequence[Sequence[Sequence[int]]]) -> Image:
    """Split pixels [H, W, 3] into three channels."""
    return [[[pixel[p] for pixel in row] for row in rows] for p in range(3)]
