"""Decoding image files, PIL images, arrays and tensors to RGB images, with limits for untrusted files."""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import sys
import warnings
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
from PIL import (
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from selftpt.errors import SelfTPTError, SelfTPTWarning

if TYPE_CHECKING:  # files are listed without importing torch
    import torch

ImageInput: TypeAlias = "str | os.PathLike[str] | Image.Image | np.ndarray[Any, Any] | torch.Tensor | DatasetImage"

SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif"),
}
MAX_ASPECT = 200  # a longer strip would take gigabytes when its short side is resized for a model
BYTES_PER_PIXEL = 8  # size limit of a file: uncompressed 16-bit RGBA
BYTES_PER_PIXEL_IN_MEMORY = 3  # the same for formats whose decoders read the whole file into memory
MAX_PASSES = 100  # limit of scans times pixels of a progressive JPEG, in units of max_megapixels
TIFF_COMPRESSIONS = {1, 2, 3, 4, 5, 7, 8, 32773, 32946, 50000}  # none, fax, LZW, JPEG, Deflate, PackBits, Zstandard
TIFF_TILE = 4096 * 4096  # pixels of a tile that is allowed in every image, however small
TRANSPOSE: dict[int, Image.Transpose] = {  # by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class _JpegFile(JpegImagePlugin.JpegImageFile):
    def _read_dpi_from_exif(self) -> None:
        """Leave the EXIF data unread: damaged data would only give warnings."""


SIGNATURES = [  # of the supported formats; an MPO file starts with its first JPEG image
    (rb"\xff\xd8\xff", "JPEG"),
    (rb"\x89PNG\r\n\x1a\n", "PNG"),
    (rb"GIF8[79]a", "GIF"),
    (rb"BM", "BMP"),
    (rb"II[*+]\0|MM\0[*+]", "TIFF"),
    (rb"P[1-6]\s", "PPM"),
    (rb"RIFF....WEBP", "WEBP"),
    (rb"....ftypavi[fs]", "AVIF"),
]
UNSUPPORTED = [  # formats that the error message names
    (rb"%!PS|\xc5\xd0\xd3\xc6", "EPS"),
    (rb"%PDF", "PDF"),
    (rb"\xd7\xcd\xc6\x9a|\x01\0\x09\0", "WMF"),
    (rb"\x01\0\0\0.{36} EMF", "EMF"),
    (rb"SIMPLE  =", "FITS"),
    (rb"\x89HDF", "HDF5"),
    (rb"GRIB", "GRIB"),
    (rb"BUFR", "BUFR"),
    (rb"8BPS", "PSD"),
    (rb"\0\0\x01\0", "ICO"),
    (rb"\0\0\x02\0", "CUR"),
    (rb"icns", "ICNS"),
    (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "JPEG 2000"),
    (rb"\0\0\0\x0cJXL |\xff\x0a", "JPEG XL"),
    (rb"....ftyp(?:hei|hev|mif1|msf1)", "HEIF"),
    (rb"\s*(?:<\?xml[^>]*>\s*)?<svg", "SVG"),
    (rb"DDS ", "DDS"),
    (rb"qoif", "QOI"),
    (rb"\x01\xda", "SGI"),
    (rb"/\* XPM", "XPM"),
    (rb"P[Ff]\s", "PFM"),
    (rb"P7\s", "PAM"),
]
DECODERS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": _JpegFile,
    "PNG": PngImagePlugin.PngImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
}
if WebPImagePlugin.SUPPORTED:
    DECODERS["WEBP"] = WebPImagePlugin.WebPImageFile
try:
    from PIL import AvifImagePlugin
except ImportError:  # Pillow before 11.3
    pass
else:
    if AvifImagePlugin.SUPPORTED:
        DECODERS["AVIF"] = AvifImagePlugin.AvifImageFile


