"""Finding, decoding, preprocessing and cropping images, and sources of labelled images."""

from __future__ import annotations

import glob
import io
import itertools
import math
import os
import random
import struct
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image, JpegImagePlugin, features
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as tv

from selftpt.data.decoding import ImageError, open_image, warn_of
from selftpt.data.sources import Source, find_images, images_in
from selftpt.data.threads import in_threads
from selftpt.data.transforms import Preprocess, random_box
from selftpt.errors import SelfTPTError, SelfTPTWarning
from tests.helpers import image_files
from tests.helpers.image_files import BLACK, BLUE, GREEN, RED, WHITE, YELLOW, encoded, scene

QUARTERS = [RED, GREEN, BLUE, YELLOW]
GREYS = [(76,) * 3, (150,) * 3, (29,) * 3, (226,) * 3]  # luma of QUARTERS


def opened(path: Path, data: bytes, **options: Any) -> Image.Image:
    path.write_bytes(data)
    image = open_image(path, **options)
    assert image.mode == "RGB"
    return image


def refused(source: Any, *words: str, **options: Any) -> str:
    """Check that an image is refused with one line that names the file, and return the line."""
    with pytest.raises(ImageError) as caught:
        open_image(source, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("the image: " if isinstance(source, Image.Image) else f"{os.fspath(source)}: ")
    for word in words:
        assert word in text
    return text


# Supported files


@pytest.mark.parametrize(
    ("format", "mode", "options", "expected"),
    [
        ("JPEG", "RGB", {"quality": 95}, QUARTERS),
        ("JPEG", "RGB", {"quality": 95, "progressive": True}, QUARTERS),
        ("JPEG", "CMYK", {"quality": 95}, QUARTERS),
        ("JPEG", "L", {"quality": 95}, GREYS),
        ("PNG", "RGB", {}, QUARTERS),
        ("PNG", "P", {}, QUARTERS),
        ("PNG", "L", {}, GREYS),
        ("PNG", "RGBA", {}, QUARTERS),
        ("PNG", "LA", {}, GREYS),
        ("GIF", "P", {}, QUARTERS),
        ("BMP", "RGB", {}, QUARTERS),
        ("PPM", "RGB", {}, QUARTERS),
        ("TIFF", "RGB", {}, QUARTERS),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}, QUARTERS),
        ("TIFF", "CMYK", {}, QUARTERS),
        pytest.param(
            "WEBP",
            "RGB",
            {"lossless": True},
            QUARTERS,
            marks=pytest.mark.skipif(not features.check("webp"), reason="this Pillow has no WebP"),
        ),
        pytest.param(
            "AVIF",
            "RGB",
            {"quality": 100},
            QUARTERS,
            marks=pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF"),
        ),
    ],
)
def test_every_format_and_mode_is_decoded_to_rgb(
    tmp_path: Path, format: str, mode: str, options: dict[str, Any], expected: list[Any]
) -> None:
    """The content determines the format, not the file name."""
    found = opened(tmp_path / "called.jpg", encoded(scene().convert(mode), format, **options))
    assert found.size == (64, 32)
    lossy = format in ("JPEG", "AVIF")
    assert np.abs(np.array(image_files.quarters(found)) - expected).max() <= (4 if lossy else 0)


def test_adobe_cmyk_is_not_inverted(tmp_path: Path) -> None:
    """Adobe stores inverted CMYK, plain or as YCCK."""
    plain = encoded(scene().convert("CMYK"), "JPEG", quality=95)
    assert b"Adobe" in plain
    for data in (plain, image_files.ycck(scene())):
        found = image_files.quarters(opened(tmp_path / "a.jpg", data))
        assert np.abs(np.array(found) - QUARTERS).max() <= 4


SIXTEEN = np.array([[0, 257 * 10, 257 * 200 + 200, 65535]], np.uint16)
EIGHT = [(v, v, v) for v in (0, 10, 201, 255)]


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(SIXTEEN), "PNG"),
        encoded(Image.fromarray(SIXTEEN), "TIFF"),
        encoded(Image.fromarray(SIXTEEN), "TIFF", compression="tiff_deflate"),
        encoded(Image.frombytes("I;16B", (4, 1), SIXTEEN.astype(">u2").tobytes()), "TIFF"),
        b"P5 4 1 65535\n" + SIXTEEN.astype(">u2").tobytes(),
        image_files.png(4, 1, 16, 2, [SIXTEEN.repeat(3, axis=1).astype(">u2").tobytes()]),
    ],
    ids=["png", "tiff", "tiff-deflate", "tiff-big-endian", "pgm", "png-rgb"],
)
def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path, data: bytes) -> None:
    found = opened(tmp_path / "a.png", data)
    assert [*map(tuple, np.asarray(found)[0].tolist())] == EIGHT


