"""What land looks like from above, drawn: no picture of it is among the ingredients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Colour = tuple[float, float, float]

SIDE = 256  # pixels that a scene is drawn on, before it is made smaller

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


class Land:
    """A square of land, `metres` wide, seen straight from above: `pixels` [SIDE, SIDE, 3] from 0 to 1.

    Every length is in metres. What is drawn later covers what was drawn before.
    """

    def __init__(self, rng: np.random.Generator, metres: float) -> None:
        self.rng, self.metres = rng, metres
        self.y, self.x = (np.mgrid[:SIDE, :SIDE] + 0.5) * (metres / SIDE) - metres / 2
        self.pixels: Array = np.zeros((SIDE, SIDE, 3))

    def one(self, colours: Sequence[Colour]) -> Array:
        """A colour like one of these [3]."""
        return np.clip(np.array(colours[int(self.rng.integers(len(colours)))]) + self.rng.normal(0, 0.025, 3), 0, 1)

    def lumps(self, size: float, octaves: int = 4) -> Array:
        """Smooth noise [SIDE, SIDE], mean 0 and deviation 1: lumps of this size, and of half of that in each octave."""
        total: Array = np.zeros((SIDE, SIDE))
        for octave in range(octaves):
            cells = min(self.metres / size * 2**octave, SIDE / 2)
            grid = Image.fromarray(self.rng.normal(size=[int(cells) + 4] * 2).astype(np.float32))
            part = (1, 1, 1 + cells, 1 + cells)
            total += np.asarray(grid.resize((SIDE, SIDE), Image.Resampling.BICUBIC, part)) * 0.6**octave
        total -= total.mean()
        return total / (total.std() or 1.0)

    def turned(self, angle: float | None = None) -> tuple[Array, Array]:
        """Coordinates along and across a direction, a random one unless it is given."""
        angle = self.rng.uniform(0, np.pi) if angle is None else angle
        return self.x * np.cos(angle) + self.y * np.sin(angle), self.y * np.cos(angle) - self.x * np.sin(angle)

    def paint(self, colour: Array, where: Mask | None = None) -> None:
        """Colour [3] or [SIDE, SIDE, 3], over all or where it is true."""
        self.pixels = np.where(True if where is None else where[..., None], colour, self.pixels)

    def ground(self, colours: Sequence[Colour], size: float, rough: float, where: Mask | None = None) -> None:
        """Soil or plants: patches of two of the colours, and bright and dark spots."""
        mix = 1 / (1 + np.exp(-2 * self.lumps(size)))[..., None]
        shade = 1 + rough * self.lumps(size / 4, 6)[..., None]
        self.paint(np.clip((mix * self.one(colours) + (1 - mix) * self.one(colours)) * shade, 0, 1), where)

    def band(self, width: float, bend: float = 0.0) -> tuple[Array, Array]:
        """A way that crosses the land: how far along it [SIDE, SIDE], and how far from its middle in half widths."""
        along, across = self.turned()
        across = across + self.rng.uniform(-0.25, 0.25) * self.metres
        for wave in (1, 2, 3):
            phase, size = self.rng.uniform(0, 2 * np.pi), bend * self.metres * self.rng.uniform(0.03, 0.12) / wave
            across = across + size * np.sin(2 * np.pi * wave * along / self.metres + phase)
        return along, across / (width / 2)

    def cells(
        self, length: float, width: float, jitter: float = 0.0, angle: float | None = None
    ) -> tuple[Array, Array, NDArray[np.int64]]:
        """A turned grid: where in its cell each pixel is, from -0.5 to 0.5 along and across, and the cell's number."""
        along, across = self.turned(angle)
        u, v = along / length, across / width
        if jitter:
            u, v = u + jitter * self.lumps(3 * length, 2), v + jitter * self.lumps(3 * width, 2)
        i, j = np.floor(u).astype(int), np.floor(v).astype(int)
        return u - i - 0.5, v - j - 0.5, (i * 7919 + j * 104729) % 4093

    def each(self, low: float, high: float) -> Array:
        """A random number for every cell's number."""
        return self.rng.uniform(low, high, 4093)

    def colours(self, colours: Sequence[Colour]) -> Array:
        """A colour like one of these for every cell's number [4093, 3]."""
        picked = np.array(colours)[self.rng.integers(len(colours), size=4093)]
        return np.clip(picked + self.rng.normal(0, 0.03, (4093, 3)), 0, 1)

    def roofs(
        self,
        colours: Sequence[Colour],
        length: float,
        width: float,
        filled: float,
        share: tuple[float, float],
        angle: float | None = None,
        where: Mask | None = None,
    ) -> None:
        """Buildings in a grid, each with its shadow: `share` of a cell's length and width."""
        u, v, number = self.cells(length, width, angle=angle)
        tall, wide = self.each(*share)[number] / 2, self.each(*share)[number] / 2
        du, dv = u - self.each(-0.1, 0.1)[number], v - self.each(-0.1, 0.1)[number]
        there = (self.each(0, 1)[number] < filled) & (True if where is None else where)
        shadow = there & (abs(du - 2.5 / length) < tall) & (abs(dv - 2.5 / width) < wide)
        self.paint(0.35 * self.pixels, shadow)
        self.paint(self.colours(colours)[number], there & (abs(du) < tall) & (abs(dv) < wide))

    def trees(
        self, colours: Sequence[Colour], apart: float, filled: float, jitter: float, where: Mask | None = None
    ) -> None:
        """Crowns, bright towards the light and dark away from it."""
        u, v, number = self.cells(apart, apart, jitter)
        size = self.each(0.3, 0.5)[number]
        crown = (u**2 + v**2 < size**2) & (self.each(0, 1)[number] < filled)
        light = (1 - 0.5 * (u + v) / size)[..., None]
        self.paint(np.clip(self.colours(colours)[number] * light, 0, 1), crown if where is None else crown & where)

    def streets(self, length: float, width: float, wide: float, angle: float | None = None) -> None:
        """A net of streets."""
        u, v, _ = self.cells(length, width, angle=angle)
        self.paint(self.one(TARMAC), ((0.5 - abs(u)) * length < wide / 2) | ((0.5 - abs(v)) * width < wide / 2))

    def parcels(self, colours: Sequence[Colour], size: float, rows: float = 0.0) -> NDArray[np.int64]:
        """Fields with straight borders, each of one colour, and their numbers; `rows`: how much their rows are seen."""
        along, across = self.turned()
        strip = np.floor(across / (size * self.rng.uniform(0.6, 1.2)) + 0.03 * self.lumps(4 * size, 1)).astype(int)
        offset = self.each(0, 1)[(strip * 31) % 4093]
        stretch = self.each(0.6, 1.8)[(strip * 57) % 4093]
        number: NDArray[np.int64] = (
            strip * 7919 + np.floor(along / (size * stretch) + offset).astype(int) * 104729
        ) % 4093
        colour = self.colours(colours)[number]
        turn = self.each(0, 1)[number] < 0.5
        lines = np.sin(2 * np.pi * np.where(turn, along, across) / max(6.0, self.metres / 50))
        spots = 1 + self.rng.uniform(0.03, 0.12) * self.lumps(size, 7) + rows * lines * self.each(0, 1)[number]
        self.paint(np.clip(colour * spots[..., None], 0, 1))
        return number

    def countryside(self) -> None:
        """What lies around something: fields, meadow, dry land or a wood."""
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
                self.trees(LEAVES, 9, 0.95, 0.3, self.lumps(size) > 0.2)


