"""Mutation fuzzing of image files: `python -m tests.fuzz --kind images --n 5000 --seed 1`.

Every file is opened with `open_image` and classified within a memory limit. It must give an RGB image of its declared
size or a one-line error.
"""

from __future__ import annotations

import random
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, features

from tests.fuzz import Answer, Case, cut, flip, join, measured, noise, position, remove, repeat, same
from tests.helpers import image_files

REFUSED_MB = 1000  # memory limit of a refused image
ACCEPTED_MB, BYTES_PER_PIXEL = 300, 24  # memory limit of an accepted image: constant, and per pixel
FORMATS = {"JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"}
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # libtiff reports damage on stderr, which cannot be turned off


# Valid images


def samples() -> Iterator[tuple[str, bytes, tuple[int, int]]]:
    """Yield small images of every format and mode: name, file, and displayed size (0 x 0 if unsupported)."""
    image = image_files.noise(3, 37, 23)
    wide = np.arange(37 * 23, dtype=np.uint16).reshape(23, 37) * 70
    alpha = image.copy()
    alpha.putalpha(image.convert("L"))
    modes = {mode: image.convert(mode) for mode in ("1", "L", "P", "RGB", "CMYK")}
    modes |= {"RGBA": alpha, "LA": alpha.convert("LA"), "I;16": Image.fromarray(wide), "I": modes["L"].convert("I")}
    saved: list[tuple[str, str, dict[str, Any]]] = [
        *(("JPEG", mode, options) for mode in ("L", "RGB", "CMYK") for options in ({}, {"progressive": True})),
        ("JPEG", "RGB", {"xmp": b'tiff:Orientation="1"', "icc_profile": bytes(300), "comment": b"a comment"}),
        *(("PNG", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "I;16")),
        ("PNG", "P", {"transparency": 3, "icc_profile": bytes(300)}),
        *(("GIF", mode, {"comment": b"a comment"}) for mode in ("1", "L", "P", "RGBA")),
        *(("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
        *(("PPM", mode, {}) for mode in ("1", "L", "RGB", "I")),
        *(("TIFF", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I;16", "I")),
        *(("TIFF", "RGB", {"compression": f"tiff_{name}"}) for name in ("lzw", "deflate", "adobe_deflate")),
        *(("TIFF", "RGB", {"compression": name}) for name in ("jpeg", "packbits", "zstd")),
        *(("TIFF", "1", {"compression": name}) for name in ("group3", "group4")),
        ("TIFF", "RGB", {"big_tiff": True}),
        *(("WEBP", mode, options) for mode in ("RGB", "RGBA") for options in ({}, {"lossless": True})),
        *(("AVIF", mode, {}) for mode in ("L", "RGB", "RGBA")),
    ]
    for format, mode, options in saved:
        if format not in ("WEBP", "AVIF") or features.check(format.lower()):
            yield f"{format} {mode} {' '.join(options)}", image_files.encoded(modes[mode], format, **options), (37, 23)
    frames: dict[str, Any] = {"save_all": True, "append_images": [image_files.noise(seed, 37, 23) for seed in (4, 5)]}
    for format in ("GIF", "PNG", "WEBP", "TIFF", "MPO"):
        options = frames | ({"disposal": 2} if format == "GIF" else {})
        yield f"{format} animated", image_files.encoded(image, format, **options), (37, 23)
    for format in ("JPEG", "PNG", "WEBP"):
        stored, exif = image_files.turned(image, 6)
        yield f"{format} turned", image_files.encoded(stored, format, exif=exif), (37, 23)
    colours = image.tobytes()
    yield "PPM 16-bit", b"P5 37 23 65535\n" + wide.astype(">u2").tobytes(), (37, 23)
    yield "PPM maxval", b"P6 # comment\n37 23 200\n" + bytes(min(value, 200) for value in colours), (37, 23)
    yield "PPM plain", b"P3 37 23 255\n" + b" ".join(b"%d" % value for value in colours), (37, 23)
    yield "PBM plain", b"P1 4 4\n" + b"0 1 1 0\n" * 4, (4, 4)
    rows = [colours[row * 111 : row * 111 + 111] for row in range(23)]
    deep = [bytes(value for byte in row for value in (byte, 7)) for row in rows]
    yield "PNG 16-bit RGB", image_files.png(37, 23, 16, 2, deep, [(b"tRNS", struct.pack(">3H", 1, 2, 3))]), (37, 23)
    packed = b"name\0\0" + zlib.compress(bytes(50_000))
    yield (
        "PNG texts",
        image_files.png(37, 23, 8, 2, rows, [(b"zTXt", packed), (b"iCCP", packed), (b"tEXt", b"a\0b")]),
        (37, 23),
    )
    run_length = bytes(byte for _ in range(23) for byte in (37, 5, 0, 0)) + b"\0\1"
    header = struct.pack("<IiiHHIIiiII", 40, 37, 23, 1, 8, 1, len(run_length), 0, 0, 256, 0) + bytes(1024)
    yield (
        "BMP run-length",
        b"BM" + struct.pack("<IHHI", 14 + len(header), 0, 0, 14 + len(header)) + header + run_length,
        (37, 23),
    )
    for name, compress in (("raw", bytes), ("deflate", zlib.compress)):
        tile = compress(bytes(range(256)) * 3)
        tags = {256: 37, 257: 23, 258: 8, 259: 1 if name == "raw" else 8, 262: 2, 277: 3, 284: 1, 322: 16, 323: 16}
        places = [8 + len(tile) * index for index in range(6)]
        tags |= {258: (8, 8, 8), 324: tuple(places), 325: (len(tile),) * 6}
        yield f"TIFF tiles {name}", image_files.tiff(tags, tile * 6), (37, 23)
    large = image_files.png(5000, 5000, 1, 0, [bytes(625)] * 5000)
    entry = struct.pack("<4B2H2I", 16, 16, 0, 0, 1, 32, len(large), 22)
    yield "TIFF lzma", image_files.encoded(image, "TIFF", compression="lzma"), (0, 0)
    yield "ICO", struct.pack("<3H", 0, 1, 1) + entry + large, (0, 0)
    yield "EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 37 23\n%%EndComments\nshowpage\n", (0, 0)


# Mutations: functions of a random generator, the file and the other valid files

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    127,
    255,
    256,
    4095,
    8000,
    16383,
    30000,
    32767,
    65535,
    2**20,
    2**27,
    2**31 - 1,
    2**32 - 1,
)


def number(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    """Overwrite random numbers: dimensions, tile sizes, bit depths, compressions, counts, offsets or other fields."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at, kind = position(rng, data), rng.choice(["<B", "<H", ">H", "<I", ">I"])
        packed = struct.pack(kind, rng.choice(NUMBERS) % 256 ** struct.calcsize(kind))
        changed[at : at + len(packed)] = packed
    return bytes(changed)


def dimensions(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Change the fields for width and height of the format."""
    width, height = (rng.choice([1, 5, 40, 1000, 7000, 8900, 16383, 20000, 65535, 2**24, 2**31]) for _ in range(2))
    changed = bytearray(data)
    if data.startswith(b"\x89PNG"):
        changed[16:24] = struct.pack(">II", width, height)
    elif data.startswith(b"GIF"):
        frame = data.find(b",\0\0\0\0")
        for at in {6, frame + 5 if frame > 0 and rng.random() < 0.5 else 6}:
            changed[at : at + 4] = struct.pack("<HH", width % 65536, height % 65536)
    elif data.startswith(b"BM"):
        changed[18:26] = struct.pack("<II", width, height)
    elif data.startswith(b"\xff\xd8") and (found := re.search(rb"\xff[\xc0-\xc2]\0", data)):
        changed[found.start() + 5 : found.start() + 9] = struct.pack(">HH", height % 65536, width % 65536)
    elif data.startswith(b"P") and (found := re.search(rb"37 23|37\n23", data)):
        changed[found.start() : found.end()] = b"%d %d" % (width, height)
    elif b"ispe" in data:
        at = data.index(b"ispe") + 8
        changed[at : at + 8] = struct.pack(">II", width, height)
    elif data[12:16] == b"VP8X":
        changed[24:30] = (width % 2**24).to_bytes(3, "little") + (height % 2**24).to_bytes(3, "little")
    elif data[12:16] == b"VP8 ":
        changed[26:30] = struct.pack("<HH", width % 65536, height % 65536)
    elif data.startswith(TIFF):
        return directory(rng, data, [256, 257], [width, height])
    else:
        return number(rng, data, others)
    return bytes(changed)


def directory(rng: random.Random, data: bytes, only: list[int], values: list[int]) -> bytes:
    """Change all entries with the given tags in the first directory of a TIFF file."""
    order = "<" if data.startswith(b"II") else ">"
    changed, kinds = bytearray(data), {1: "B", 3: "H", 4: "I"}
    if data[2:4] not in (b"*\0", b"\0*"):
        return data
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    if start + 2 > len(data):
        return data
    (count,) = struct.unpack_from(f"{order}H", data, start)
    for entry in range(start + 2, min(start + 2 + 12 * count, len(data) - 12), 12):
        tag, kind, _ = struct.unpack_from(f"{order}HHI", data, entry)
        if tag in only:
            value = values[only.index(tag) % len(values)]
            code = kinds.get(kind, "I")
            struct.pack_into(order + code, changed, entry + 8, value % 256 ** struct.calcsize(code))
    return bytes(changed)


def tags(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Change bits, compression, colours, samples, rows, planes, predictor, tiles or sample format of a TIFF file."""
    if not data.startswith(TIFF):
        return flip(rng, data, others)
    chosen = rng.sample([258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 317, 322, 323, 324, 325, 338, 339], 3)
    return directory(rng, data, chosen, [rng.choice([*NUMBERS, 5, 6, 32773, 50000, 34712]) for _ in chosen])


MUTATIONS: list[Callable[[random.Random, bytes, list[bytes]], bytes]] = [
    *(flip, number, number, dimensions, dimensions, tags, tags, cut, repeat, remove, noise, join, same),
]


def checksums(data: bytes) -> bytes:
    """Correct the checksums of a PNG file, because a wrong checksum hides the effect of other changes."""
    changed, at = bytearray(data), 8
    while data.startswith(b"\x89PNG") and at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if at + 12 + length > len(data):
            break
        changed[at + 8 + length : at + 12 + length] = struct.pack(">I", zlib.crc32(data[at + 4 : at + 8 + length]))
        at += 12 + length
    return bytes(changed)


def cases(_: Path) -> Callable[[random.Random], Case]:
    """Return a function that makes mutated images; only an unchanged image has an expected size."""
    valid = list(samples())
    others = [data for _, data, _ in valid]

    def make(rng: random.Random) -> Case:
        name, data, size = rng.choice(valid)
        done: list[str] = []
        for mutate in rng.choices(MUTATIONS, k=rng.choice([1, 1, 1, 2, 3])):
            if data:
                data, done = mutate(rng, data, others), [*done, mutate.__name__]
        if rng.random() < 0.7:
            data = checksums(data)
        unchanged = set(done) == {"same"} and size[0]
        return Case(f"{name}: {', '.join(done)}", "jpg", data, size if unchanged else None)

    return make


def work(_: Path) -> Callable[[Path], Answer]:
    """Return a function that opens and classifies an image."""
    import torch

    from selftpt import Classifier, load_model
    from selftpt.data.decoding import ImageError, open_image

    model = load_model("selftpt-tiny")
    weights = torch.nn.functional.normalize(torch.ones(2, model.dimension), dim=-1)
    classifier = Classifier(("a", "b"), weights, 1.0, model.id, {}, model)
    list(classifier.predict([image_files.noise(0)]))

    def use(path: Path) -> Answer:
        answer = Answer()
        with measured(answer):
            try:
                image = open_image(path)
                answer |= {"outcome": "accepted", "mode": image.mode, "size": image.size}
                del image
            except ImageError as error:
                answer |= {"outcome": "refused", "text": str(error)}
            except BaseException as error:
                answer |= {"outcome": "failed", "text": repr(error)}
        if answer["outcome"] == "accepted":
            answer["declared"] = declared(path)
        errors: list[ImageError] = []
        try:
            predictions = list(classifier.predict([path], on_error=errors.append))
            answer |= {"predictions": len(predictions), "errors": [str(error) for error in errors]}
        except BaseException as error:
            answer |= {"outcome": "failed", "text": f"predict: {error!r}"}
        return answer

    return use


def declared(path: Path) -> tuple[str | None, tuple[int, int]]:
    """Return the format and size that Pillow reads from the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(path) as image:
            return image.format, image.size


def judge(case: Case, path: Path, answer: Answer, stderr: str) -> str | None:
    """Return what is wrong with an answer, or None."""
    data, size = case.data, case.expected
    if answer["outcome"] == "failed":
        return str(answer["text"])
    if stderr and not data.startswith(TIFF):
        return f"wrote to stderr: {stderr[:300]!r}"
    if "Traceback" in stderr:
        return f"a traceback: {stderr[-300:]!r}"
    if answer["outcome"] == "refused":
        text = answer["text"]
        if not text.startswith(f"{path}: ") or not text.isprintable():
            return f"not one line that names the file: {text!r}"
        if size:
            return f"a valid image is refused: {text}"
        if answer["predictions"] or answer["errors"] != [text]:
            return f"predict differs: {answer}"
        return f"{answer['mb']:.0f} MB for a refused image: {text}" if answer["mb"] > REFUSED_MB else None
    width, height = answer["size"]
    format, found = answer["declared"]
    if answer["mode"] != "RGB" or sorted(found) != sorted([width, height]) or format not in FORMATS:
        return f"not the declared image: {answer}"
    if size and (width, height) != size:
        return f"{width} x {height} instead of {size}"
    if answer["predictions"] != 1 or answer["errors"]:
        return f"predict differs: {answer}"
    allowed = ACCEPTED_MB + width * height * BYTES_PER_PIXEL / 1e6
    return f"{answer['mb']:.0f} MB for {width} x {height} pixels" if answer["mb"] > allowed else None