@dataclass(frozen=True, eq=False)
class DatasetImage:
    """A reference to an image of a dataset object. The image is read when it is needed.

    Attributes:
        dataset: A dataset of torchvision or Hugging Face.
        index: The position of the item.
        key: The key of the image in the item: 0 in a tuple, or the name of a column.
    """

    dataset: Any
    index: int
    key: int | str

    def load(self) -> ImageInput:
        """Read the image.

        Raises:
            ImageError: The dataset cannot read it, or it is not an image.
        """
        try:
            image = self.dataset[self.index][self.key]
        except Exception as error:  # a dataset may raise anything
            raise ImageError(f"image {self.index} of the dataset: cannot be read ({_line(error)})") from error
        if not isinstance(image, Image.Image | np.ndarray | str | os.PathLike) and not is_tensor(image):
            raise ImageError(f"image {self.index} of the dataset: it is of type {type(image).__name__}, not an image")
        return image


class ImageError(SelfTPTError):
    """An image cannot be used. The message names the image and the reason."""


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def warn_of(error: ImageError) -> None:
    """Warn of an image that is left out. This is the default handler of image errors."""
    warnings.warn(f"skipped {error}", SelfTPTWarning, stacklevel=3)


def open_image(source: ImageInput, max_megapixels: float = 80) -> Image.Image:
    """Open an image as RGB, the way an image viewer shows it.

    The EXIF orientation is applied, transparent areas become white, 16-bit images are scaled to 8 bits, and the first
    frame of an animation is used. The format of a file is detected from its content. Only JPEG, PNG, WebP, GIF, BMP,
    TIFF, PPM, PGM, PBM and AVIF files reach a decoder. Thread-safe. Pillow's global settings are neither changed nor
    relied on.

    Args:
        source: The path of a regular file, a PIL image, a uint8 array [H, W], [H, W, 3] or [H, W, 4], or a uint8 tensor
            [3, H, W]. A PIL image is loaded, but not changed.
        max_megapixels: The maximum size. Larger images are refused before they are decoded.

    Returns:
        A new image of mode RGB.

    Raises:
        ImageError: The image cannot be used. The message is one line with the reason.
    """
    if isinstance(source, DatasetImage):
        source = source.load()
    if isinstance(source, Image.Image):
        return _decode(source, "the image", max_megapixels)
    if isinstance(source, np.ndarray):
        return _decode(_from_array(source), "the array", max_megapixels)
    if is_tensor(source):
        return _decode(_from_tensor(source), "the tensor", max_megapixels)
    if not isinstance(source, str | os.PathLike):
        raise ImageError(
            f"an input of type {type(source).__name__}: it must be a path, a PIL image, an array [H, W, 3] or a tensor "
            f"[3, H, W], not {type(source).__name__}"
        )
    path = os.fsdecode(source)
    name = ascii(path) if re.search(r"[\0-\x1f\x7f-\x9f\u2028\u2029]", path) else path  # keeps messages on one line
    try:
        with _open_regular(path, name) as file:
            return _decode(_identify(file, name, max_megapixels), name, max_megapixels)
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{name}: no such file") from error
    except PermissionError as error:
        raise ImageError(f"{name}: no permission to read it") from error
    except Exception as error:  # for damaged files, Pillow raises many types of exceptions
        raise ImageError(f"{name}: cannot be read ({_line(error)})") from error