def forest(land: Land) -> None:
    kind = (LEAVES, NEEDLES)[land.rng.integers(2)]
    land.ground(kind, 250, 0.08)
    land.trees(kind, land.rng.uniform(6, 12), 0.95, 0.2)
    if land.rng.random() < 0.3:
        land.ground(GRASS, 60, 0.05, land.lumps(200) > 1.6)


def annual_crops(land: Land) -> None:
    land.parcels(CROPS, land.rng.uniform(50, 300), land.rng.uniform(0, 0.1))
    if land.rng.random() < 0.2:  # watered in circles
        u, v, number = land.cells(400, 400)
        land.paint(land.colours(CROPS)[number], u**2 + v**2 < 0.23)
    if land.rng.random() < 0.4:
        land.paint(land.one(SOIL), abs(land.band(6)[1]) < 1)
    if land.rng.random() < 0.3:
        land.trees(LEAVES, 12, 0.9, 0.3, land.lumps(120) > 2)


def permanent_crops(land: Land) -> None:
    ground = ((*SOIL, *DRY), (*GRASS, *DRY))[land.rng.integers(2)]
    parcel, apart = land.parcels(ground, land.rng.uniform(80, 250)), land.rng.uniform(5, 12)
    kind = land.each(0, 1)[parcel]
    for where in (kind < 0.45, kind > 0.6):  # vines stand in rows, trees apart
        u, v, number = land.cells(apart, apart * land.rng.uniform(0.8, 1.5))
        plants = abs(v) < 0.28 if land.rng.random() < 0.5 else u**2 + v**2 < 0.13
        land.paint(np.clip(land.colours(LEAVES)[number] * land.rng.uniform(1, 1.5), 0, 1), plants & where)
    if land.rng.random() < 0.3:
        land.paint(land.one(SOIL), abs(land.band(5)[1]) < 1)


