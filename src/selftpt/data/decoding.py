"""Image files to RGB images, whatever the file holds."""

from __future__ import annotations

import contextlib
import os
import struct
import warnings
from pathlib import Path
from typing import IO

import numpy as np
from PIL import ExifTags, Image

from selftpt.errors import SelfTPTError, SelfTPTWarning

SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif"}
MAX_ASPECT = 200  # a longer strip, resized by its short side for a model, takes gigabytes
UPRIGHT: dict[object, Image.Transpose] = {  # by EXIF's orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(SelfTPTError):
    """A picture that cannot be used; the text says which and why."""


def warn_of(error: ImageError) -> None:
    """What is done about a picture that cannot be used, unless the caller has another wish."""
    warnings.warn(f"left out {error}", SelfTPTWarning, stacklevel=3)


def open_image(source: str | os.PathLike[str] | Image.Image, max_megapixels: float = 80) -> Image.Image:
    """A picture in RGB as a person sees it: turned by its EXIF tag, transparency on white, 16 bits scaled to 8.

    Of an animation, the first frame. A picture of more than `max_megapixels` is refused before it is decoded.
    """
    if isinstance(source, Image.Image):
        return _decode(source, "the picture", max_megapixels)
    name = os.fspath(source)
    try:
        with Path(name).open("rb") as file:
            picture = _identify(file)
            if picture is None:
                raise ImageError(f"{name}: not a picture of a known format")
            return _decode(picture, name, max_megapixels)
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{name}: no such file") from error
    except IsADirectoryError as error:
        raise ImageError(f"{name}: a folder, not a picture") from error
    except PermissionError as error:
        raise ImageError(f"{name}: no permission to read it") from error
    except Exception as error:  # Pillow's plugins raise all kinds on damaged files
        raise ImageError(f"{name}: cannot be read ({_line(error)})") from error


def _identify(file: IO[bytes]) -> Image.Image | None:
    """`Image.open` without its limit on pixels: that is a setting of the whole program, ours is the caller's."""
    prefix = file.read(16)
    for load in (Image.preinit, Image.init):  # the common formats, then all
        load()
        for format in Image.ID:
            factory, accept = Image.OPEN[format]
            with contextlib.suppress(SyntaxError, IndexError, TypeError, struct.error):  # another format, then
                accepted = accept is None or accept(prefix)
                if accepted and not isinstance(accepted, str):  # a text says why not
                    file.seek(0)
                    return factory(file, "")
    return None


def _decode(picture: Image.Image, name: str, max_megapixels: float) -> Image.Image:
    width, height = picture.size
    if width * height > max_megapixels * 1e6:
        raise ImageError(
            f"{name}: {width * height / 1e6:g} megapixels, over the limit of {max_megapixels:g}: "
            "raise max_megapixels or shrink the picture"
        )
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"{name}: {width} x {height} pixels: too narrow a picture to be looked at")
    try:
        picture.load()
    except Exception as error:
        raise ImageError(f"{name}: damaged or cut short ({_line(error)})") from error
    try:
        turn = UPRIGHT.get(picture.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # bad tags do not spoil a picture
        turn = None
    try:
        return _rgb(picture.copy() if turn is None else picture.transpose(turn))
    except Exception as error:
        raise ImageError(f"{name}: cannot be brought to RGB ({_line(error)})") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode.startswith("I"):  # 16 bits a pixel
        values = np.asarray(picture).astype(np.float64)
        values[values == picture.info.get("transparency", -1)] = 65535
        return Image.fromarray((values / 257).clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError("pictures of floating-point numbers are not supported")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")
