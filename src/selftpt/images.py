"""Pictures in: found, decoded, preprocessed, cropped at random."""

from __future__ import annotations

import collections
import contextlib
import glob
import math
import os
import random
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

import numpy as np
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import ExifTags, Image
from torch import Tensor
from torchvision.transforms import Compose
from torchvision.transforms.functional import pil_to_tensor

from selftpt.augmix import augmix
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

Item = TypeVar("Item")
Result = TypeVar("Result")


class PictureError(SelfTPTError):
    """A picture that cannot be used; the text says which and why."""


def warn_of(error: PictureError) -> None:
    """What is done about a picture that cannot be used, unless the caller has another wish."""
    warnings.warn(f"left out {error}", SelfTPTWarning, stacklevel=3)


def open_picture(source: str | os.PathLike[str] | Image.Image, max_megapixels: float = 80) -> Image.Image:
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
                raise PictureError(f"{name}: not a picture of a known format")
            return _decode(picture, name, max_megapixels)
    except PictureError:
        raise
    except FileNotFoundError as error:
        raise PictureError(f"{name}: no such file") from error
    except IsADirectoryError as error:
        raise PictureError(f"{name}: a folder, not a picture") from error
    except PermissionError as error:
        raise PictureError(f"{name}: no permission to read it") from error
    except Exception as error:  # Pillow's plugins raise all kinds on damaged files
        raise PictureError(f"{name}: cannot be read ({_line(error)})") from error


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
        raise PictureError(
            f"{name}: {width * height / 1e6:g} megapixels, over the limit of {max_megapixels:g}: "
            "raise max_megapixels or shrink the picture"
        )
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureError(f"{name}: {width} x {height} pixels: too narrow a picture to be looked at")
    try:
        picture.load()
    except Exception as error:
        raise PictureError(f"{name}: damaged or cut short ({_line(error)})") from error
    try:
        turn = UPRIGHT.get(picture.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # bad tags do not spoil a picture
        turn = None
    try:
        return _rgb(picture.copy() if turn is None else picture.transpose(turn))
    except Exception as error:
        raise PictureError(f"{name}: cannot be brought to RGB ({_line(error)})") from error


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


@dataclass(frozen=True)
class Preprocess:
    """What a model does to a picture before its image tower: one resize and crop, then mean and deviation."""

    size: tuple[int, int]
    mean: Tensor
    std: Tensor
    interpolation: Image.Resampling
    _geometry: Callable[[Image.Image], Image.Image]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Preprocess:
        """From the preprocessing settings that open_clip keeps with a model."""
        cfg = PreprocessCfg(**config)
        height, width = (cfg.size, cfg.size) if isinstance(cfg.size, int) else tuple(cfg.size)[-2:]
        resampling = Image.Resampling.BILINEAR if cfg.interpolation == "bilinear" else Image.Resampling.BICUBIC
        *geometry, _to_tensor, normalize = image_transform_v2(cfg, is_train=False).transforms
        mean, std = (torch.tensor(values)[:, None, None] for values in (normalize.mean, normalize.std))
        return cls((height, width), mean, std, resampling, Compose(geometry))

    def __call__(self, picture: Image.Image) -> Tensor:
        """An RGB picture to the pixels the model sees: uint8 [3, S, S]."""
        pixels: Tensor = pil_to_tensor(self._geometry(picture))
        return pixels

    def views(
        self,
        picture: Image.Image,
        crops: int,
        rng: random.Random,
        whole: bool = True,
        mixed: bool = False,
        only: int | None = None,
    ) -> Tensor:
        """The picture itself, unless not wanted, and random resized crops, flipped or not: uint8 [views, 3, S, S].

        mixed: whether AugMix is applied to the crops. only: of the crops, the one of this number.
        """
        height, width = self.size
        views = [self(picture)] if whole else []
        for number in range(crops):
            left, upper, right, lower = box = random_box(*picture.size, rng)
            flip = rng.random() < 0.5
            mixing = random.Random(rng.random()) if mixed else None
            if only not in (None, number):
                continue
            # `crop` would do, but for the limit on pixels that Pillow has for the whole program.
            crop = picture.transform((right - left, lower - upper), Image.Transform.EXTENT, box)
            crop = crop.resize((width, height), self.interpolation)
            if flip:
                crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            views.append(pil_to_tensor(augmix(crop, mixing) if mixing else crop))
        return torch.stack(views)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, S, S] in uint8 to the floats the image tower takes; floats stay as they are."""
        if pixels.dtype != torch.uint8:
            return pixels
        return pixels.float().div_(255).sub_(self.mean.to(pixels.device)).div_(self.std.to(pixels.device))


def random_box(
    width: int, height: int, rng: random.Random, scale: tuple[float, float] = (0.08, 1.0)
) -> tuple[int, int, int, int]:
    """Left, upper, right and lower of a random resized crop: area in `scale`, aspect log-uniform in 3/4 to 4/3.

    After ten boxes that do not fit, the largest central one of an allowed aspect.
    """
    low, high = 3 / 4, 4 / 3
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, upper = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, upper, left + w, upper + h
    w, h = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


@dataclass(frozen=True)
class Source:
    """Labelled pictures: class names, and for each picture its path and the index of its class."""

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: tuple[int, ...]

    def few(self, shots: int | None, seed: int) -> Source:
        """At most `shots` pictures a class, by the published rule: classes in order of appearance, a sample of each."""
        if shots is None:
            return self
        rng = random.Random(seed)
        by_class: dict[int, list[Path]] = {}
        for path, label in zip(self.paths, self.labels, strict=True):
            by_class.setdefault(label, []).append(path)
        chosen = [
            (path, label)
            for label, paths in by_class.items()
            for path in (rng.sample(paths, shots) if len(paths) >= shots else paths)
        ]
        return Source(self.names, tuple(p for p, _ in chosen), tuple(label for _, label in chosen))


def read_folder(folder: str | os.PathLike[str]) -> Source:
    """A folder with a folder a class; its name is the class name."""
    root = Path(folder)
    try:
        if not root.is_dir():
            raise SelfTPTError(f"{root} is not a folder" if root.exists() else f"the folder {root} does not exist")
        classes = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise SelfTPTError(f"cannot read the folder {root}: {error.strerror}") from error
    if len(classes) < 2:
        raise SelfTPTError(f"{root} must have a folder for each class, two at least; it has {len(classes)}")
    paths, labels = [], []
    for label, sub in enumerate(classes):
        pictures = pictures_in(sub)
        if not pictures:
            raise SelfTPTError(f"the class folder {sub} has no picture")
        paths += pictures
        labels += [label] * len(pictures)
    return Source(tuple(path.name for path in classes), tuple(paths), tuple(labels))


def pictures_in(folder: Path) -> list[Path]:
    """The picture files below a folder, sorted, hidden ones left out."""
    found = []
    for root, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(root, name) for name in files if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
        ]
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise SelfTPTError(f"cannot read the folder {error.filename}: {error.strerror}")


def is_place(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder or a pattern, for `find_pictures`, and not one picture."""
    return os.path.isdir(path) or (glob.has_magic(os.fspath(path)) and not os.path.exists(path))


def find_pictures(places: Iterable[str | os.PathLike[str]], listing: TextIO | None = None) -> Iterator[Path]:
    """Files, folders (all below them) and glob patterns to picture paths; "-" reads `listing`, a path a line."""
    for place in places:
        text = os.fspath(place)
        path = Path(text)
        if text == "-" and listing is not None:
            yield from (Path(line.rstrip("\r\n")) for line in listing if line.strip())
            continue
        if os.path.isdir(text):
            found = pictures_in(path)
            if not found:
                raise SelfTPTError(f"the folder {path} has no picture")
            yield from found
        elif os.path.exists(text):
            yield path
        elif glob.has_magic(text):
            matches = sorted(match for match in map(Path, glob.glob(text, recursive=True)) if not match.is_dir())
            if not matches:
                raise SelfTPTError(f"no file matches {text}")
            yield from matches
        else:
            raise SelfTPTError(f"{text} does not exist")


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], ahead: int, threads: int | None = None
) -> Iterator[Result]:
    """`work` of each item, in order, by threads that keep up to `ahead` results ready."""
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        waiting: collections.deque[Future[Result]] = collections.deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