def pasture(land: Land) -> None:
    colours = (GRASS, GRASS, (*GRASS[2:], DRY[3], (0.62, 0.56, 0.34)))[land.rng.integers(3)]
    if land.rng.random() < 0.4:
        land.parcels(colours, land.rng.uniform(150, 400))
    else:
        land.ground(colours, 250, land.rng.uniform(0.02, 0.08))
    if land.rng.random() < 0.4:  # hedges
        u, v, _ = land.cells(*land.rng.uniform(150, 350, 2))
        land.trees(LEAVES, 10, 0.7, 0.2, np.minimum(0.5 - abs(u), 0.5 - abs(v)) < 0.02)
    if land.rng.random() < 0.5:
        land.trees(LEAVES, 40, 0.06, 0.3)


def scrub(land: Land) -> None:
    land.ground((*DRY, GRASS[2]), land.rng.uniform(60, 250), 0.14)
    land.trees(
        (LEAVES[1], DRY[3], DRY[1]), land.rng.uniform(5, 12), land.rng.uniform(0.1, 0.5), 0.4, land.lumps(120) > -0.5
    )


def river(land: Land) -> None:
    land.countryside()
    _, off = land.band(width := land.rng.uniform(0.06, 0.22) * land.metres, 1.0)
    banks = 1 + 10 / width
    land.trees(LEAVES, 10, 0.9, 0.2, abs(off) < 1 + land.rng.uniform(0, 60) / width)
    if land.rng.random() < 0.4:
        land.paint(land.one(SAND), abs(off) < banks)
    land.paint(land.one((*SHALLOW, *DEEP)) * (1 + 0.04 * land.lumps(100)[..., None]), abs(off) < 1)


def open_water(land: Land) -> None:
    land.paint(land.one((*DEEP, *DEEP, *SHALLOW)) * (1 + land.rng.uniform(0.01, 0.05) * land.lumps(300)[..., None]))


def lake(land: Land) -> None:
    land.countryside()
    far = np.hypot(land.x, land.y) / land.metres * land.rng.uniform(1.2, 2.2) + 0.12 * land.lumps(land.metres / 2, 3)
    land.paint(land.one((*DEEP, *SHALLOW)) * (1 + 0.03 * land.lumps(100)[..., None]), far < 0.6)


def coast(land: Land) -> None:
    land.countryside()
    off = land.band(land.metres, 0.6)[1] + 0.05 * land.lumps(100)
    wide = land.rng.uniform(0.02, 0.12)
    land.ground(SAND, 100, 0.03, off > 0)
    land.paint(land.one(DEEP) * (1 + 0.03 * land.lumps(100)[..., None]), off > wide)
    land.paint(np.array([0.9, 0.92, 0.92]), (off > wide) & (off < wide + 0.02))


def highway(land: Land) -> None:
    (land.countryside, land.countryside, lambda: residential(land))[land.rng.integers(3)]()
    width = land.rng.uniform(22, 45)
    tarmac, verge = land.one(TARMAC), land.one((*GRASS, *DRY))
    for _ in range(land.rng.integers(1, 3)):
        along, off = land.band(width, land.rng.uniform(0, 0.6))
        land.paint(verge, abs(off) < 1.4)
        land.paint(tarmac, abs(off) < 1)
        land.paint(verge, abs(off) < 0.1)
        vehicles = (np.sin(along / 4) > 0.9) & (abs(abs(off) - 0.5) < 0.12) & (land.lumps(30) > 0.8)
        land.paint(land.one(HALLS), vehicles)


def small_road(land: Land) -> None:
    land.countryside()
    land.paint(land.one((*TARMAC, *SOIL)), abs(land.band(land.rng.uniform(6, 14), 0.8)[1]) < 1)


def railway(land: Land) -> None:
    land.countryside()
    tracks = land.rng.integers(2, 7)
    _, off = land.band(tracks * max(5.0, land.metres / 80), 0.3)
    land.paint(land.one(((0.45, 0.40, 0.37), (0.38, 0.35, 0.34))), abs(off) < 1)
    land.paint(land.one(((0.25, 0.23, 0.23),)), (abs(off) < 1) & (abs((off + 1) * tracks / 2 % 1 - 0.5) < 0.2))