def test_one_bit_image_becomes_black_and_white(tmp_path: Path) -> None:
    checks = Image.new("1", (2, 1))
    checks.putpixel((1, 0), 1)
    assert np.asarray(opened(tmp_path / "a.png", encoded(checks, "PNG")))[0].tolist() == [[0] * 3, [255] * 3]


def left_half_transparent(mode: str, alpha: int = 0) -> Image.Image:
    """Return the scene with the given alpha in its left half."""
    mask = Image.new("L", (64, 32), 255)
    mask.paste(alpha, (0, 0, 32, 32))
    image = scene().convert(mode.rstrip("A"))
    image.putalpha(mask)
    assert image.mode == mode
    return image


def scene_with_palette() -> tuple[Image.Image, int]:
    """Return the scene with a palette, and the palette index of red."""
    indexed = scene().convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    return indexed, indexed.getpixel((1, 1))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encoded(left_half_transparent("RGBA"), "PNG"), [WHITE, GREEN, WHITE, YELLOW]),
        (encoded(left_half_transparent("LA"), "PNG"), [WHITE, GREYS[1], WHITE, GREYS[3]]),
        (encoded(left_half_transparent("RGBA"), "TIFF"), [WHITE, GREEN, WHITE, YELLOW]),
        (encoded(left_half_transparent("RGBA", 51), "PNG"), [(255, 204, 204), GREEN, (204, 204, 255), YELLOW]),
        (encoded(scene(), "PNG", transparency=RED), [WHITE, GREEN, BLUE, YELLOW]),
        (encoded(scene().convert("L"), "PNG", transparency=29), [GREYS[0], GREYS[1], WHITE, GREYS[3]]),
        (encoded(scene_with_palette()[0], "PNG", transparency=scene_with_palette()[1]), [WHITE, GREEN, BLUE, YELLOW]),
        (encoded(scene_with_palette()[0], "GIF", transparency=scene_with_palette()[1]), [WHITE, GREEN, BLUE, YELLOW]),
    ],
    ids=["rgba", "la", "rgba-tiff", "half", "rgb-trns", "grey-trns", "palette", "gif"],
)
def test_transparent_pixels_become_white(tmp_path: Path, data: bytes, expected: list[Any]) -> None:
    assert image_files.quarters(opened(tmp_path / "a.png", data)) == expected


def test_transparent_grey_values_of_1_and_16_bits_become_white(tmp_path: Path) -> None:
    """A PNG file may declare one grey value transparent."""
    deep = image_files.png(2, 1, 16, 0, [struct.pack(">2H", 700, 0)], [(b"tRNS", struct.pack(">H", 700))])
    assert [*map(tuple, np.asarray(opened(tmp_path / "a.png", deep))[0].tolist())] == [WHITE, BLACK]
    flat = image_files.png(8, 1, 1, 0, [b"\xf0"], [(b"tRNS", struct.pack(">H", 0))])
    assert {tuple(pixel) for pixel in np.asarray(opened(tmp_path / "b.png", flat))[0].tolist()} == {WHITE}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_exif_orientation_is_applied_to_every_format(tmp_path: Path, format: str, orientation: int) -> None:
    stored, exif = image_files.turned(scene(), orientation)
    assert stored.size == ((64, 32) if orientation < 5 else (32, 64))
    found = opened(tmp_path / "a", encoded(stored, format, exif=exif, **({"quality": 95} if format == "JPEG" else {})))
    assert found.size == (64, 32)
    assert np.abs(np.array(image_files.quarters(found)) - QUARTERS).max() <= 4


def exif_with(tag: int, kind: int, value: bytes) -> bytes:
    """Return EXIF data with a rotation by 90 degrees and one more tag."""
    entries = sorted([(0x0112, 3, struct.pack(">HH", 6, 0)), (tag, kind, value)])
    body = b"".join(struct.pack(">HHI", tag, kind, 1) + value for tag, kind, value in entries)
    return b"Exif\0\0MM\0*" + struct.pack(">IH", 8, len(entries)) + body + bytes(4)


@pytest.mark.filterwarnings("error")
def test_invalid_exif_tags_are_ignored(tmp_path: Path) -> None:
    """An invalid tag does not prevent the rotation by another tag; invalid EXIF data gives no rotation."""
    stored, _ = image_files.turned(scene(), 6)
    assert opened(tmp_path / "a.jpg", encoded(stored, "JPEG", exif=exif_with(0x0100, 2, bytes(4)))).size == (64, 32)
    for nonsense in (b"Exif\0\0", b"Exif\0\0garbage!", b"Exif\0\0II*\0\xff\xff\xff\xff"):
        assert opened(tmp_path / "b.jpg", encoded(stored, "JPEG", exif=nonsense)).size == (32, 64)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_an_animation_is_used(tmp_path: Path, format: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
    data = encoded(
        frames[0], format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {})
    )
    assert set(image_files.quarters(opened(tmp_path / "a", data))) == {RED}


