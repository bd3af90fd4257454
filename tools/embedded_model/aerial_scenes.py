"""Draw synthetic aerial and satellite scenes of 29 kinds of land cover.

The recipe has no real aerial images; these drawings stand in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Colour = tuple[float, float, float]

SIDE = 256  # scenes are drawn at this size in pixels, then downsampled

LEAVES: Sequence[Colour] = ((0.13, 0.24, 0.11), (0.17, 0.30, 0.14), (0.10, 0.20, 0.12), (0.20, 0.33, 0.15))
NEEDLES: Sequence[Colour] = ((0.08, 0.16, 0.10), (0.10, 0.20, 0.13), (0.07, 0.15, 0.12))
GRASS: Sequence[Colour] = ((0.36, 0.50, 0.24), (0.42, 0.54, 0.28), (0.32, 0.46, 0.22), (0.47, 0.55, 0.32))
DRY: Sequence[Colour] = ((0.50, 0.46, 0.32), (0.42, 0.42, 0.27), (0.46, 0.40, 0.28), (0.36, 0.40, 0.24))
CROPS: Sequence[Colour] = (
    (0.60, 0.50, 0.36), (0.47, 0.37, 0.27), (0.68, 0.60, 0.42), (0.33, 0.46, 0.20), (0.42, 0.56, 0.25),
    (0.54, 0.44, 0.33), (0.38, 0.30, 0.23), (0.72, 0.66, 0.45), (0.52, 0.54, 0.28),
)  # fmt: skip
SOIL: Sequence[Colour] = ((0.56, 0.46, 0.35), (0.62, 0.52, 0.40), (0.48, 0.40, 0.31))
DEEP: Sequence[Colour] = ((0.05, 0.13, 0.22), (0.07, 0.18, 0.27), (0.06, 0.18, 0.21), (0.14, 0.28, 0.40))
SHALLOW: Sequence[Colour] = ((0.15, 0.24, 0.24), (0.22, 0.30, 0.30), (0.28, 0.33, 0.28), (0.13, 0.25, 0.30))
TARMAC: Sequence[Colour] = ((0.42, 0.42, 0.43), (0.52, 0.51, 0.50), (0.35, 0.35, 0.37), (0.60, 0.59, 0.57))
TILES: Sequence[Colour] = (
    (0.60, 0.36, 0.27), (0.52, 0.32, 0.26), (0.45, 0.40, 0.38), (0.66, 0.62, 0.58), (0.36, 0.33, 0.33),
    (0.62, 0.45, 0.36),
)  # fmt: skip
HALLS: Sequence[Colour] = (
    (0.86, 0.87, 0.88), (0.72, 0.74, 0.76), (0.60, 0.63, 0.67), (0.93, 0.93, 0.92), (0.50, 0.56, 0.64),
    (0.66, 0.55, 0.50),
)  # fmt: skip
SAND: Sequence[Colour] = ((0.80, 0.70, 0.52), (0.84, 0.76, 0.60), (0.74, 0.58, 0.42), (0.86, 0.81, 0.70))
ROCK: Sequence[Colour] = ((0.45, 0.42, 0.39), (0.52, 0.48, 0.43), (0.38, 0.36, 0.35), (0.50, 0.41, 0.35))
SNOW: Sequence[Colour] = ((0.93, 0.95, 0.98), (0.88, 0.91, 0.96))


class Scene:
    """A square of land seen from directly above: `pixels` [SIDE, SIDE, 3], values from 0 to 1.

    `metres` is the width of the square, and all lengths are in metres. Later drawing operations cover earlier ones.
    """

    def __init__(self, rng: np.random.Generator, metres: float) -> None:
        self.rng, self.metres = rng, metres
        self.y, self.x = (np.mgrid[:SIDE, :SIDE] + 0.5) * (metres / SIDE) - metres / 2
        self.pixels: Array = np.zeros((SIDE, SIDE, 3))

    def random_colour(self, colours: Sequence[Colour]) -> Array:
        """Return one of the colours with noise: [3]."""
        return np.clip(np.array(colours[int(self.rng.integers(len(colours)))]) + self.rng.normal(0, 0.025, 3), 0, 1)

    def noise(self, size: float, octaves: int = 4) -> Array:
        """Return smooth noise [SIDE, SIDE] with mean 0 and std 1; each octave halves the feature size."""
        total: Array = np.zeros((SIDE, SIDE))
        for octave in range(octaves):
            cells = min(self.metres / size * 2**octave, SIDE / 2)
            grid = Image.fromarray(self.rng.normal(size=[int(cells) + 4] * 2).astype(np.float32))
            part = (1, 1, 1 + cells, 1 + cells)
            total += np.asarray(grid.resize((SIDE, SIDE), Image.Resampling.BICUBIC, part)) * 0.6**octave
        total -= total.mean()
        return total / (total.std() or 1.0)

    def rotated(self, angle: float | None = None) -> tuple[Array, Array]:
        """Return the coordinates along and across a direction, which is random by default."""
        angle = self.rng.uniform(0, np.pi) if angle is None else angle
        return self.x * np.cos(angle) + self.y * np.sin(angle), self.y * np.cos(angle) - self.x * np.sin(angle)

    def paint(self, colour: Array, where: Mask | None = None) -> None:
        """Set the pixels, or those of a mask, to a colour: [3] or [SIDE, SIDE, 3]."""
        self.pixels = np.where(True if where is None else where[..., None], colour, self.pixels)

    def ground(self, colours: Sequence[Colour], size: float, rough: float, where: Mask | None = None) -> None:
        """Draw soil or plants: patches of two of the colours with bright and dark spots."""
        mix = 1 / (1 + np.exp(-2 * self.noise(size)))[..., None]
        shade = 1 + rough * self.noise(size / 4, 6)[..., None]
        self.paint(
            np.clip((mix * self.random_colour(colours) + (1 - mix) * self.random_colour(colours)) * shade, 0, 1), where
        )

    def band(self, width: float, bend: float = 0.0) -> tuple[Array, Array]:
        """Return a strip across the scene: the position along it, and the distance from its centre in half widths."""
        along, across = self.rotated()
        across = across + self.rng.uniform(-0.25, 0.25) * self.metres
        for wave in (1, 2, 3):
            phase, size = self.rng.uniform(0, 2 * np.pi), bend * self.metres * self.rng.uniform(0.03, 0.12) / wave
            across = across + size * np.sin(2 * np.pi * wave * along / self.metres + phase)
        return along, across / (width / 2)

    def cells(
        self, length: float, width: float, jitter: float = 0.0, angle: float | None = None
    ) -> tuple[Array, Array, NDArray[np.int64]]:
        """Return a rotated grid: each pixel's position in its cell, from -0.5 to 0.5 in u and v, and the cell's id."""
        along, across = self.rotated(angle)
        u, v = along / length, across / width
        if jitter:
            u, v = u + jitter * self.noise(3 * length, 2), v + jitter * self.noise(3 * width, 2)
        i, j = np.floor(u).astype(int), np.floor(v).astype(int)
        return u - i - 0.5, v - j - 0.5, (i * 7919 + j * 104729) % 4093

    def per_cell(self, low: float, high: float) -> Array:
        """Return a random number for each cell id: [4093]."""
        return self.rng.uniform(low, high, 4093)

    def cell_colours(self, colours: Sequence[Colour]) -> Array:
        """Return one of the colours with noise for each cell id: [4093, 3]."""
        picked = np.array(colours)[self.rng.integers(len(colours), size=4093)]
        return np.clip(picked + self.rng.normal(0, 0.03, (4093, 3)), 0, 1)

    def buildings(
        self,
        colours: Sequence[Colour],
        length: float,
        width: float,
        filled: float,
        share: tuple[float, float],
        angle: float | None = None,
        where: Mask | None = None,
    ) -> None:
        """Draw buildings with shadows in a grid; `share` is the range of the part of a cell that a building covers."""
        u, v, number = self.cells(length, width, angle=angle)
        tall, wide = self.per_cell(*share)[number] / 2, self.per_cell(*share)[number] / 2
        du, dv = u - self.per_cell(-0.1, 0.1)[number], v - self.per_cell(-0.1, 0.1)[number]
        there = (self.per_cell(0, 1)[number] < filled) & (True if where is None else where)
        shadow = there & (abs(du - 2.5 / length) < tall) & (abs(dv - 2.5 / width) < wide)
        self.paint(0.35 * self.pixels, shadow)
        self.paint(self.cell_colours(colours)[number], there & (abs(du) < tall) & (abs(dv) < wide))

    def trees(
        self, colours: Sequence[Colour], apart: float, filled: float, jitter: float, where: Mask | None = None
    ) -> None:
        """Draw tree crowns that are lit from one side."""
        u, v, number = self.cells(apart, apart, jitter)
        size = self.per_cell(0.3, 0.5)[number]
        crown = (u**2 + v**2 < size**2) & (self.per_cell(0, 1)[number] < filled)
        light = (1 - 0.5 * (u + v) / size)[..., None]
        self.paint(np.clip(self.cell_colours(colours)[number] * light, 0, 1), crown if where is None else crown & where)

    def streets(self, length: float, width: float, wide: float, angle: float | None = None) -> None:
        """Draw a grid of streets."""
        u, v, _ = self.cells(length, width, angle=angle)
        self.paint(
            self.random_colour(TARMAC), ((0.5 - abs(u)) * length < wide / 2) | ((0.5 - abs(v)) * width < wide / 2)
        )

    def parcels(self, colours: Sequence[Colour], size: float, rows: float = 0.0) -> NDArray[np.int64]:
        """Draw fields with straight borders, and return their ids; `rows` is the contrast of their crop rows."""
        along, across = self.rotated()
        strip = np.floor(across / (size * self.rng.uniform(0.6, 1.2)) + 0.03 * self.noise(4 * size, 1)).astype(int)
        offset = self.per_cell(0, 1)[(strip * 31) % 4093]
        stretch = self.per_cell(0.6, 1.8)[(strip * 57) % 4093]
        number: NDArray[np.int64] = (
            strip * 7919 + np.floor(along / (size * stretch) + offset).astype(int) * 104729
        ) % 4093
        colour = self.cell_colours(colours)[number]
        turn = self.per_cell(0, 1)[number] < 0.5
        lines = np.sin(2 * np.pi * np.where(turn, along, across) / max(6.0, self.metres / 50))
        spots = 1 + self.rng.uniform(0.03, 0.12) * self.noise(size, 7) + rows * lines * self.per_cell(0, 1)[number]
        self.paint(np.clip(colour * spots[..., None], 0, 1))
        return number

    def countryside(self) -> None:
        """Draw a rural background: fields, meadow, dry land or a wood."""
        size = self.rng.uniform(60, 200)
        match self.rng.integers(4):
            case 0:
                self.parcels((*CROPS, *GRASS), size)
            case 1:
                self.ground(GRASS, size, 0.06)
            case 2:
                self.ground(DRY, size, 0.1)
            case _:
                self.ground(GRASS, size, 0.06)
                self.trees(LEAVES, 9, 0.95, 0.3, self.noise(size) > 0.2)


def forest(scene: Scene) -> None:
    kind = (LEAVES, NEEDLES)[scene.rng.integers(2)]
    scene.ground(kind, 250, 0.08)
    scene.trees(kind, scene.rng.uniform(6, 12), 0.95, 0.2)
    if scene.rng.random() < 0.3:
        scene.ground(GRASS, 60, 0.05, scene.noise(200) > 1.6)


def annual_crops(scene: Scene) -> None:
    scene.parcels(CROPS, scene.rng.uniform(50, 300), scene.rng.uniform(0, 0.1))
    if scene.rng.random() < 0.2:  # circular irrigation
        u, v, number = scene.cells(400, 400)
        scene.paint(scene.cell_colours(CROPS)[number], u**2 + v**2 < 0.23)
    if scene.rng.random() < 0.4:
        scene.paint(scene.random_colour(SOIL), abs(scene.band(6)[1]) < 1)
    if scene.rng.random() < 0.3:
        scene.trees(LEAVES, 12, 0.9, 0.3, scene.noise(120) > 2)


def permanent_crops(scene: Scene) -> None:
    ground = ((*SOIL, *DRY), (*GRASS, *DRY))[scene.rng.integers(2)]
    parcel, apart = scene.parcels(ground, scene.rng.uniform(80, 250)), scene.rng.uniform(5, 12)
    kind = scene.per_cell(0, 1)[parcel]
    for where in (kind < 0.45, kind > 0.6):  # vines stand in rows, trees apart
        u, v, number = scene.cells(apart, apart * scene.rng.uniform(0.8, 1.5))
        plants = abs(v) < 0.28 if scene.rng.random() < 0.5 else u**2 + v**2 < 0.13
        scene.paint(np.clip(scene.cell_colours(LEAVES)[number] * scene.rng.uniform(1, 1.5), 0, 1), plants & where)
    if scene.rng.random() < 0.3:
        scene.paint(scene.random_colour(SOIL), abs(scene.band(5)[1]) < 1)


def pasture(scene: Scene) -> None:
    colours = (GRASS, GRASS, (*GRASS[2:], DRY[3], (0.62, 0.56, 0.34)))[scene.rng.integers(3)]
    if scene.rng.random() < 0.4:
        scene.parcels(colours, scene.rng.uniform(150, 400))
    else:
        scene.ground(colours, 250, scene.rng.uniform(0.02, 0.08))
    if scene.rng.random() < 0.4:  # hedges
        u, v, _ = scene.cells(*scene.rng.uniform(150, 350, 2))
        scene.trees(LEAVES, 10, 0.7, 0.2, np.minimum(0.5 - abs(u), 0.5 - abs(v)) < 0.02)
    if scene.rng.random() < 0.5:
        scene.trees(LEAVES, 40, 0.06, 0.3)


def scrub(scene: Scene) -> None:
    scene.ground((*DRY, GRASS[2]), scene.rng.uniform(60, 250), 0.14)
    scene.trees(
        (LEAVES[1], DRY[3], DRY[1]), scene.rng.uniform(5, 12), scene.rng.uniform(0.1, 0.5), 0.4, scene.noise(120) > -0.5
    )


def river(scene: Scene) -> None:
    scene.countryside()
    _, off = scene.band(width := scene.rng.uniform(0.06, 0.22) * scene.metres, 1.0)
    banks = 1 + 10 / width
    scene.trees(LEAVES, 10, 0.9, 0.2, abs(off) < 1 + scene.rng.uniform(0, 60) / width)
    if scene.rng.random() < 0.4:
        scene.paint(scene.random_colour(SAND), abs(off) < banks)
    scene.paint(scene.random_colour((*SHALLOW, *DEEP)) * (1 + 0.04 * scene.noise(100)[..., None]), abs(off) < 1)


def open_water(scene: Scene) -> None:
    scene.paint(
        scene.random_colour((*DEEP, *DEEP, *SHALLOW))
        * (1 + scene.rng.uniform(0.01, 0.05) * scene.noise(300)[..., None])
    )


def lake(scene: Scene) -> None:
    scene.countryside()
    far = np.hypot(scene.x, scene.y) / scene.metres * scene.rng.uniform(1.2, 2.2) + 0.12 * scene.noise(
        scene.metres / 2, 3
    )
    scene.paint(scene.random_colour((*DEEP, *SHALLOW)) * (1 + 0.03 * scene.noise(100)[..., None]), far < 0.6)


def coast(scene: Scene) -> None:
    scene.countryside()
    off = scene.band(scene.metres, 0.6)[1] + 0.05 * scene.noise(100)
    wide = scene.rng.uniform(0.02, 0.12)
    scene.ground(SAND, 100, 0.03, off > 0)
    scene.paint(scene.random_colour(DEEP) * (1 + 0.03 * scene.noise(100)[..., None]), off > wide)
    scene.paint(np.array([0.9, 0.92, 0.92]), (off > wide) & (off < wide + 0.02))


def highway(scene: Scene) -> None:
    (scene.countryside, scene.countryside, lambda: residential(scene))[scene.rng.integers(3)]()
    width = scene.rng.uniform(22, 45)
    tarmac, verge = scene.random_colour(TARMAC), scene.random_colour((*GRASS, *DRY))
    for _ in range(scene.rng.integers(1, 3)):
        along, off = scene.band(width, scene.rng.uniform(0, 0.6))
        scene.paint(verge, abs(off) < 1.4)
        scene.paint(tarmac, abs(off) < 1)
        scene.paint(verge, abs(off) < 0.1)
        vehicles = (np.sin(along / 4) > 0.9) & (abs(abs(off) - 0.5) < 0.12) & (scene.noise(30) > 0.8)
        scene.paint(scene.random_colour(HALLS), vehicles)


def small_road(scene: Scene) -> None:
    scene.countryside()
    scene.paint(scene.random_colour((*TARMAC, *SOIL)), abs(scene.band(scene.rng.uniform(6, 14), 0.8)[1]) < 1)


def railway(scene: Scene) -> None:
    scene.countryside()
    tracks = scene.rng.integers(2, 7)
    _, off = scene.band(tracks * max(5.0, scene.metres / 80), 0.3)
    scene.paint(scene.random_colour(((0.45, 0.40, 0.37), (0.38, 0.35, 0.34))), abs(off) < 1)
    scene.paint(
        scene.random_colour(((0.25, 0.23, 0.23),)), (abs(off) < 1) & (abs((off + 1) * tracks / 2 % 1 - 0.5) < 0.2)
    )


def residential(scene: Scene) -> None:
    scene.ground((*GRASS, *DRY, LEAVES[1]), 60, 0.1)
    block, plot = scene.rng.uniform(90, 200), scene.rng.uniform(16, 28)
    angle = scene.rng.uniform(0, np.pi)
    scene.buildings(TILES, plot, plot, 0.85, (0.4, 0.75), angle)
    scene.streets(block, 3 * plot, scene.rng.uniform(6, 10), angle)
    scene.trees(LEAVES, 14, scene.rng.uniform(0.1, 0.5), 0.4)


def city(scene: Scene) -> None:
    scene.paint(scene.random_colour(TARMAC))
    length, angle = scene.rng.uniform(50, 110), scene.rng.uniform(0, np.pi)
    scene.buildings((*TILES, *HALLS), length / 3, length / 3, 0.97, (0.7, 0.95), angle)
    scene.streets(length, length * scene.rng.uniform(0.7, 1.3), scene.rng.uniform(10, 20), angle)
    scene.trees(LEAVES, 15, 0.08, 0.4)


def industrial(scene: Scene) -> None:
    scene.ground((*TARMAC, *SOIL), 120, 0.06)
    if scene.rng.random() < 0.5:
        scene.ground(GRASS, 80, 0.06, scene.noise(200) > 0.8)
    size, angle = scene.rng.uniform(70, 180), scene.rng.uniform(0, np.pi)
    scene.buildings(HALLS, size, size * scene.rng.uniform(0.5, 1), 0.8, (0.4, 0.9), angle)
    scene.buildings(HALLS, size / 3, size / 3, 0.2, (0.3, 0.8), angle)
    scene.streets(2.2 * size, 2.2 * size, scene.rng.uniform(10, 18), angle)


def car_park(scene: Scene) -> None:
    scene.paint(scene.random_colour(TARMAC))
    bay = max(3.0, scene.metres / 60)
    u, v, number = scene.cells(bay, 5 * bay)
    scene.paint(scene.random_colour(HALLS[3:4]), (abs(u) > 0.42) & (abs(v) < 0.4))
    cars = (abs(u) < 0.3) & (abs(abs(v) - 0.2) < 0.15) & (scene.per_cell(0, 1)[number] < 0.8)
    scene.paint(scene.cell_colours((*HALLS, *TILES, (0.1, 0.1, 0.1), (0.6, 0.1, 0.1)))[number], cars)


def airport(scene: Scene) -> None:
    scene.ground(GRASS, 200, 0.04)
    tarmac = scene.random_colour(TARMAC)
    along, off = scene.band(50)
    scene.paint(tarmac, abs(off) < 1)
    scene.paint(np.array([0.95, 0.95, 0.95]), (abs(off) < 0.05) & (np.sin(along / 8) > 0))
    scene.paint(tarmac, abs(off - 5) < 0.5)
    scene.paint(tarmac, (abs(along) < 12) & (abs(off - 2.5) < 2.6))


def harbour(scene: Scene) -> None:
    scene.paint(scene.random_colour(DEEP) * (1 + 0.03 * scene.noise(60)[..., None]))
    angle, berth = scene.rng.uniform(0, np.pi), max(8.0, scene.metres / 60)
    along, across = scene.rotated(angle)
    shore = scene.rng.uniform(0, 0.3) * scene.metres
    u, v, number = scene.cells(berth, 1.6 * berth, angle=angle)
    boats = (
        (abs(u) < 0.3) & (abs(v) < 0.36) & (scene.per_cell(0, 1)[number] < 0.6) & (across > shore - 0.4 * scene.metres)
    )
    scene.paint(scene.random_colour(HALLS[3:4]), boats)
    piers = (abs(along / (6 * berth) % 1 - 0.5) < 0.07) & (across > shore - 0.42 * scene.metres)
    scene.paint(scene.random_colour(TARMAC), piers | (across > shore))
    scene.buildings(HALLS, 60, 40, 0.7, (0.4, 0.8), angle, across > shore + 15)


def sand(scene: Scene) -> None:
    scene.ground(SAND, 200, 0.02)
    along, _ = scene.rotated()
    waves = np.sin(along / scene.rng.uniform(8, 40) + 1.5 * scene.noise(200))
    scene.paint(np.clip(scene.pixels * (1 + 0.12 * waves[..., None]), 0, 1))


def snow(scene: Scene) -> None:
    scene.ground(SNOW, 200, 0.03)
    scene.ground(ROCK, 60, 0.2, scene.noise(250, 5) > scene.rng.uniform(0.8, 2))


def rock(scene: Scene) -> None:
    scene.ground(ROCK, 150, 0.2)
    ridges = scene.noise(300, 6)
    slope = np.gradient(ridges, axis=0) + np.gradient(ridges, axis=1)
    scene.paint(np.clip(scene.pixels * (1 + 0.25 * slope / slope.std())[..., None], 0, 1))


def marsh(scene: Scene) -> None:
    scene.ground((*DRY[1:2], LEAVES[3], GRASS[2]), 80, 0.12)
    scene.paint(scene.random_colour((*SHALLOW, *DEEP)), abs(scene.noise(150, 4)) < 0.25)


def golf(scene: Scene) -> None:
    scene.ground(LEAVES, 60, 0.1)
    scene.trees(LEAVES, 9, 0.8, 0.3)
    scene.ground(GRASS, 100, 0.02, abs(scene.noise(200, 1)) < 0.5)
    scene.paint(scene.random_colour(SAND), scene.noise(60, 2) > 2.1)


def solar(scene: Scene) -> None:
    scene.ground((*GRASS, *DRY), 100, 0.05)
    angle = scene.rng.uniform(0, np.pi)
    _, row, _ = scene.cells(1, max(scene.rng.uniform(6, 10), scene.metres / 50), angle=angle)
    u, v, _ = scene.cells(150, 150, angle=angle)
    panels = (abs(row) < 0.3) & (abs(u) < 0.46) & (abs(v) < 0.46)
    scene.paint(scene.random_colour(((0.12, 0.15, 0.28), (0.16, 0.18, 0.26))), panels)


def quarry(scene: Scene) -> None:
    scene.countryside()
    far = np.hypot(scene.x, scene.y) / scene.metres + 0.08 * scene.noise(scene.metres / 2)
    scene.paint(scene.random_colour(SAND) * (0.85 + 0.2 * (np.sin(60 * far) > 0))[..., None], far < 0.38)


def greenhouses(scene: Scene) -> None:
    scene.ground(SOIL, 100, 0.05)
    scene.buildings(HALLS[:4], 60, 14, 0.9, (0.85, 0.97))


def sports_field(scene: Scene) -> None:
    scene.ground((*GRASS, *TARMAC), 80, 0.05)
    along, across = scene.rotated()
    wide = max(45.0, scene.metres / 10)
    far = np.hypot(np.maximum(abs(along) - wide, 0), across) / wide
    scene.paint(scene.random_colour(((0.66, 0.33, 0.25), TARMAC[1])), far < 1)
    scene.paint(scene.random_colour(GRASS) * (1 + 0.08 * np.sign(np.sin(along / wide * 10)))[..., None], far < 0.8)


def bridge(scene: Scene) -> None:
    scene.countryside()
    along, off = scene.band(0.3 * scene.metres, 0.2)
    scene.paint(scene.random_colour((*DEEP, *SHALLOW)) * (1 + 0.03 * scene.noise(60)[..., None]), abs(off) < 1)
    width, angle = scene.rng.uniform(12, 30), scene.rng.uniform(-0.3, 0.3)
    scene.paint(scene.random_colour(TARMAC), abs(along + angle * off * scene.metres / 6) < width / 2)


def crossing(scene: Scene) -> None:
    residential(scene)
    tarmac = scene.random_colour(TARMAC)
    along, across = scene.rotated()
    width = scene.rng.uniform(14, 30)
    scene.paint(tarmac, (abs(along) < width / 2) | (abs(across) < width / 2))
    if scene.rng.random() < 0.5:
        far = np.hypot(scene.x, scene.y) / width
        scene.paint(tarmac, far < 2)
        scene.paint(scene.random_colour(GRASS), far < 1)


Draw = Callable[[Scene], None]

# For each kind of land cover, the function that draws it and words for it: terms of the legend of CORINE, Europe's
# land-cover map, and everyday ones.
LAND_COVER: dict[str, tuple[Draw, Sequence[str]]] = {
    kind: (draw, words.split(", "))
    for kind, draw, words in (
        ("forest", forest, "forest, broad-leaved forest, coniferous forest, mixed forest, woodland, woods, rainforest"),
        ("annual crops", annual_crops, "arable land, annual crops, rice field, cropland, farmland, crop, wheat field"),
        ("permanent crops", permanent_crops, "permanent crops, vineyard, olive grove, orchard, fruit plantation"),
        ("pasture", pasture, "pasture, natural grassland, meadow, grazing land, grass, paddock"),
        (
            "scrub",
            scrub,
            "scrub, herbaceous vegetation, moors and heathland, heath, shrubland, steppe, savanna, chaparral, tundra",
        ),
        ("river", river, "water course, river, stream, creek, canal"),
        ("open water", open_water, "marine waters, sea and ocean, sea, ocean, water"),
        ("lake", lake, "water body, inland waters, lake, pond, reservoir"),
        ("coast", coast, "coastal lagoon, coast, shore, beach, coastline, bay"),
        ("highway", highway, "road network, highway, motorway, freeway, road"),
        ("small road", small_road, "path, country road, dirt road, lane"),
        ("railway", railway, "rail network, railway, railroad, railway line"),
        ("residential", residential, "discontinuous urban fabric, residential area, suburb, village, town, houses"),
        ("city", city, "continuous urban fabric, city, city centre, downtown, built-up area"),
        ("industrial", industrial, "industrial or commercial unit, industrial area, factory, warehouse, power station"),
        ("car park", car_park, "car park, parking lot"),
        ("airport", airport, "airport, runway, airfield"),
        ("harbour", harbour, "port area, port, harbour, marina"),
        ("sand", sand, "dune, sand, desert"),
        ("snow", snow, "glacier, perpetual snow, snow, snowfield, ice cap"),
        ("rock", rock, "bare rock, mountain, lava field, barren land"),
        ("marsh", marsh, "inland marsh, salt marsh, peat bog, marsh, wetland, swamp"),
        ("golf", golf, "sport and leisure facility, green urban area, golf course, park"),
        ("solar", solar, "solar farm, solar panels"),
        ("quarry", quarry, "mineral extraction site, quarry, open-pit mine"),
        ("greenhouses", greenhouses, "greenhouses, glasshouses"),
        ("sports field", sports_field, "sports field, stadium, running track, soccer field"),
        ("bridge", bridge, "bridge, overpass"),
        ("crossing", crossing, "intersection, crossroads, roundabout"),
    )
}


def draw_scene(kind: str, number: int) -> Image.Image:
    """Draw scene `number` of a kind, deterministically. Odd numbers have the low resolution of satellite images."""
    rng = np.random.default_rng([number, *kind.encode()])
    scene = Scene(rng, float(np.exp(rng.uniform(np.log(250), np.log(1200)))))
    LAND_COVER[kind][0](scene)
    light, haze = rng.uniform(0.6, 1.1), rng.uniform(0, 0.15)
    pixels = scene.pixels * light * (1 - haze) + haze * np.array([0.45, 0.5, 0.55])
    pixels += rng.normal(0, 0.01, pixels.shape)
    side, by = (64, Image.Resampling.BOX) if number % 2 else (224, Image.Resampling.LANCZOS)
    return Image.fromarray((255 * np.clip(pixels, 0, 1)).astype(np.uint8)).resize((side, side), by)
