"""Image features, computed once and kept on disk: a second method, seed or setting costs no pass of the image tower.

They are kept by model, precision and look, in packs: files that are written whole, of features with the pictures they
are of. A pack is mapped into memory, so that what is not asked for is not read.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from selftpt.data.decoding import ImageError, open_image, warn_of
from selftpt.data.threads import in_threads
from selftpt.data.transforms import Preprocess
from selftpt.errors import SelfTPTError
from selftpt.files import cache_folder, digest, read_tensors, write_tensors
from selftpt.models import Model
from selftpt.progress import Bar
from selftpt.version import __version__

Stamp = tuple[str | int, ...]
GROUP = 32  # pictures that are cut and encoded together, fewer if there are many crops of each
PACK_SECONDS = 5.0  # of work in one pack: what a killed run loses at most


@dataclass(frozen=True)
class ViewSpec:
    """What the image tower is shown of a picture: itself, or so many random resized crops.

    seed: of the crops, or None where each picture has its own, by its name and its folder's.
    augmix: whether AugMix is applied to the crops.
    """

    crops: int = 0
    seed: int | None = None
    max_megapixels: float = 80
    augmix: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others."""
        return self.crops, self.seed, self.max_megapixels, *(["augmix"] if self.augmix else [])

    @property
    def views(self) -> int:
        return self.crops or 1

    def __str__(self) -> str:
        if not self.crops:
            return "the picture"
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.crops} random crops{seed}{', AugMix' if self.augmix else ''}"

    def stamp(self, path: Path) -> Stamp:
        """What tells a picture, and is no longer the same when the look at it has changed."""
        return stamp(path)

    def cut(self, preprocess: Preprocess, path: Path, only: int | None = None) -> Tensor | ImageError:
        """The views of a picture, uint8 [views, 3, S, S], or of its crops only one, or why there are none."""
        try:
            picture = open_image(path, self.max_megapixels)
        except ImageError as error:
            return error
        seed = os.fsencode("/".join(path.absolute().parts[-2:])) if self.seed is None else self.seed
        return preprocess.views(picture, self.crops, random.Random(seed), not self.crops, self.augmix, only)


class FeatureStore:
    """The features of pictures by one model and one look."""

    def __init__(
        self, model: Model, look: ViewSpec, on_error: Callable[[ImageError], None] = warn_of, batch: int = 64
    ) -> None:
        self.model, self.look, self.on_error, self.batch = model, look, on_error, batch
        self.folder = _folder() / digest(__version__, model.id.digest, model.precision, *look.key)
        self.kept: dict[Stamp, Tensor] = {}
        for pack in sorted(self.folder.glob("*.safetensors")):
            with contextlib.suppress(SelfTPTError, KeyError, ValueError):  # a damaged pack is as good as none
                self._map(pack)

    def __call__(self, paths: Sequence[Path]) -> Tensor:
        """The unit features of pictures: [N, views, D], NaN for one that cannot be used, which `on_error` is told."""
        stamps = [self.look.stamp(path) for path in paths]
        size = max(1, min(GROUP, 320 // self.look.views))
        missing = [i for i, one in enumerate(stamps) if one not in self.kept]
        cuts = in_threads(lambda i: self.look.cut(self.model.preprocess, paths[i]), missing, ahead=size)
        fresh: dict[Stamp, Tensor] = {}
        errors: dict[int, ImageError] = {}
        begin = time.monotonic()
        with Bar("image features", len(missing) * self.look.views) as bar:
            for start in range(0, len(missing), size):
                group = missing[start : start + size]
                shown = {i: next(cuts) for i in group}
                errors |= {i: cut for i, cut in shown.items() if isinstance(cut, ImageError)}
                good = {i: cut for i, cut in shown.items() if isinstance(cut, Tensor)}
                fresh |= zip((stamps[i] for i in good), self._encode(list(good.values())), strict=True)
                bar.step(len(group) * self.look.views)
                if time.monotonic() - begin > PACK_SECONDS:
                    self._keep(fresh)
                    fresh, begin = {}, time.monotonic()
        self._keep(fresh)
        for i in sorted(errors):
            self.on_error(errors[i])
        nothing = torch.full((self.look.views, self.model.dimension), float("nan"))
        rows = [self.kept.get(one, nothing) for one in stamps]
        return torch.stack(rows) if rows else nothing[None][:0]

    def _encode(self, views: Sequence[Tensor]) -> Tensor:
        """Features [n, views, D] of the views of each picture.

        The tower always takes as many at once, so that its bits do not depend on which pictures were there before.
        """
        if not views:
            return torch.empty(0, self.look.views, self.model.dimension)
        pixels = torch.cat(list(views))
        batch = min(self.batch, GROUP * self.look.views)
        encoded = torch.cat([self._encode_batch(some, batch) for some in pixels.split(batch)])
        if not encoded.isfinite().all():
            raise SelfTPTError(f"the image tower's features are no numbers in {self.model.precision}: take fp32")
        return encoded.cpu().view(len(views), self.look.views, -1)

    def _encode_batch(self, pixels: Tensor, batch: int) -> Tensor:
        """Features [n, D] of n views, with blank ones for company up to a batch."""
        blank = pixels.new_zeros(batch - len(pixels), *pixels.shape[1:])
        self.model.encoded += len(pixels)
        return self.model.encode_images(torch.cat([pixels, blank]))[: len(pixels)]

    def _keep(self, fresh: dict[Stamp, Tensor]) -> None:
        if fresh:
            model = f"{self.model.id} {self.model.precision}"
            header = {"model": model, "look": str(self.look), "pictures": list(fresh)}
            pack = self.folder / f"{digest(header['pictures'])}.safetensors"
            write_tensors(pack, "features", {"features": torch.stack(list(fresh.values()))}, header)
            self._map(pack)

    def _map(self, pack: Path) -> None:
        """Take up the features of a pack as they are on the disk: they are read when they are used."""
        header, tensors = read_tensors(pack, "features")
        self.kept.update(zip(map(tuple, header["pictures"]), tensors["features"], strict=True))


def stamp(path: Path) -> Stamp:
    """What tells a picture, and is no longer the same when it has changed."""
    try:
        stat = path.stat()
    except OSError:
        return (str(path.absolute()),)
    return str(path.absolute()), stat.st_size, stat.st_mtime_ns


def _folder() -> Path:
    return cache_folder() / "features"


@dataclass(frozen=True)
class Shelf:
    """What is kept of one model and one look."""

    folder: Path
    model: str
    look: str
    pictures: int
    bytes: int

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self.folder)


def shelves() -> Iterator[Shelf]:
    """What the cache folder has of features; packs that cannot be read count as bytes of an unknown model."""
    for folder in sorted(path for path in _folder().glob("*") if path.is_dir()):
        model, look, pictures, size = "unknown", "unknown", 0, 0
        for file in folder.iterdir():
            size += os.path.getsize(file)
            try:
                header, _ = read_tensors(file, "features")
                model, look, pictures = header["model"], header["look"], pictures + len(header["pictures"])
            except (SelfTPTError, KeyError):
                continue
        yield Shelf(folder, model, look, pictures, size)