def test_pil_image_is_opened_like_a_file_and_not_changed() -> None:
    """EXIF orientation and transparency are applied too."""
    stored, exif = image_files.turned(scene(), 6)
    given = Image.open(io.BytesIO(encoded(stored, "PNG", exif=exif)))
    assert image_files.quarters(open_image(given)) == QUARTERS
    assert given.size == (32, 64)
    mine = scene()
    open_image(mine).putpixel((0, 0), WHITE)
    assert mine.getpixel((0, 0)) == RED
    assert image_files.quarters(open_image(left_half_transparent("RGBA"))) == [WHITE, GREEN, WHITE, YELLOW]


# Errors


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "TIFF", "BMP", "WEBP"])
def test_truncated_file_is_refused(tmp_path: Path, format: str, share: float) -> None:
    data = encoded(image_files.noise(0, 100, 80), format)
    path = tmp_path / "cut.jpg"
    path.write_bytes(data[: int(share * len(data))])
    refused(path)


def test_files_that_are_not_images_are_refused(tmp_path: Path) -> None:
    text, empty = tmp_path / "text.jpg", tmp_path / "empty.png"
    text.write_text("It was a dark and stormy night. " * 50)
    empty.touch()
    refused(text, "not an image of a known format")
    refused(empty, "not an image of a known format")
    refused(tmp_path / "none.jpg", "no such file")
    refused(str(tmp_path / "none.jpg"), "no such file")
    refused(tmp_path, "folder")
    refused(text / "inside.jpg", "cannot be read")
    refused(tmp_path / ("x" * 300), "cannot be read")
    with pytest.raises(ImageError, match=r"^'a\\x00b\\nc\.jpg': cannot be read"):
        open_image("a\0b\nc.jpg")


def no_permission(tmp_path: Path) -> Path:
    path = tmp_path / "locked.png"
    scene().save(path)
    path.chmod(0)
    return path


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    refused(no_permission(tmp_path), "no permission")


def test_simulated_permission_error_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: str, *_: Any) -> None:
        raise PermissionError(13, "Permission denied", path)

    path = no_permission(tmp_path)
    monkeypatch.setattr(os, "open", locked)
    refused(path, "no permission")


def test_floating_point_image_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "depth.tif"
    Image.fromarray(np.zeros((4, 4), np.float32)).save(path)
    refused(path, "cannot be converted to RGB", "floating-point")


