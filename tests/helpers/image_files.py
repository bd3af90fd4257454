"""Images for tests, made on the spot."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RED, GREEN, BLUE, YELLOW, WHITE, BLACK = (
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (255, 255, 0),
    (255, 255, 255),
    (0, 0, 0),
)
# The visual side of the first stored row, and of the first stored column, by EXIF's definition of its orientations.
SIDES = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def scene(width: int = 64, height: int = 32) -> Image.Image:
    """Four quarters: red and green above, blue and yellow below."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2], pixels[: height // 2, width // 2 :] = RED, GREEN
    pixels[height // 2 :, : width // 2], pixels[height // 2 :, width // 2 :] = BLUE, YELLOW
    return Image.fromarray(pixels)


def quarters(image: Image.Image) -> list[tuple[int, ...]]:
    """The colours in the middle of the four quarters of an RGB image, row by row."""
    assert image.mode == "RGB"
    width, height = image.size
    places = [(x, y) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    return [image.getpixel(place) for place in places]


def noise(seed: int, width: int = 40, height: int = 40) -> Image.Image:
    """A image unlike that of any other seed: coloured blocks and grain."""
    rng = np.random.default_rng(seed)
    blocks = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize(
        (width, height), Image.Resampling.NEAREST
    )
    return Image.fromarray(np.asarray(blocks) // 2 + rng.integers(0, 128, (height, width, 3), np.uint8))


def noises(folder: Path, count: int, suffix: str = "png") -> list[Path]:
    """Files with such images, of several sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{seed:02d}.{suffix}" for seed in range(count)]
    for seed, path in enumerate(paths):
        noise(seed, 40 + 7 * seed, 60 - 3 * seed).save(path)
    return paths


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """The bytes of a image file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def turned(upright: Image.Image, orientation: int) -> tuple[Image.Image, Image.Exif]:
    """How a camera stores a image with an orientation, and the tag that says so."""
    rows, columns = SIDES[orientation]
    pixels = np.asarray(upright)
    if rows in ("left", "right"):
        pixels = pixels.transpose(1, 0, 2)
    if rows in ("right", "bottom"):
        pixels = pixels[::-1]
    if columns in ("right", "bottom"):
        pixels = pixels[:, ::-1]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return Image.fromarray(np.ascontiguousarray(pixels)), exif


def png(
    width: int, height: int, depth: int, colour: int, rows: Iterable[bytes], chunks: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """A PNG file from its raw rows; colour is 0 for grey, 2 for RGB, 3 for a palette."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(b"\0" + row) for row in rows) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def tiff(tags: dict[int, int | tuple[int, ...]], data: bytes) -> bytes:
    """A little-endian TIFF file: header, data at 8, then one directory of LONG tags."""
    start = 8 + len(data) + len(data) % 2
    extra, entries = b"", b""
    after = start + 2 + 12 * len(tags) + 4
    for tag, value in sorted(tags.items()):
        values = value if isinstance(value, tuple) else (value,)
        packed = struct.pack(f"<{len(values)}I", *values)
        if len(values) > 1:
            packed, extra = struct.pack("<I", after + len(extra)), extra + packed
        entries += struct.pack("<HHI", tag, 4, len(values)) + packed
    header = b"II*\0" + struct.pack("<I", start) + data + bytes(len(data) % 2)
    return header + struct.pack("<H", len(tags)) + entries + bytes(4) + extra


def black_png(width: int, height: int) -> bytes:
    """A large image in a small file: a bit a pixel, all black."""
    return png(width, height, 1, 0, (bytes((width + 7) // 8) for _ in range(height)))


def ycck(image: Image.Image) -> bytes:
    """A JPEG as Photoshop writes it: CMYK, inverted, and of that the first three in YCbCr."""
    cyan_magenta_yellow = Image.merge("RGB", image.convert("CMYK").split()[:3])
    stored = [*cyan_magenta_yellow.convert("YCbCr").split(), Image.new("L", image.size, 255)]
    # Pillow inverts what it writes as CMYK, and marks it as not transformed.
    plain = Image.merge("CMYK", [band.point(lambda value: 255 - value) for band in stored])
    data = bytearray(encoded(plain, "JPEG", quality=95))
    mark = data.index(b"Adobe")
    assert data[mark + 11] == 0
    data[mark + 11] = 2
    return bytes(data)
