"""Contact sheets: images with captions in a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont, ImageOps

from selftpt.errors import SelfTPTError

SIDE, GAP = 240, 12  # pixels: side of an image, gap between tiles
LINE_HEIGHT, TITLE_HEIGHT = 20, 24  # pixels


class Tile(NamedTuple):
    """An image with a caption.

    Attributes:
        image: An RGB image; it is cropped to a square.
        lines: Lines of the caption, as pairs of text and colour.
    """

    image: Image.Image
    lines: Sequence[tuple[str, str]]


def contact_sheet(title: str, tiles: Sequence[Tile], columns: int = 4) -> Image.Image:
    """Draw tiles in rows below a title.

    Args:
        title: The title of the sheet. It is shortened to the width of the sheet.
        tiles: The images with their captions. Lines are shortened to the width of an image.
        columns: Number of tiles in each row.

    Returns:
        The sheet, an RGB image.

    Raises:
        SelfTPTError: There are no tiles.
    """
    if not tiles:
        raise SelfTPTError("a contact sheet needs at least one tile")
    font, title_font = ImageFont.load_default(14), ImageFont.load_default(20)
    step_x, step_y = SIDE + GAP, SIDE + GAP + LINE_HEIGHT * max(len(tile.lines) for tile in tiles)
    top = 2 * GAP + TITLE_HEIGHT
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (columns * step_x + GAP, top + rows * step_y), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, GAP), _shorten(title, title_font, sheet.width - 2 * GAP), "black", title_font)
    for i, tile in enumerate(tiles):
        x, y = GAP + i % columns * step_x, top + i // columns * step_y
        sheet.paste(ImageOps.fit(tile.image, (SIDE, SIDE)), (x, y))
        for n, (text, colour) in enumerate(tile.lines):
            draw.text((x, y + SIDE + 2 + n * LINE_HEIGHT), _shorten(text, font, SIDE), colour, font)
    return sheet


def _shorten(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Shorten a text with an ellipsis to a width in pixels."""
    while font.getlength(text) > width:
        text = text.removesuffix("…")[:-1] + "…"
    return text