@pytest.mark.parametrize("error", [RuntimeError("no\nplane"), MemoryError(), struct.error("short"), KeyError(7)])
def test_any_error_of_a_decoder_becomes_an_image_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Decoders raise many kinds of errors on damaged files; none may stop a run over many images."""

    def broken(*_: Any) -> None:
        raise error

    path = tmp_path / "a.jpg"
    scene().save(path)
    with monkeypatch.context() as patch:
        patch.setattr(JpegImagePlugin.JpegImageFile, "load", broken)
        refused(path, "damaged or cut short")
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "_open", broken)
    refused(path)


SAMPLES = [
    encoded(image_files.noise(1), "JPEG", exif=exif_with(0x010E, 2, b"abc\0")),
    encoded(image_files.noise(1).convert("P"), "PNG", transparency=3),
    encoded(image_files.noise(1).convert("P"), "GIF"),
    encoded(image_files.noise(1), "TIFF"),
    encoded(image_files.noise(1), "WEBP") if features.check("webp") else encoded(image_files.noise(1), "BMP"),
    encoded(image_files.noise(1), "AVIF") if features.check("avif") else encoded(image_files.noise(1), "BMP"),
]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sample=st.sampled_from(SAMPLES),
    damage=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=8),
    rest=st.integers(0, 4000),
)
def test_damaged_file_gives_an_rgb_image_or_an_image_error(
    tmp_path: Path, sample: bytes, damage: list[tuple[int, int]], rest: int
) -> None:
    data = bytearray(sample)
    for position, value in damage:
        data[position % len(data)] = value
    path = tmp_path / "damaged"
    path.write_bytes(data[: max(1, len(data) - rest)] if rest < 400 else data)
    try:
        assert open_image(path, max_megapixels=1).mode == "RGB"
    except ImageError:
        refused(path, max_megapixels=1)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="cannot count open files here")
def test_files_of_refused_images_are_closed(tmp_path: Path) -> None:
    """Also while the errors are kept for a later report."""
    large, cut, text = tmp_path / "large.png", tmp_path / "cut.png", tmp_path / "text.png"
    scene().save(large)
    cut.write_bytes(encoded(image_files.noise(0), "PNG")[:-500])
    text.write_text("no image")
    before, kept = len(os.listdir("/proc/self/fd")), []
    for path in (large, cut, text) * 5:
        try:
            open_image(path, max_megapixels=1e-3)
        except ImageError as error:
            kept.append(error)
    assert len(kept) == 15
    assert len(os.listdir("/proc/self/fd")) == before


# Large images


@pytest.fixture(scope="module")
def hundred_megapixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.png"
    path.write_bytes(image_files.black_png(10_000, 10_000))
    return path


@pytest.mark.parametrize("side", [9_000, 10_000, 20_000], ids=["81", "100", "400"])
def test_large_images_are_refused_before_they_are_decoded(tmp_path: Path, side: int) -> None:
    """The header is sufficient: these files have no pixels. Pillow's own warning and limit do not apply."""
    path = tmp_path / "large.png"
    path.write_bytes(image_files.png(side, side, 1, 0, []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(path, f"{side * side // 10**6} megapixels", "limit of 80", "raise max_megapixels")


def test_large_image_is_accepted_with_a_higher_limit(hundred_megapixels: Path) -> None:
    refused(hundred_megapixels, "100 megapixels")
    limit, filters = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = open_image(hundred_megapixels, max_megapixels=100)
    assert (image.size, image.mode, image.getpixel((9_999, 9_999))) == ((10_000, 10_000), "RGB", BLACK)
    assert limit == Image.MAX_IMAGE_PIXELS
    assert filters == list(warnings.filters)


def test_size_limit_is_exact_and_named_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (101, 1)).save(path)
    assert open_image(path, max_megapixels=101e-6).size == (101, 1)
    refused(path, "0.000101 megapixels", "limit of 0.0001", max_megapixels=100e-6)
    refused(Image.new("RGB", (101, 1)), "0.000101 megapixels", max_megapixels=100e-6)


def test_pillow_size_limit_is_neither_applied_nor_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A low global limit of the host program does not affect opening, preprocessing and cropping."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    path = tmp_path / "a.png"
    image_files.noise(0, 50, 50).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = open_image(path)
        assert preprocess(size=10)(image).shape == (3, 10, 10)
        assert preprocess(size=10).views(image, 20, random.Random(0), whole=False).shape == (20, 3, 10, 10)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_extremely_narrow_or_empty_images_are_refused(tmp_path: Path) -> None:
    """A strip with a height of one pixel would take gigabytes when it is resized for a model."""
    strip = tmp_path / "strip.png"
    Image.new("1", (50_000, 1)).save(strip)
    refused(strip, "50000 x 1")
    refused(Image.new("RGB", (1, 201)), "1 x 201")
    refused(Image.new("RGB", (0, 5)), "0 x 5")
    refused(Image.new("RGB", (0, 0)), "0 x 0")
    assert open_image(Image.new("RGB", (200, 1))).size == (200, 1)


def test_default_error_handler_warns() -> None:
    with pytest.warns(SelfTPTWarning, match=r"skipped a\.jpg: no such file"):
        warn_of(ImageError("a.jpg: no such file"))


# Preprocessing


def preprocess(**config: Any) -> Preprocess:
    return Preprocess.from_config({**vars(PreprocessCfg(size=32)), **config})


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"interpolation": "bilinear"},
        {"resize_mode": "squash", "mean": (0.5,) * 3, "std": (0.25,) * 3},
        {"resize_mode": "longest", "fill_color": 127},
        {"size": (24, 40)},
    ],
    ids=["clip", "bilinear", "squash", "longest", "oblong"],
)
def test_preprocessing_equals_open_clip(config: dict[str, Any]) -> None:
    ours = preprocess(**config)
    theirs = image_transform_v2(PreprocessCfg(**{"size": 32, **config}), is_train=False)
    for image in (image_files.noise(0, 90, 50), image_files.noise(1, 20, 33)):
        seen = ours(image)
        assert seen.dtype == torch.uint8
        assert seen.shape == (3, *ours.size)
        torch.testing.assert_close(ours.normalize(seen[None])[0], theirs(image), rtol=0, atol=1e-6)


def test_float_pixels_are_not_normalised_again() -> None:
    pixels = torch.rand(2, 3, 32, 32)
    assert torch.equal(preprocess().normalize(pixels), pixels)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_crops_equal_torchvision_for_the_same_boxes(interpolation: str) -> None:
    """A crop is cut out, resized, and flipped with probability 0.5."""
    image, height, width = image_files.noise(0, 90, 50), 24, 40
    found = preprocess(size=(height, width), interpolation=interpolation).views(
        image, 12, random.Random(7), whole=False
    )
    rng, flips = random.Random(7), 0
    for crop in found:
        left, upper, right, lower = random_box(90, 50, rng)
        expected = tv.resized_crop(
            image, upper, left, lower - upper, right - left, [height, width], InterpolationMode(interpolation)
        )
        if rng.random() < 0.5:
            expected, flips = tv.hflip(expected), flips + 1
        assert torch.equal(crop, tv.pil_to_tensor(expected))
    assert 0 < flips < 12


