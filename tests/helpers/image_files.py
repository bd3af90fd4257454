"""Images and image files for tests."""

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
# By EXIF orientation: the sides of the displayed image at which the first stored row and the first stored column are.
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
    """Return an image of four quarters: red and green above, blue and yellow below."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2], pixels[: height // 2, width // 2 :] = RED, GREEN
    pixels[height // 2 :, : width // 2], pixels[height // 2 :, width // 2 :] = BLUE, YELLOW
    return Image.fromarray(pixels)


def quarters(image: Image.Image) -> list[tuple[int, ...]]:
    """Return the colours at the centres of the four quarters of an RGB image, row by row."""
    assert image.mode == "RGB"
    width, height = image.size
    places = [(x, y) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    return [image.getpixel(place) for place in places]


def noise(seed: int, width: int = 40, height: int = 40) -> Image.Image:
    """Return a random image of coloured blocks and noise, different for every seed."""
    rng = np.random.default_rng(seed)
    blocks = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize(
        (width, height), Image.Resampling.NEAREST
    )
    return Image.fromarray(np.asarray(blocks) // 2 + rng.integers(0, 128, (height, width, 3), np.uint8))


def noises(folder: Path, count: int, suffix: str = "png") -> list[Path]:
    """Write `count` random images of several sizes to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{seed:02d}.{suffix}" for seed in range(count)]
    for seed, path in enumerate(paths):
        noise(seed, 40 + 7 * seed, 60 - 3 * seed).save(path)
    return paths


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """Return an image as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def turned(upright: Image.Image, orientation: int) -> tuple[Image.Image, Image.Exif]:
    """Return an image as a camera stores it with an EXIF orientation, and the EXIF data."""
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
    """Return a PNG file with the given raw rows; `colour` is 0 for grey, 2 for RGB, 3 for a palette."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(b"\0" + row) for row in rows) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def tiff(tags: dict[int, int | tuple[int, ...]], data: bytes) -> bytes:
    """Return a little-endian TIFF file: header, data at offset 8, then one directory of LONG tags."""
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
    """Return a black PNG image with one bit per pixel: a large image in a small file."""
    return png(width, height, 1, 0, (bytes((width + 7) // 8) for _ in range(height)))


def ycck(image: Image.Image) -> bytes:
    """Return a JPEG file as Photoshop writes it: inverted CMYK whose first three channels are stored as YCbCr."""
    cyan_magenta_yellow = Image.merge("RGB", image.convert("CMYK").split()[:3])
    stored = [*cyan_magenta_yellow.convert("YCbCr").split(), Image.new("L", image.size, 255)]
    # Pillow inverts CMYK when it writes it and sets the transform flag in the Adobe marker to 0.
    plain = Image.merge("CMYK", [band.point(lambda value: 255 - value) for band in stored])
    data = bytearray(encoded(plain, "JPEG", quality=95))
    marker = data.index(b"Adobe")
    assert data[marker + 11] == 0
    data[marker + 11] = 2
    return bytes(data)
