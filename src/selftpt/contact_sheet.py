"""Contact sheets: images with captions in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont, ImageOps

SIDE, LINE, GAP = 240, 20, 12  # pixels: side of an image, height of a line of text, gap between tiles


class Tile(NamedTuple):
    """An RGB image and its caption: pairs of a line of text and its colour."""

    image: Image.Image
    lines: Sequence[tuple[str, str]]


def contact_sheet(title: str, tiles: Sequence[Tile], columns: int = 4) -> Image.Image:
    """Draw tiles in rows below a title.

    Args:
        title: The title of the sheet.
        tiles: The images with their captions.
        columns: Number of tiles in each row.

    Returns:
        The sheet, an RGB image.
    """
    font, title_font = ImageFont.load_default(14), ImageFont.load_default(20)
    width, height = SIDE + GAP, SIDE + GAP + LINE * max(len(tile.lines) for tile in tiles)
    top = 2 * GAP + 24
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * width + GAP, top + rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, GAP), title, "black", title_font)
    for i, tile in enumerate(tiles):
        x, y = GAP + i % columns * width, top + i // columns * height
        sheet.paste(ImageOps.fit(tile.image, (SIDE, SIDE)), (x, y))
        for n, (text, colour) in enumerate(tile.lines):
            draw.text((x, y + SIDE + 2 + n * LINE), _shorten(text, font), colour, font)
    return sheet


def _shorten(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Shorten a text to the width of a tile."""
    while font.getlength(text) > SIDE:
        text = text.removesuffix("…")[:-1] + "…"
    return text