def test_crops_depend_on_the_seed_only() -> None:
    cut, image = preprocess(), image_files.noise(0, 90, 50)
    first = cut.views(image, 4, random.Random(1), whole=False)
    assert torch.equal(first, cut.views(image, 4, random.Random(1), whole=False))
    assert torch.equal(first[:2], cut.views(image, 2, random.Random(1), whole=False))
    assert not torch.equal(first, cut.views(image, 4, random.Random(2), whole=False))
    assert len({crop.numpy().tobytes() for crop in first}) == 4


# Random boxes


class RecordingRandom(random.Random):
    """Records whether a box position was drawn, which does not happen for the fallback box."""

    placed = False

    def randint(self, a: int, b: int) -> int:
        self.placed = True
        return super().randint(a, b)


@settings(max_examples=300, deadline=None)
@given(width=st.integers(1, 2000), height=st.integers(1, 2000), seed=st.integers(0, 2**32))
def test_boxes_are_inside_the_image_and_within_area_and_aspect_limits(width: int, height: int, seed: int) -> None:
    rng = RecordingRandom(seed)
    left, upper, right, lower = random_box(width, height, rng)
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height
    if rng.placed:  # rounding changes each side by at most half a pixel
        w, h, area = right - left, lower - upper, width * height
        assert (w + 0.5) * (h + 0.5) >= 0.08 * area
        assert (w - 0.5) * (h - 0.5) <= area
        assert (w + 0.5) / (h - 0.5) >= 3 / 4
        assert (w - 0.5) / (h + 0.5) <= 4 / 3


class Extreme(RecordingRandom):
    """Returns one end of every range."""

    def __init__(self, end: int) -> None:
        super().__init__(0)
        self.end = end

    def uniform(self, a: float, b: float) -> float:
        return (a, b)[self.end]


def test_ends_of_the_ranges_give_the_smallest_and_largest_box() -> None:
    """The smallest box has 8 % of the area and aspect 3:4; the largest is the complete image of aspect 4:3."""
    smallest, largest = Extreme(0), Extreme(1)
    left, upper, right, lower = random_box(400, 300, smallest)
    assert (right - left, lower - upper) == (85, 113)  # square roots of 9600 * 3/4 and 9600 / (3/4)
    assert random_box(400, 300, largest) == (0, 0, 400, 300)
    assert smallest.placed
    assert largest.placed


