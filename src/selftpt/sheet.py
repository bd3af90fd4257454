"""Images and what was said of them, on one sheet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont, ImageOps

SIDE, LINE, GAP = 240, 20, 12


class Tile(NamedTuple):
    """A image in RGB and lines of text under it, each with its colour."""

    image: Image.Image
    lines: Sequence[tuple[str, str]]


def contact_sheet(title: str, tiles: Sequence[Tile], columns: int = 4) -> Image.Image:
    """The tiles in rows under a title."""
    font, large = ImageFont.load_default(14), ImageFont.load_default(20)
    width, height = SIDE + GAP, SIDE + GAP + LINE * max(len(tile.lines) for tile in tiles)
    top = 2 * GAP + 24
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * width + GAP, top + rows * height), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((GAP, GAP), title, "black", large)
    for i, tile in enumerate(tiles):
        x, y = GAP + i % columns * width, top + i // columns * height
        sheet.paste(ImageOps.fit(tile.image, (SIDE, SIDE)), (x, y))
        for n, (text, colour) in enumerate(tile.lines):
            pen.text((x, y + SIDE + 2 + n * LINE), _fit(text, font), colour, font)
    return sheet


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    while font.getlength(text) > SIDE:
        text = text.removesuffix("…")[:-1] + "…"
    return text