def residential(land: Land) -> None:
    land.ground((*GRASS, *DRY, LEAVES[1]), 60, 0.1)
    block, plot = land.rng.uniform(90, 200), land.rng.uniform(16, 28)
    angle = land.rng.uniform(0, np.pi)
    land.roofs(TILES, plot, plot, 0.85, (0.4, 0.75), angle)
    land.streets(block, 3 * plot, land.rng.uniform(6, 10), angle)
    land.trees(LEAVES, 14, land.rng.uniform(0.1, 0.5), 0.4)


def city(land: Land) -> None:
    land.paint(land.one(TARMAC))
    length, angle = land.rng.uniform(50, 110), land.rng.uniform(0, np.pi)
    land.roofs((*TILES, *HALLS), length / 3, length / 3, 0.97, (0.7, 0.95), angle)
    land.streets(length, length * land.rng.uniform(0.7, 1.3), land.rng.uniform(10, 20), angle)
    land.trees(LEAVES, 15, 0.08, 0.4)


def industrial(land: Land) -> None:
    land.ground((*TARMAC, *SOIL), 120, 0.06)
    if land.rng.random() < 0.5:
        land.ground(GRASS, 80, 0.06, land.lumps(200) > 0.8)
    size, angle = land.rng.uniform(70, 180), land.rng.uniform(0, np.pi)
    land.roofs(HALLS, size, size * land.rng.uniform(0.5, 1), 0.8, (0.4, 0.9), angle)
    land.roofs(HALLS, size / 3, size / 3, 0.2, (0.3, 0.8), angle)
    land.streets(2.2 * size, 2.2 * size, land.rng.uniform(10, 18), angle)


def car_park(land: Land) -> None:
    land.paint(land.one(TARMAC))
    bay = max(3.0, land.metres / 60)
    u, v, number = land.cells(bay, 5 * bay)
    land.paint(land.one(HALLS[3:4]), (abs(u) > 0.42) & (abs(v) < 0.4))
    cars = (abs(u) < 0.3) & (abs(abs(v) - 0.2) < 0.15) & (land.each(0, 1)[number] < 0.8)
    land.paint(land.colours((*HALLS, *TILES, (0.1, 0.1, 0.1), (0.6, 0.1, 0.1)))[number], cars)


def airport(land: Land) -> None:
    land.ground(GRASS, 200, 0.04)
    tarmac = land.one(TARMAC)
    along, off = land.band(50)
    land.paint(tarmac, abs(off) < 1)
    land.paint(np.array([0.95, 0.95, 0.95]), (abs(off) < 0.05) & (np.sin(along / 8) > 0))
    land.paint(tarmac, abs(off - 5) < 0.5)
    land.paint(tarmac, (abs(along) < 12) & (abs(off - 2.5) < 2.6))


def harbour(land: Land) -> None:
    land.paint(land.one(DEEP) * (1 + 0.03 * land.lumps(60)[..., None]))
    angle, berth = land.rng.uniform(0, np.pi), max(8.0, land.metres / 60)
    along, across = land.turned(angle)
    shore = land.rng.uniform(0, 0.3) * land.metres
    u, v, number = land.cells(berth, 1.6 * berth, angle=angle)
    boats = (abs(u) < 0.3) & (abs(v) < 0.36) & (land.each(0, 1)[number] < 0.6) & (across > shore - 0.4 * land.metres)
    land.paint(land.one(HALLS[3:4]), boats)
    piers = (abs(along / (6 * berth) % 1 - 0.5) < 0.07) & (across > shore - 0.42 * land.metres)
    land.paint(land.one(TARMAC), piers | (across > shore))
    land.roofs(HALLS, 60, 40, 0.7, (0.4, 0.8), angle, across > shore + 15)


def sand(land: Land) -> None:
    land.ground(SAND, 200, 0.02)
    along, _ = land.turned()
    waves = np.sin(along / land.rng.uniform(8, 40) + 1.5 * land.lumps(200))
    land.paint(np.clip(land.pixels * (1 + 0.12 * waves[..., None]), 0, 1))


def snow(land: Land) -> None:
    land.ground(SNOW, 200, 0.03)
    land.ground(ROCK, 60, 0.2, land.lumps(250, 5) > land.rng.uniform(0.8, 2))