def torchvision_box(width: int, height: int, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    blank = torch.empty(1, 1, 1).expand(1, height, width)
    upper, left, h, w = RandomResizedCrop.get_params(blank, list(scale), [3 / 4, 4 / 3])
    return left, upper, left + w, upper + h


@settings(max_examples=300, deadline=None)
@given(width=st.integers(1, 2000), height=st.integers(1, 2000))
def test_fallback_box_equals_torchvision(width: int, height: int) -> None:
    """A box of four times the image area never fits, so the fallback is used."""
    assert random_box(width, height, random.Random(0), (4, 4)) == torchvision_box(width, height, (4, 4))


@pytest.mark.parametrize("size", [(1000, 10), (7, 900), (2000, 1), (1, 1), (3, 2)])
def test_very_narrow_images_give_the_fallback_box(size: tuple[int, int]) -> None:
    """No box within the aspect limits fits, so the fallback is used."""
    if max(size) > 100:
        assert {random_box(*size, random.Random(seed)) for seed in range(20)} == {torchvision_box(*size, (0.08, 1))}
    else:
        assert all(random_box(*size, random.Random(seed))[2] <= size[0] for seed in range(20))


@pytest.mark.parametrize("size", [(640, 480), (300, 300), (800, 300)])
def test_boxes_have_the_distribution_of_torchvision(size: tuple[int, int]) -> None:
    """Compare means and standard deviations of area, log aspect and centre, whose sampling error is below 0.01."""
    rng, count = random.Random(0), 4000
    ours = np.array([random_box(*size, rng) for _ in range(count)], float)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = np.array([torchvision_box(*size, (0.08, 1)) for _ in range(count)], float)

    def statistics(boxes: np.ndarray) -> np.ndarray:
        left, upper, right, lower = boxes.T
        w, h = right - left, lower - upper
        rows = np.stack([w * h / size[0] / size[1], np.log(w / h), (left + right) / size[0], (upper + lower) / size[1]])
        return np.stack([rows.mean(1), rows.std(1)])

    np.testing.assert_allclose(statistics(ours), statistics(theirs), atol=0.03)
    assert abs(statistics(ours)[0, 1] - statistics(theirs)[0, 1]) < 0.02


# Finding images


def touch(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return [folder / name for name in names]


def test_images_below_a_folder_are_found_in_sorted_order(tmp_path: Path) -> None:
    """Suffixes may be upper or lower case; hidden files and other files are left out."""
    expected = touch(tmp_path, "B.JPG", "a.png", "sub/d.TIFF", "sub/deep/c.webp", "z.gif")
    touch(tmp_path, ".hidden.jpg", ".hidden/e.jpg", "notes.txt", "sub/.thumbs/f.png", "jpg", "png.txt")
    assert images_in(tmp_path) == expected
    assert list(find_images([tmp_path])) == expected
    assert list(find_images([f"{tmp_path}/"])) == expected


def test_files_and_folders_are_found_in_the_given_order(tmp_path: Path) -> None:
    b, a, note = touch(tmp_path, "two/b.jpg", "one/a.jpg", "note.txt")
    assert list(find_images([b.parent, note, a.parent, str(b)])) == [b, note, a, b]
    assert list(find_images([])) == []


@pytest.mark.parametrize("name", ["two words.jpg", "Über 猫🐈.jpg", "photo[1].jpg", "what?.jpg", "st*r.png", "-.jpg"])
def test_existing_file_is_found_even_if_its_name_is_a_pattern(tmp_path: Path, name: str) -> None:
    """Names with spaces, Unicode characters or wildcards are taken literally if the file exists."""
    (path,) = touch(tmp_path, name)
    touch(tmp_path, "photo1.jpg", "whats.jpg", "star.png")
    assert list(find_images([path])) == [path]
    assert list(find_images(["-"], io.StringIO(f"{path}\n"))) == [path]


def test_pattern_matches_are_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which the system lists files does not matter."""
    a, b, c = touch(tmp_path, "a.jpg", "sub/b.jpg", "sub/deep/c.jpg")
    touch(tmp_path, "d.png", ".hidden.jpg", "sub/.hid/e.jpg")
    (tmp_path / "folder.jpg").mkdir()
    assert list(find_images([f"{tmp_path}/*.jpg"])) == [a]
    assert list(find_images([f"{tmp_path}/**/*.jpg"])) == [a, b, c]
    assert list(find_images([f"{tmp_path}/sub/?.jpg", f"{tmp_path}/[ab].jpg"])) == [b, a]
    monkeypatch.setattr(glob, "glob", lambda *_, **__: [str(c), str(a), str(b)])
    assert list(find_images(["*.jpg"])) == [a, b, c]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none.jpg", "does not exist"),
        ("none/", "does not exist"),
        ("empty", "has no image"),
        ("*.gif", "no file matches"),
        ("em*", "no file matches"),
        ("x" * 300, "x" * 300),
    ],
)
def test_paths_and_patterns_without_images_are_refused(tmp_path: Path, path: str, words: str) -> None:
    """Also a pattern that matches only a folder, and a name that is too long for a file name."""
    touch(tmp_path, "empty/notes.txt")
    with pytest.raises(SelfTPTError, match=words) as caught:
        list(find_images([f"{tmp_path}/{path}"]))
    assert path.rstrip("/") in str(caught.value)


def test_dash_reads_one_path_per_line() -> None:
    lines = io.StringIO("a.jpg\n\n  \n my cat.jpg \r\nfolder/b.jpg")
    assert list(find_images(["-"], lines)) == [Path("a.jpg"), Path(" my cat.jpg "), Path("folder/b.jpg")]
    with pytest.raises(SelfTPTError, match="- does not exist"):
        list(find_images(["-"]))


def test_paths_from_stdin_are_yielded_before_the_next_line_is_read() -> None:
    """So that `selftpt` can process a stream of paths."""
    lines_read = []

    def lines() -> Iterator[str]:
        for name in ("a.jpg\n", "\n", "b.jpg\n"):
            lines_read.append(name)
            yield name
        raise AssertionError("read too far")

    found = find_images(["-"], lines())  # type: ignore[arg-type]
    assert next(found) == Path("a.jpg")
    assert lines_read == ["a.jpg\n"]
    assert next(found) == Path("b.jpg")


# Labelled images


def test_source_from_folder_sorts_classes_and_images_by_name(tmp_path: Path) -> None:
    """Hidden folders and files outside class folders are left out."""
    paths = touch(tmp_path, "cat/1.jpg", "cat/2.jpg", "dog two/0.png", "Éléphant/x/y.jpg")
    touch(tmp_path, ".git/a.jpg", "stray.jpg", "cat/notes.txt")
    source = Source.from_folder(tmp_path)
    assert source.names == ("cat", "dog two", "Éléphant")
    assert source.paths == tuple(paths)
    assert source.labels == (0, 0, 1, 2)
    assert Source.from_folder(str(tmp_path)) == source


def test_folders_without_labelled_images_are_refused(tmp_path: Path) -> None:
    def fails(folder: Path, words: str) -> None:
        with pytest.raises(SelfTPTError, match=words) as caught:
            Source.from_folder(folder)
        assert str(folder) in str(caught.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    touch(tmp_path, "one/cat/1.jpg", "one/stray.jpg", "hole/cat/1.jpg", "hole/dog/notes.txt")
    fails(tmp_path / "none", "does not exist")
    fails(tmp_path / "one" / "stray.jpg", "is neither a folder nor a CSV file")
    fails(empty, "at least two; folders in it: 0")
    fails(tmp_path / "one", "at least two; folders in it: 1")
    fails(tmp_path / "hole", r"hole/dog has no image")
    fails(tmp_path / ("x" * 300), "cannot read the folder|does not exist")


def test_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Any) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    touch(tmp_path, "cat/1.jpg", "dog/1.jpg")
    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(SelfTPTError, match=r"cannot read the folder .*cat: Permission denied"):
        images_in(tmp_path / "cat")
    monkeypatch.setattr(Path, "iterdir", locked)
    with pytest.raises(SelfTPTError, match=r"cannot read the folder .*: Permission denied"):
        Source.from_folder(tmp_path)


def mixed(sizes: dict[int, int]) -> Source:
    """Return a source whose images alternate between classes, in the given order of classes."""
    rows = [(place, label) for label, size in sizes.items() for place in range(size)]
    rows.sort(key=lambda row: row[0])
    return Source(
        tuple("abc"), tuple(Path(f"{label}-{place}") for place, label in rows), tuple(label for _, label in rows)
    )


def test_few_shot_sample_follows_the_published_rule() -> None:
    """A seeded global generator samples the classes in order of appearance; small classes are used completely."""
    source = mixed({2: 6, 0: 2, 1: 5})
    random.seed(1)
    expected = [
        *random.sample([f"2-{i}" for i in range(6)], 3),
        *["0-0", "0-1"],
        *random.sample([f"1-{i}" for i in range(5)], 3),
    ]
    few = source.few(3, 1)
    assert [str(path) for path in few.paths] == expected
    assert few.labels == (2, 2, 2, 0, 0, 1, 1, 1)
    assert few.names == source.names
    # The sample as literal values.
    assert expected == ["2-1", "2-4", "2-0", "0-0", "0-1", "1-2", "1-0", "1-1"]


@given(
    sizes=st.dictionaries(st.integers(0, 2), st.integers(1, 9), min_size=1),
    shots=st.integers(1, 10),
    seed=st.integers(0, 99),
)
def test_few_shot_sample_of_random_sources_follows_the_rule(sizes: dict[int, int], shots: int, seed: int) -> None:
    source = mixed(sizes)
    few = source.few(shots, seed)
    assert Counter(few.labels) == {label: min(size, shots) for label, size in sizes.items()}
    assert len(set(few.paths)) == len(few.paths)
    assert all(str(path).startswith(f"{label}-") for path, label in zip(few.paths, few.labels, strict=True))
    state = random.getstate()
    random.seed(seed)
    expected: list[Path] = []
    for label in dict.fromkeys(source.labels):
        items = [p for p, other in zip(source.paths, source.labels, strict=True) if other == label]
        expected += random.sample(items, shots) if len(items) >= shots else items
    random.setstate(state)
    assert list(few.paths) == expected


def test_no_shot_limit_returns_the_source_itself() -> None:
    source = mixed({0: 3, 1: 4})
    assert source.few(None, 1) is source


# Other sources


def test_source_from_csv_with_and_without_header(tmp_path: Path) -> None:
    """Classes are in alphabetical order, and paths are relative to the folder of the file."""
    file = tmp_path / "images.csv"
    rows = 'b/1.jpg,kite\n"a, b.jpg",cat\n\n/abs/2.png , kite\n'
    expected = Source(("cat", "kite"), (tmp_path / "b/1.jpg", tmp_path / "a, b.jpg", Path("/abs/2.png")), (1, 0, 1))
    for text in (rows, "path,label\n" + rows, "\ufeffPath, Label\n" + rows):
        file.write_text(text, encoding="utf-8")
        assert Source.from_csv(file) == Source.read(str(file)) == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a.jpg\n", "line 1: expected an image path and a class name"),
        (b"a.jpg,cat\nb.jpg,dog,3\n", "line 2"),
        (b"a.jpg,cat\n,dog\n", "line 2"),
        (b"a.jpg,cat\nb.jpg,cat\n", "at least two classes"),
        (b"", "at least two classes"),
        (b"\xff\xfe,\xff", "not a CSV file in UTF-8"),
        (b'a.jpg,"cat\n', "not a CSV file"),
    ],
)
def test_invalid_csv_files_are_refused_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "images.csv"
    file.write_bytes(content)
    with pytest.raises(SelfTPTError, match=words) as caught:
        Source.read(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_csv_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SelfTPTError, match="does not exist"):
        Source.read(tmp_path / "none.csv")


def test_source_from_images_takes_names_or_indices_as_labels() -> None:
    images = [image_files.noise(i) for i in range(4)]
    source = Source.from_images(images, ["kite", "cat", "kite", "cat"])
    assert source.names == ("cat", "kite")
    assert source.labels == (1, 0, 1, 0)
    assert source.few(1, 1).images == (source.few(1, 1).images[0], source.few(1, 1).images[1])
    assert Source.from_images(images, [1, 0, 1, 0], ["cat", "kite"]).labels == source.labels
    assert len(source.few(1, 1)) == 2


def test_source_from_features_samples_features_with_their_labels() -> None:
    features = F.normalize(torch.randn(6, 24, generator=torch.Generator().manual_seed(0)), dim=-1)
    source = Source.from_features(features, [0, 1, 0, 1, 0, 1], ["cat", "kite"])
    assert source.features is not None
    assert source.features.shape == (6, 1, 24)
    few = source.few(2, 1)
    assert few.features is not None
    rows = [int((features == row[0]).all(1).nonzero()) for row in few.features]
    assert [source.labels[i] for i in rows] == list(few.labels) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Source.from_images(["a.jpg"], ["dog", "cat"]), "not 1 images and 2 labels"),
        (lambda: Source.from_images(["a.jpg"], ["dog"], ["cat", "kite"]), "'dog', is not one of the class names"),
        (lambda: Source.from_images(["a.jpg"], [2], ["cat", "kite"]), "indices of its 2 class names"),
        (lambda: Source.from_images(["a.jpg"], [-1], ["cat", "kite"]), "indices of its 2 class names"),
        (lambda: Source.from_features(torch.zeros(2, 3, 4, 5), [0, 1], ["cat", "kite"]), "shape"),
    ],
)
def test_invalid_sources_are_refused(make: Callable[[], Source], words: str) -> None:
    with pytest.raises(SelfTPTError, match=words):
        make()


# Threads


def test_results_are_in_input_order() -> None:
    """Here the first item finishes after the second."""
    second = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert second.wait(60)
        if item == 1:
            second.set()
        return item * item

    assert list(in_threads(work, range(20), ahead=3, threads=2)) == [i * i for i in range(20)]
    assert list(in_threads(work, [], ahead=3)) == []


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_at_most_the_given_number_of_items_is_prepared_ahead(ahead: int) -> None:
    drawn = consumed = most = 0

    def items() -> Iterator[int]:
        nonlocal drawn, most
        for item in range(30):
            drawn += 1
            most = max(most, drawn - consumed)
            yield item

    results = in_threads(math.sqrt, items(), ahead, threads=2)
    assert drawn == 0
    for _ in results:
        consumed += 1
    assert consumed == 30
    assert most == ahead + 1


def test_errors_of_work_and_input_are_raised() -> None:
    """An error of the work function is raised after the results of the items before it."""

    def work(item: int) -> int:
        if item == 3:
            raise ZeroDivisionError("three")
        return item

    results = in_threads(work, range(10), ahead=2)
    assert list(itertools.islice(results, 3)) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="three"):
        next(results)

    def items() -> Iterator[int]:
        yield 1
        raise SelfTPTError("no more")

    with pytest.raises(SelfTPTError, match="no more"):
        list(in_threads(work, items(), ahead=2))


def test_closing_early_does_not_hang() -> None:
    """The input is endless; items that were not started are dropped."""
    started, closed = [], threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.set()

    def consume_and_close() -> None:
        results = in_threads(lambda item: started.append(item) or item, items(), ahead=4, threads=2)
        for item in results:
            if item == 2:
                break
        results.close()

    thread = threading.Thread(target=consume_and_close, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert closed.wait(60)
    assert len(started) <= 3 + 4


def test_closing_drops_items_that_were_not_started() -> None:
    """The second item blocks the only thread; the items queued behind it are never started."""
    started, held, resume = [], threading.Event(), threading.Event()

    def work(item: int) -> int:
        started.append(item)
        if item == 1:
            held.set()
            assert resume.wait(60)
        return item

    results = in_threads(work, range(50), ahead=10, threads=1)
    assert next(results) == 0
    assert held.wait(60)
    threading.Timer(0.2, resume.set).start()
    results.close()
    assert started == [0, 1]