def _from_array(array: np.ndarray[Any, Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise ImageError(
            f"the array: {array.dtype} {list(array.shape)}: an image is uint8 [H, W], [H, W, 3] or [H, W, 4]"
        )
    if not array.size:
        return Image.new("RGB", (array.shape[1], array.shape[0]))
    return Image.fromarray(array)


def _from_tensor(tensor: torch.Tensor) -> Image.Image:
    if str(tensor.dtype) != "torch.uint8" or tensor.ndim != 3 or len(tensor) != 3:
        raise ImageError(
            f"the tensor: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}: an image is uint8 [3, H, W]"
        )
    return _from_array(np.ascontiguousarray(tensor.permute(1, 2, 0).cpu().numpy()))


def _open_regular(path: str, name: str) -> IO[bytes]:
    """Open a regular file. Folders, pipes, sockets and devices are refused without blocking."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    try:
        file = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise ImageError(f"{name}: not a regular file") from error
        raise
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(file, "rb")
    os.close(file)
    raise ImageError(f"{name}: a folder, not an image" if stat.S_ISDIR(mode) else f"{name}: not a regular file")


def _identify(file: IO[bytes], name: str, max_megapixels: float) -> ImageFile.ImageFile:
    """Detect the format from the content, and read the header with the decoder of that format only."""
    start = file.read(512)
    matches = (format for pattern, format in SIGNATURES + UNSUPPORTED if re.match(pattern, start, re.DOTALL))
    format = next(matches, None)
    if format is None:
        raise ImageError(f"{name}: not an image of a known format")
    if format not in DECODERS:
        raise ImageError(f"{name}: {format} is not supported: convert it to PNG")
    in_memory = format in ("WEBP", "AVIF")
    size, limit = os.fstat(file.fileno()).st_size, (BYTES_PER_PIXEL, BYTES_PER_PIXEL_IN_MEMORY)[in_memory]
    if size > max(max_megapixels, 1) * 1e6 * limit:
        raise ImageError(
            f"{name}: a file of {size / 1e6:.0f} MB, too large for an image of {max_megapixels:g} megapixels: "
            "raise max_megapixels or shrink the image"
        )
    # These two decoders allocate memory for the size in the file before the size can be checked.
    if format == "WEBP":
        _check_size(_webp_size(start), name, max_megapixels)
    elif format == "GIF":
        _check_size(_gif_size(file), name, max_megapixels)
    file.seek(0)
    return DECODERS[format](file, "")


def _webp_size(start: bytes) -> tuple[int, int]:
    chunk, data = start[12:16], start[20:30].ljust(10, b"\0")
    if chunk == b"VP8X":
        return int.from_bytes(data[4:7], "little") + 1, int.from_bytes(data[7:10], "little") + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(data[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(data[6:8], "little") & 0x3FFF, int.from_bytes(data[8:10], "little") & 0x3FFF


def _gif_size(file: IO[bytes]) -> tuple[int, int]:
    """Return the size of a GIF image, enlarged to contain its first frame as in Pillow."""

    def colours(flags: int) -> int:
        return 6 << (flags & 7) if flags & 128 else 0

    file.seek(6)
    width, height, flags = struct.unpack("<HHB2x", file.read(7))
    file.seek(colours(flags), os.SEEK_CUR)
    while (kind := file.read(1)) and kind != b";":
        if kind == b",":
            x, y, w, h = struct.unpack("<HHHH", file.read(8))
            return max(width, x + w), max(height, y + h)
        if kind == b"!":
            file.seek(1, os.SEEK_CUR)
            while length := ord(file.read(1) or b"\0"):
                file.seek(length, os.SEEK_CUR)
    raise EOFError("no image in the GIF file")


def _check_size(size: tuple[int, int], name: str, max_megapixels: float) -> None:
    width, height = size
    if width * height > max_megapixels * 1e6:
        raise ImageError(
            f"{name}: {width * height / 1e6:g} megapixels, over the limit of {max_megapixels:g}: "
            "raise max_megapixels or shrink the image"
        )
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"{name}: {width} x {height} pixels: the image is too narrow")


def _check_undecoded(image: ImageFile.ImageFile, name: str, max_megapixels: float) -> None:
    """Refuse an image that would take more memory or time to decode than its size suggests."""
    pixels = image.width * image.height
    if image.format not in {*DECODERS, "MPO"}:
        raise ImageError(f"{name}: {image.format} is not supported: convert it to PNG")
    areas = [box or (0, 0, *image.size) for _, box, *_ in image.tile]
    if sum((right - left) * (lower - upper) for left, upper, right, lower in areas) > 8 * pixels:
        raise ImageError(f"{name}: has more strips or tiles than an image of its size")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tags = image.tag_v2
        if tags.get(TiffImagePlugin.COMPRESSION, 1) not in TIFF_COMPRESSIONS:
            raise ImageError(f"{name}: TIFF with {image.info['compression']} is not supported: convert it to PNG")
        tile = tags.get(TiffImagePlugin.TILEWIDTH, 0), tags.get(TiffImagePlugin.TILELENGTH, 0)
        if not all(isinstance(side, int) for side in tile) or tile[0] * tile[1] > max(pixels, TIFF_TILE):
            raise ImageError(f"{name}: TIFF tiles of {tile[0]} x {tile[1]} pixels are too large")
    if image.info.get("progressive") and image.fp is not None:
        scans = _count(image.fp, b"\xff\xda")
        if scans * pixels > MAX_PASSES * max_megapixels * 1e6:
            raise ImageError(f"{name}: a progressive JPEG file of {scans} scans takes too long to decode")


def _count(file: IO[bytes], marker: bytes) -> int:
    """Count a two-byte marker in a file. The position in the file is restored."""
    position, found, last = file.tell(), 0, b""
    file.seek(0)
    while block := file.read(1 << 20):
        found += (last + block).count(marker)
        last = block[-1:]
    file.seek(position)
    return found


def _decode(image: Image.Image, name: str, max_megapixels: float) -> Image.Image:
    _check_size(image.size, name, max_megapixels)
    try:
        if isinstance(image, ImageFile.ImageFile) and (image.tile or image._im is None):
            _check_undecoded(image, name, max_megapixels)
            if isinstance(image, TiffImagePlugin.TiffImageFile) and image._im is None:
                image.im = Image.new(image.mode, image._tile_size).im  # avoids Pillow's global size limit
        image.load()
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"{name}: damaged or cut short ({_line(error)})") from error
    try:
        turn = TRANSPOSE.get(_orientation(image))
        return _rgb(image.copy() if turn is None else image.transpose(turn))
    except Exception as error:
        raise ImageError(f"{name}: cannot be converted to RGB ({_line(error)})") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _orientation(image: Image.Image) -> int:
    """Return the orientation in the EXIF or else XMP data; 1 if there is none.

    Pillow's `getexif` is not used, because it warns of every other damaged tag.
    """
    if image.format == "TIFF":
        return 1  # applied by `load`
    exif = image.info.get("exif", b"")
    if not exif and "Raw profile type exif" in image.info:
        try:
            exif = bytes.fromhex("".join(image.info["Raw profile type exif"].split("\n")[3:]))
        except ValueError:
            exif = b""
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order:
        try:
            (start,) = struct.unpack_from(f"{order}I", exif, 4)
            (count,) = struct.unpack_from(f"{order}H", exif, start)
            for entry in range(start + 2, start + 2 + 12 * count, 12):
                tag, kind = struct.unpack_from(f"{order}HH", exif, entry)
                if tag == ExifTags.Base.Orientation and kind in (1, 3, 4):
                    return int(struct.unpack_from(order + " B HI"[kind], exif, entry + 8)[0])
        except struct.error:
            return 1
    xmp = image.info.get("xmp", b"")
    found = re.search(rb'tiff:Orientation(?:="|>)([0-9])', xmp) if isinstance(xmp, bytes) else None
    return int(found[1]) if found else 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16 bits per pixel, in 16 or 32
        table = np.rint(np.arange(65536) / 257).astype(np.uint8)
        if "transparency" in image.info:
            table[image.info["transparency"]] = 255
        return image.convert("I").point(table.tolist(), "L").convert("RGB")
    if image.mode == "F":
        raise ValueError("images of floating-point numbers are not supported")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