def rock(land: Land) -> None:
    land.ground(ROCK, 150, 0.2)
    ridges = land.lumps(300, 6)
    slope = np.gradient(ridges, axis=0) + np.gradient(ridges, axis=1)
    land.paint(np.clip(land.pixels * (1 + 0.25 * slope / slope.std())[..., None], 0, 1))


def marsh(land: Land) -> None:
    land.ground((*DRY[1:2], LEAVES[3], GRASS[2]), 80, 0.12)
    land.paint(land.one((*SHALLOW, *DEEP)), abs(land.lumps(150, 4)) < 0.25)


def golf(land: Land) -> None:
    land.ground(LEAVES, 60, 0.1)
    land.trees(LEAVES, 9, 0.8, 0.3)
    land.ground(GRASS, 100, 0.02, abs(land.lumps(200, 1)) < 0.5)
    land.paint(land.one(SAND), land.lumps(60, 2) > 2.1)


def solar(land: Land) -> None:
    land.ground((*GRASS, *DRY), 100, 0.05)
    angle = land.rng.uniform(0, np.pi)
    _, row, _ = land.cells(1, max(land.rng.uniform(6, 10), land.metres / 50), angle=angle)
    u, v, _ = land.cells(150, 150, angle=angle)
    panels = (abs(row) < 0.3) & (abs(u) < 0.46) & (abs(v) < 0.46)
    land.paint(land.one(((0.12, 0.15, 0.28), (0.16, 0.18, 0.26))), panels)


def quarry(land: Land) -> None:
    land.countryside()
    far = np.hypot(land.x, land.y) / land.metres + 0.08 * land.lumps(land.metres / 2)
    land.paint(land.one(SAND) * (0.85 + 0.2 * (np.sin(60 * far) > 0))[..., None], far < 0.38)


def greenhouses(land: Land) -> None:
    land.ground(SOIL, 100, 0.05)
    land.roofs(HALLS[:4], 60, 14, 0.9, (0.85, 0.97))


def sports_field(land: Land) -> None:
    land.ground((*GRASS, *TARMAC), 80, 0.05)
    along, across = land.turned()
    wide = max(45.0, land.metres / 10)
    far = np.hypot(np.maximum(abs(along) - wide, 0), across) / wide
    land.paint(land.one(((0.66, 0.33, 0.25), TARMAC[1])), far < 1)
    land.paint(land.one(GRASS) * (1 + 0.08 * np.sign(np.sin(along / wide * 10)))[..., None], far < 0.8)


def bridge(land: Land) -> None:
    land.countryside()
    along, off = land.band(0.3 * land.metres, 0.2)
    land.paint(land.one((*DEEP, *SHALLOW)) * (1 + 0.03 * land.lumps(60)[..., None]), abs(off) < 1)
    width, angle = land.rng.uniform(12, 30), land.rng.uniform(-0.3, 0.3)
    land.paint(land.one(TARMAC), abs(along + angle * off * land.metres / 6) < width / 2)


def crossing(land: Land) -> None:
    residential(land)
    tarmac = land.one(TARMAC)
    along, across = land.turned()
    width = land.rng.uniform(14, 30)
    land.paint(tarmac, (abs(along) < width / 2) | (abs(across) < width / 2))
    if land.rng.random() < 0.5:
        far = np.hypot(land.x, land.y) / width
        land.paint(tarmac, far < 2)
        land.paint(land.one(GRASS), far < 1)


Draw = Callable[[Land], None]

# What is drawn, and words for it: terms of the legend of CORINE, Europe's land-cover map, and what people say.
LAND: dict[str, tuple[Draw, Sequence[str]]] = {
    kind: (draws, words.split(", "))
    for kind, draws, words in (
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


def draw(kind: str, number: int) -> Image.Image:
    """A scene of a kind of land: the same for the same number. Half are coarse, as pictures from space are."""
    rng = np.random.default_rng([number, *kind.encode()])
    land = Land(rng, float(np.exp(rng.uniform(np.log(250), np.log(1200)))))
    LAND[kind][0](land)
    light, haze = rng.uniform(0.6, 1.1), rng.uniform(0, 0.15)
    pixels = land.pixels * light * (1 - haze) + haze * np.array([0.45, 0.5, 0.55])
    pixels += rng.normal(0, 0.01, pixels.shape)
    side, by = (64, Image.Resampling.BOX) if number % 2 else (224, Image.Resampling.LANCZOS)
    return Image.fromarray((255 * np.clip(pixels, 0, 1)).astype(np.uint8)).resize((side, side), by)
