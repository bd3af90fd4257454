"""Untrusted images are refused before they are decoded and without large allocations."""

from __future__ import annotations

import io
import os
import socket
import struct
import threading
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, IcoImagePlugin, Image, ImageFile, JpegImagePlugin, WebPImagePlugin, WmfImagePlugin

from selftpt.data.decoding import DECODERS, ImageError, open_image
from tests.helpers import image_files
from tests.helpers.image_files import WHITE, encoded, scene


def refusal(source: Any, **options: Any) -> str:
    """Return the one-line message with which an image is refused."""
    with pytest.raises(ImageError) as caught:
        open_image(source, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def never(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> None:
    """Fail if these functions are called, with an error that is not an `Exception` and so is not caught."""

    def called(*_: Any, **__: Any) -> None:
        raise BaseException("called")

    for owner, name in places:
        monkeypatch.setattr(owner, name, called)


def grey_tiff(width: int, height: int, compression: int, data: bytes, **tags: Any) -> bytes:
    names = {
        "rows": 278,
        "strips": 273,
        "counts": 279,
        "tile_width": 322,
        "tile_height": 323,
        "tiles": 324,
        "sizes": 325,
    }
    fixed = {256: width, 257: height, 258: 8, 259: compression, 262: 1, 277: 1}
    return image_files.tiff(fixed | {names[name]: value for name, value in tags.items()}, data)


# Only regular files


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    path, found = tmp_path / "x.jpg", list[str]()
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: found.append(refusal(path)), daemon=True)
    thread.start()
    thread.join(30)
    if thread.is_alive():  # unblock the thread
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    assert found == [f"{path}: not a regular file"]


def test_folders_sockets_and_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket address must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        assert refusal("socket.jpg") == "socket.jpg: not a regular file"
    Path("zero.jpg").symlink_to("/dev/zero")
    assert refusal("zero.jpg") == "zero.jpg: not a regular file"
    Path("folder.jpg").mkdir()
    assert refusal("folder.jpg") == "folder.jpg: a folder, not an image"


def test_link_to_an_image_is_opened(tmp_path: Path) -> None:
    scene().save(tmp_path / "a.png")
    (tmp_path / "b.jpg").symlink_to(tmp_path / "a.png")
    assert open_image(tmp_path / "b.jpg").size == (64, 32)
    (tmp_path / "c.jpg").symlink_to(tmp_path / "none")
    assert refusal(tmp_path / "c.jpg").endswith("no such file")


def test_name_with_line_breaks_is_shown_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a\nb.jpg", b"text")
    assert refusal(path) == f"{str(path)!r}: not an image of a known format"


# Formats


@pytest.mark.parametrize(
    ("start", "format"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "EPS"),
        (b"\xc5\xd0\xd3\xc6" + bytes(26) + b"%!PS-Adobe-3.0 EPSF-3.0\n", "EPS"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\xd7\xcd\xc6\x9a\0\0" + struct.pack("<4hH", 0, 0, 9, 9, 96) + bytes(40), "WMF"),
        (b"\x01\0\0\0" + bytes(36) + b" EMF", "EMF"),
        (b"SIMPLE  =                    T", "FITS"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"GRIB\0\0\0\1", "GRIB"),
        (b"BUFR\0\0\0\1", "BUFR"),
        (b"8BPS\0\1", "PSD"),
        (b"icns\0\0\0\0", "ICNS"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\0\0\0\x1cftypheic\0\0\0\0", "HEIF"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"Pf\n1 1\n1.0\n\0\0\0\0", "PFM"),
    ],
)
def test_unsupported_formats_are_named_and_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, format: str
) -> None:
    """The file name does not matter. No plugin is called, so no external interpreter is started."""
    never(monkeypatch, (ImageFile.ImageFile, "__init__"), (EpsImagePlugin, "Ghostscript"))
    path = written(tmp_path / "a.jpg", start)
    assert refusal(path) == f"{path}: {format} is not supported: convert it to PNG"


def test_icon_that_contains_a_large_image_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory declares 16 x 16 pixels, the PNG file in it 20,000 x 20,000."""
    large = image_files.png(20_000, 20_000, 1, 0, [])
    entry = struct.pack("<4B2H2I", 16, 16, 0, 0, 1, 32, len(large), 22)
    never(monkeypatch, (IcoImagePlugin.IcoImageFile, "__init__"))
    path = written(tmp_path / "a.png", struct.pack("<3H", 0, 1, 1) + entry + large)
    assert "ICO is not supported" in refusal(path)


def test_only_the_decoder_of_the_content_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other decoders do not try a file with a damaged header."""
    never(monkeypatch, *((DECODERS[format], "__init__") for format in DECODERS.keys() - {"PNG", "JPEG"}))
    path = written(tmp_path / "a.bmp", encoded(scene(), "PNG")[:20] + b"%!PS")
    assert "cannot be read" in refusal(path)


def test_formats_registered_by_other_programs_are_not_used(tmp_path: Path) -> None:
    def factory(*_: Any) -> Image.Image:
        raise BaseException("called")

    Image.register_open("OURS", factory, lambda _: True)
    try:
        assert refusal(written(tmp_path / "a.png", b"OURS")).endswith("not an image of a known format")
    finally:
        Image.ID.remove("OURS")
        del Image.OPEN["OURS"]


@pytest.mark.parametrize(
    ("plugin", "data", "format"),
    [
        (EpsImagePlugin.EpsImageFile, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n\n", "EPS"),
        (
            WmfImagePlugin.WmfStubImageFile,
            b"\xd7\xcd\xc6\x9a\0\0" + struct.pack("<4hH", 0, 0, 9, 9, 96) + bytes(6) + b"\x01\0\x09\0" + bytes(40),
            "WMF",
        ),
    ],
)
def test_unloaded_pil_image_of_another_format_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, plugin: Any, data: bytes, format: str
) -> None:
    image = Image.open(io.BytesIO(data))
    assert type(image) is plugin
    never(monkeypatch, (plugin, "load"))
    assert refusal(image) == f"the image: {format} is not supported: convert it to PNG"


def test_loaded_pil_image_of_another_format_is_used() -> None:
    image = Image.open(io.BytesIO(encoded(scene(), "PCX")))
    assert refusal(image) == "the image: PCX is not supported: convert it to PNG"
    image.load()
    assert open_image(image).size == image.size


def test_stereo_file_gives_its_first_image(tmp_path: Path) -> None:
    data = encoded(scene(), "MPO", save_all=True, append_images=[Image.new("RGB", (64, 32))], quality=95)
    assert Image.open(io.BytesIO(data)).format == "MPO"
    found = open_image(written(tmp_path / "a.jpg", data))
    assert np.array_equal(np.asarray(found), np.asarray(Image.open(io.BytesIO(data))))
    assert open_image(Image.open(io.BytesIO(data))).tobytes() == found.tobytes()


# Files that declare wrong sizes


def test_tiles_larger_than_the_image_are_refused_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile is decoded completely: this one would take 0.6 GB (RGBA: 2.4 GB) for 16 x 16 pixels."""
    data = grey_tiff(16, 16, 8, zlib.compress(bytes(9)), tile_width=30_000, tile_height=20_000, tiles=8, sizes=17)
    path = written(tmp_path / "a.tif", data)
    never(monkeypatch, (Image, "_getdecoder"))
    assert "TIFF tiles of 30000 x 20000 pixels are too large" in refusal(path)
    assert "TIFF tiles of 30000 x 20000 pixels are too large" in refusal(Image.open(path))


@pytest.mark.parametrize("side", [16, 256])
def test_tiles_of_usual_sizes_are_decoded(tmp_path: Path, side: int) -> None:
    tile = zlib.compress(bytes([200]) * side * side)
    count = (32 // side or 1) ** 2
    tags = {"tile_width": side, "tile_height": side, "tiles": (8,) * count, "sizes": (len(tile),) * count}
    if count == 1:
        tags |= {"tiles": 8, "sizes": len(tile)}
    found = open_image(written(tmp_path / "a.tif", grey_tiff(32, 32, 8, tile, **tags)))
    assert np.asarray(found).tolist() == [[[200] * 3] * 32] * 32


def test_strips_that_repeat_the_image_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand strips refer to the same data and would be decoded one after the other."""
    rows = {"rows": 15, "strips": (8,) * 1000, "counts": (240,) * 1000}
    path = written(tmp_path / "a.tif", grey_tiff(16, 16, 1, bytes(256), **rows))
    never(monkeypatch, (Image, "_getdecoder"))
    assert "more strips or tiles" in refusal(path)


def test_rare_tiff_compressions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    scene().save(path, compression="lzma")
    assert "TIFF with lzma is not supported: convert it to PNG" in refusal(path)


@pytest.mark.parametrize(
    "data",
    [
        b"VP8X\x0a\0\0\0\x10\0\0\0" + (19_999).to_bytes(3, "little") * 2,
        b"VP8L\x0a\0\0\0\x2f" + (16_383 | 16_383 << 14).to_bytes(4, "little") + bytes(8),
        b"VP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a" + (16_383).to_bytes(2, "little") * 2,
    ],
    ids=["extended", "lossless", "lossy"],
)
def test_large_webp_is_refused_before_its_decoder_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    never(monkeypatch, (WebPImagePlugin.WebPImageFile, "__init__"))
    path = written(tmp_path / "a.webp", b"RIFF" + struct.pack("<I", 4 + len(data)) + b"WEBP" + data)
    assert "megapixels, over the limit of 80" in refusal(path)


def test_gif_frame_larger_than_its_canvas_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has a comment before the frame, and a disposal method for which Pillow allocates on opening."""
    frame = b"," + struct.pack("<4HB", 0, 0, 9_999, 9_999, 0) + b"\x08\x01\0\0;"
    data = b"GIF89a" + struct.pack("<HHBBB", 16, 16, 0x80, 0, 0) + bytes(6) + b"!\xfe\x03abc\0!\xf9\x04\x08\0\0\0\0"
    never(monkeypatch, (DECODERS["GIF"], "__init__"))
    assert "99.98 megapixels" in refusal(written(tmp_path / "a.gif", data + frame))


def test_gif_canvas_is_extended_to_its_first_frame(tmp_path: Path) -> None:
    data = bytearray(encoded(scene().convert("P"), "GIF"))
    data[6:10] = struct.pack("<HH", 8, 8)
    assert open_image(written(tmp_path / "a.gif", bytes(data))).size == (64, 32)


def test_file_too_large_for_any_image_is_not_read(tmp_path: Path) -> None:
    """WebP and AVIF files are read completely; this sparse file has 2 GB."""
    path = written(tmp_path / "a.webp", encoded(scene(), "WEBP"))
    os.truncate(path, 2_000_000_000)
    assert "a file of 2000 MB, too large for an image of 80 megapixels" in refusal(path)


def test_progressive_jpeg_with_very_many_scans_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(image_files.noise(0), "JPEG", progressive=True)
    start = data.index(b"\xff\xda")
    scan = data[start : data.index(b"\xff", start + 2)]
    many = written(tmp_path / "a.jpg", data[:-2] + scan * 10_000 + data[-2:])
    assert open_image(written(tmp_path / "b.jpg", data), max_megapixels=0.01).size == (40, 40)
    never(monkeypatch, (JpegImagePlugin.JpegImageFile, "load_read"))
    assert "scans takes too long to decode" in refusal(many, max_megapixels=0.01)


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
def test_compressed_texts_and_profiles_take_little_memory(tmp_path: Path, kind: bytes) -> None:
    """They expand from 0.1 MB to 100 MB."""
    bomb = zlib.compressobj(9)
    packed = b"".join(bomb.compress(bytes(1_000_000)) for _ in range(100)) + bomb.flush()
    path = written(tmp_path / "a.png", image_files.png(1, 1, 8, 0, [b"\0"], [(kind, b"name\0\0" + packed)]))
    tracemalloc.start()
    try:
        refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("format", ["TIFF", "PNG", "GIF", "JPEG", "WEBP"])
def test_pillows_global_limit_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1100)  # Pillow refuses more than twice as many
    path = written(tmp_path / "a", encoded(scene(64, 32), format))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_image(path).size == (64, 32)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert "megapixels" in refusal(path, max_megapixels=1e-3)


# 16 bits


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I"])
def test_every_16_bit_value_is_rounded_to_the_nearest(mode: str) -> None:
    values = np.arange(65536).reshape(256, 256)
    kind = {"I;16": "<u2", "I;16L": "<u2", "I;16B": ">u2", "I": "<i4"}[mode]
    image = Image.frombytes(mode, (256, 256), values.astype(kind).tobytes())
    expected = (values / 257).round().astype(np.uint8)
    assert np.array_equal(np.asarray(open_image(image)), expected[..., None].repeat(3, 2))


def test_values_above_16_bits_are_clipped() -> None:
    image = Image.fromarray(np.array([[-5, 70_000, 2**31 - 1, -(2**31)]], np.int32))
    assert np.asarray(open_image(image))[0, :, 0].tolist() == [0, 255, 255, 0]


def test_16_bit_images_take_no_large_arrays() -> None:
    """Only Pillow's images of 2, 4, 1 and 4 bytes per pixel are allocated."""
    image = Image.new("I;16", (2000, 2000))
    tracemalloc.start()
    try:
        open_image(image)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


# Arrays and tensors


def test_arrays_and_tensors_are_opened() -> None:
    pixels = np.asarray(image_files.noise(0, 30, 20)).copy()
    for source in (pixels, torch.from_numpy(pixels).permute(2, 0, 1), pixels[::1, ::1][:, :, :]):
        found = open_image(source)
        assert found.mode == "RGB"
        assert np.array_equal(np.asarray(found), pixels)
    assert np.array_equal(np.asarray(open_image(pixels[::2, ::-1])), pixels[::2, ::-1])
    grey = pixels[..., 0].copy()
    assert np.array_equal(np.asarray(open_image(grey)), grey[..., None].repeat(3, 2))
    clear = np.zeros((4, 5, 4), np.uint8)
    assert {tuple(pixel) for row in np.asarray(open_image(clear)).tolist() for pixel in row} == {WHITE}


def test_opened_array_is_a_copy() -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    found = open_image(pixels)
    pixels[:] = 255
    assert not np.asarray(found).any()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (np.zeros((4, 4, 3)), "the array: float64 [4, 4, 3]: an image is uint8 [H, W], [H, W, 3] or [H, W, 4]"),
        (np.zeros((3, 8, 8), np.uint8), "the array: uint8 [3, 8, 8]: an image is"),
        (np.zeros(4, np.uint8), "the array: uint8 [4]: an image is"),
        (np.zeros((0, 4, 3), np.uint8), "the array: 4 x 0 pixels"),
        (np.zeros((2000, 4, 3), np.uint8), "the array: 4 x 2000 pixels"),
        (np.zeros((100, 100), np.uint8), "the array: 0.01 megapixels, over the limit of 0.001"),
        (torch.zeros(3, 4, 4), "the tensor: float32 [3, 4, 4]: an image is uint8 [3, H, W]"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), "the tensor: uint8 [4, 4, 3]: an image is"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "the tensor: uint8 [2, 3, 4, 4]: an image is"),
        (b"a.jpg", "it must be a path, a PIL image, an array [H, W, 3] or a tensor [3, H, W], not bytes"),
        (None, "not NoneType"),
        (7, "not int"),
    ],
)
def test_input_that_is_not_an_image_is_named(source: Any, text: str) -> None:
    assert text in refusal(source, max_megapixels=0.001 if getattr(source, "shape", None) == (100, 100) else 80)


# Orientation


def test_orientation_in_xmp_is_applied(tmp_path: Path) -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    assert open_image(written(tmp_path / "a.jpg", encoded(scene(), "JPEG", xmp=xmp))).size == (32, 64)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("endian", ["<", ">"])
def test_orientation_is_applied_in_both_byte_orders(tmp_path: Path, format: str, endian: str) -> None:
    exif = Image.Exif()
    exif.endian = endian
    exif[0x010F], exif[0x0112] = "Camera of some maker", 6
    path = written(tmp_path / "a", encoded(scene(), format, exif=exif.tobytes()))
    assert open_image(path).size == (32, 64)
    assert open_image(Image.open(path)).size == (32, 64)
