"""The cache on disk, for image features, adapted classifiers and learned parameters.

Everything in the cache can be computed again. An entry that cannot be read or written therefore causes a warning, never
an error. The key of an entry covers everything that determines its content, including source code and library versions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from selftpt.config import CacheMode
from selftpt.data.decoding import DatasetImage, open_image
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.files import (
    Schema,
    cache_folder,
    digest,
    read_header,
    read_tensors,
    set_aside,
    write_tensors,
)
from selftpt.locks import lock

if TYPE_CHECKING:  # the cache is listed without importing torch
    from torch import Tensor

    from selftpt.data.views import FileFingerprint, ViewSpec
    from selftpt.models import Model

SCHEMA = Schema(header={"model": str, "views": str, "images": list}, tensors={"features": "N V D"}, oldest=2)
Result = TypeVar("Result")
EVICTED = ("features", "classifiers", "learned")
ENTRY_SUFFIXES = (".safetensors", ".damaged")
LIBRARIES = ("torch", "torchvision", "open_clip_torch", "timm", "transformers", "pillow", "numpy")


@dataclass(frozen=True)
class Cache:
    """The folder and the policy of a cache.

    Attributes:
        mode: `on`, `off`, or `read-only`, which uses entries but neither adds nor removes any.
        max_gigabytes: The size beyond which the least recently used entries are deleted. None is no limit.
        folder: The folder. By default `$SELFTPT_CACHE`, or `selftpt` in the user's cache folder.

    Raises:
        SelfTPTError: The mode or the size limit is invalid.
    """

    mode: CacheMode = "on"
    max_gigabytes: float | None = 20.0
    folder: Path = None  # type: ignore[assignment]  # set by __post_init__

    def __post_init__(self) -> None:
        if self.mode not in get_args(CacheMode):
            raise SelfTPTError(f"the cache mode must be one of {', '.join(get_args(CacheMode))}, not {self.mode!r}")
        if self.max_gigabytes is not None and not self.max_gigabytes > 0:
            raise SelfTPTError(f"max_gigabytes of the cache must be above 0, or None, not {self.max_gigabytes}")
        if self.folder is None:
            object.__setattr__(self, "folder", cache_folder() if self.reads else Path())
        object.__setattr__(self, "folder", Path(self.folder))

    @property
    def reads(self) -> bool:
        """Whether entries are read."""
        return self.mode != "off"

    @property
    def writes(self) -> bool:
        """Whether entries are written."""
        return self.mode == "on"

    def write(self, path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, object]) -> bool:
        """Write an entry, then delete others if the cache exceeds its size limit.

        Args:
            path: The file, below `folder`.
            kind: The kind of file, which is stored in its header.
            tensors: The tensors.
            header: The rest of the header.

        Returns:
            Whether the entry was written. If it cannot be written, there is a warning.
        """
        if not self.writes:
            return False
        try:
            write_tensors(path, kind, tensors, header)
        except SelfTPTError as error:
            warnings.warn(f"the result is not cached: {error}", SelfTPTWarning, stacklevel=3)
            return False
        self.evict()
        return True

    def writable(self, kind: str) -> Path | None:
        """Return the folder of a kind of entries, or None if nothing can be written there.

        There is a warning if the folder cannot be written or locked.
        """
        if not self.writes:
            return None
        try:
            with lock(self.folder / kind / "writable.lock"):
                return self.folder / kind
        except SelfTPTError as error:
            warnings.warn(f"results are not cached: {error}", SelfTPTWarning, stacklevel=3)
            return None

    def touch(self, path: Path) -> None:
        """Mark an entry as used now."""
        if self.writes:
            with contextlib.suppress(OSError):
                os.utime(path)

    def evict(self) -> None:
        """Delete the least recently used entries until the cache is within its size limit.

        Checkpoints and logs of training runs are not entries, and are kept.
        """
        if self.max_gigabytes is None:
            return
        files = [file for kind in EVICTED for file in _files(self.folder / kind) if file[0].suffix in ENTRY_SUFFIXES]
        excess = sum(stat.st_size for _, stat in files) - self.max_gigabytes * 1e9
        for _, path, size in sorted((stat.st_mtime_ns, path, stat.st_size) for path, stat in files):
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                excess -= size


NO_CACHE = Cache("off", None, Path())


@functools.cache
def code_digest(*packages: str) -> str:
    """Compute a digest of the source code of selftpt and of the versions of the libraries that it uses.

    Args:
        packages: Modules or packages below `selftpt`, such as `data`. By default all source code.
    """
    root = Path(__file__).parents[1]
    sha = hashlib.sha256(repr([_version(name) for name in LIBRARIES]).encode())
    paths = [root / name for name in packages] or [root]
    for file in sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])):
        sha.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return sha.hexdigest()[:32]


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def content_digest(value: Any) -> str:
    """Compute a digest of the content of a tensor, an array, a PIL image or an image of a dataset."""
    if isinstance(value, DatasetImage):
        value = open_image(value)
    import numpy as np
    import torch
    from PIL import Image

    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        value = tensor.flatten().view(torch.uint8).numpy()
        kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    else:
        value = np.asarray(value.convert("RGBA") if isinstance(value, Image.Image) else value)
        kind = f"{value.dtype} {value.shape}"
    return hashlib.sha256(kind.encode() + value.tobytes()).hexdigest()


@dataclass(frozen=True)
class LearnedFiles:
    """Where learned parameters are stored, so that they are learned once.

    Attributes:
        folder: The folder in which they are stored. None stores them in the cache, if its mode allows it.
        cache: The cache.
    """

    folder: Path | None = None
    cache: Cache = NO_CACHE

    def read_or_learn(
        self, name: str, read: Callable[[Path], Result], learn: Callable[[Path | None, bool], Result]
    ) -> Result:
        """Read what an earlier run learned, or learn it now.

        A damaged file is renamed, and its content is learned again. If another process is learning the same
        parameters, this one waits for it.

        Args:
            name: The name of the file.
            read: Reads the file. It raises SelfTPTError if the file is damaged.
            learn: Learns and writes the file. Its arguments are the path, or None to write nothing, and whether a file
                that cannot be written is only a warning.

        Returns:
            The result of `read` or `learn`.
        """
        if self.folder is not None:
            return self._locked(self.folder / name, read, learn, optional=False)
        if not self.cache.reads:
            return learn(None, True)
        file = self.cache.folder / "learned" / name
        if self.cache.writable("learned") is not None:
            result = self._locked(file, read, learn, optional=True)
            self.cache.evict()
            return result
        if file.is_file():
            try:
                return read(file)
            except SelfTPTError as error:
                warnings.warn(f"learning again: {error}", SelfTPTWarning, stacklevel=4)
        return learn(None, True)

    def _locked(
        self, file: Path, read: Callable[[Path], Result], learn: Callable[[Path | None, bool], Result], optional: bool
    ) -> Result:
        with lock(file.with_suffix(".lock")):
            if file.is_file():
                try:
                    result = read(file)
                except SelfTPTError as error:
                    set_aside(file, f"learning again: {error}")
                else:
                    self.cache.touch(file)
                    return result
            return learn(file, optional)


class FeatureCache:
    """Cached features of images by one model and one view specification, in shards.

    A shard is a file with the features of some images. Its header is read when this object is created. Its features are
    verified and mapped into memory when one of its images is first needed. Thread-safe.

    Args:
        cache: The folder and the policy.
        model: The model that computes the features.
        spec: The views whose features are cached.
        batch: The size of the batches in which the features are computed, if it is fixed; else None.
    """

    def __init__(self, cache: Cache, model: Model, spec: ViewSpec, batch: int | None) -> None:
        self.cache, self.model, self.spec = cache, model, spec
        key = digest(
            code_digest("data", "models"),
            (model.id.digest, model.precision, model.device.type, batch),
            spec.key,
        )
        self.folder = cache.folder / "features" / key
        self._rows: dict[FileFingerprint, tuple[Path, int]] = {}
        self._shards: dict[Path, Tensor | None] = {}
        self._lock = threading.Lock()
        if cache.reads:
            for shard in sorted(self.folder.glob("*.safetensors")):
                try:
                    images = _images(read_header(shard, "features", SCHEMA))
                except SelfTPTError as error:
                    self._discard(shard, error)
                else:
                    self._rows.update((fingerprint, (shard, row)) for row, fingerprint in enumerate(images))

    def get(self, fingerprint: FileFingerprint | None) -> Tensor | None:
        """Return the features [views, D] of an image, or None if they are not cached."""
        if fingerprint is None or fingerprint not in self._rows:
            return None
        shard, row = self._rows[fingerprint]
        with self._lock:
            if shard not in self._shards:
                self._shards[shard] = self._read(shard)
            features = self._shards[shard]
        return None if features is None else features[row]

    def put(self, features: Mapping[FileFingerprint, Tensor]) -> None:
        """Write the features [views, D] of images as one shard."""
        if not features or not self.cache.writes:
            return
        import torch

        header = {
            "model": f"{self.model.id} {self.model.precision}",
            "views": str(self.spec),
            "images": list(features),
        }
        shard = self.folder / f"{digest(list(features))}.safetensors"
        if self.cache.write(shard, "features", {"features": torch.stack(list(features.values()))}, header):
            with self._lock:
                self._shards.pop(shard, None)  # an earlier shard of the same images was damaged or evicted
                self._rows.update((fingerprint, (shard, row)) for row, fingerprint in enumerate(features))

    def _read(self, shard: Path) -> Tensor | None:
        try:
            header, tensors = read_tensors(shard, "features", SCHEMA, mapped=True)
            features = tensors["features"]
            if tuple(features.shape) != (len(_images(header)), self.spec.views, self.model.dimension):
                raise SelfTPTError(f"{shard} does not contain the features of its images")
        except SelfTPTError as error:
            self._discard(shard, error)
            return None
        self.cache.touch(shard)
        return features

    def _discard(self, shard: Path, error: SelfTPTError) -> None:
        if not shard.exists():  # another process evicted it
            return
        if self.cache.writes:
            set_aside(shard, str(error))
        else:
            warnings.warn(f"the cache entry is not used: {error}", SelfTPTWarning, stacklevel=4)


def _images(header: Mapping[str, object]) -> list[FileFingerprint]:
    """Return the fingerprints in the header of a shard."""
    images = header.get("images")
    if not isinstance(images, list) or not all(
        isinstance(one, list) and one and all(type(part) in (str, int) for part in one) for one in images
    ):
        raise SelfTPTError("the header of a feature file has no list of images")
    return [tuple(one) for one in images]


@dataclass(frozen=True)
class CacheEntry:
    """A part of the cache: all files of one kind, or the features of one model and one view specification.

    Attributes:
        kind: `features`, `classifiers`, `learned` or `generated`.
        content: A description of the content.
        items: The number of images, classifiers or files.
        bytes: The size on disk.
        path: The folder.
    """

    kind: str
    content: str
    items: int
    bytes: int
    path: Path

    def remove(self) -> None:
        """Delete the files from the disk.

        Raises:
            SelfTPTError: A file cannot be deleted.
        """
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            raise SelfTPTError(f"cannot delete {error.filename or self.path}: {error.strerror}") from error


def cache_entries(cache: Cache) -> Iterator[CacheEntry]:
    """Yield the entries of a cache. Files that cannot be read are counted in bytes only."""
    for folder in sorted(path for path in (cache.folder / "features").glob("*") if path.is_dir()):
        content, images, size = "unknown", 0, 0
        for file, stat in _files(folder):
            size += stat.st_size
            with contextlib.suppress(SelfTPTError):
                header = read_header(file, "features", SCHEMA)
                images += len(_images(header))
                content = f"{header.get('model')}: {header.get('views')}"
        yield CacheEntry("features", content, images, size, folder)
    for kind, content in (
        ("classifiers", "adapted classifiers"),
        ("learned", "prompts and other learned parameters"),
        ("generated", "images that a diffusion model generated"),
    ):
        files = list(_files(cache.folder / kind))
        if files:
            size = sum(stat.st_size for _, stat in files)
            yield CacheEntry(kind, content, len(files), size, cache.folder / kind)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file():
                yield path, path.stat()
