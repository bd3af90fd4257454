"""Labelled images and where images are found: folders, lists, patterns."""

from __future__ import annotations

import glob
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from selftpt.data.decoding import SUFFIXES
from selftpt.errors import SelfTPTError
from selftpt.names import check_names


@dataclass(frozen=True)
class Source:
    """Labelled pictures: class names, and for each picture its path and the index of its class."""

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", check_names(self.names))

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
        pictures = images_in(sub)
        if not pictures:
            raise SelfTPTError(f"the class folder {sub} has no picture")
        paths += pictures
        labels += [label] * len(pictures)
    return Source(tuple(path.name for path in classes), tuple(paths), tuple(labels))


def images_in(folder: Path) -> list[Path]:
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
    """Whether a path is a folder or a pattern, for `find_images`, and not one picture."""
    return os.path.isdir(path) or (glob.has_magic(os.fspath(path)) and not os.path.exists(path))


def find_images(places: Iterable[str | os.PathLike[str]], listing: TextIO | None = None) -> Iterator[Path]:
    """Files, folders (all below them) and glob patterns to picture paths; "-" reads `listing`, a path a line."""
    for place in places:
        text = os.fspath(place)
        path = Path(text)
        if text == "-" and listing is not None:
            yield from (Path(line.rstrip("\r\n")) for line in listing if line.strip())
            continue
        if os.path.isdir(text):
            found = images_in(path)
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
