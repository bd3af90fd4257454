"""Training and test images of a dataset, from a split file, from the dataset's own lists, or from its folders."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selftpt.data.datasets.sampling import by_label
from selftpt.data.datasets.table import Lists, Spec
from selftpt.data.decoding import SUFFIXES
from selftpt.data.sources import Source, images_in
from selftpt.errors import SelfTPTError

Row = tuple[str, int, str]  # path below the image folder, label and class name
MADE = "made here: 50/20/30 % of each class, seed 1"  # part of records: the text must not change


def read_lines(file: Path) -> list[str]:
    """Read the lines of a text file, without empty lines and comments."""
    lines = [line.strip() for line in _text(file).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SelfTPTError(f"{file} is not a text file in UTF-8: download it again") from error


def read_rows(file: Path, *parts: str) -> list[list[Row]]:
    """Read parts of a split file or few-shot list: {part: [[path, label, class name], ...], ...}.

    Raises:
        SelfTPTError: The file cannot be parsed, or a part is missing.
    """
    try:
        found: Any = json.loads(_text(file))
    except ValueError as error:
        raise SelfTPTError(f"{file} is not valid JSON ({error}): download it again") from error
    for part in parts:
        if not isinstance(found, dict) or not isinstance(found.get(part), list) or not found[part]:
            raise SelfTPTError(
                f'{file} has no list "{part}": it must be {{"{part}": [[path, label, class name], ...]}}'
            )
        for row in found[part]:
            if not isinstance(row, list) or [type(value) for value in row] != [str, int, str]:
                raise SelfTPTError(
                    f'{file}: {json.dumps(row)} in "{part}" is not of the form [path, label, class name]'
                )
    return [[(path, label, name) for path, label, name in found[part]] for part in parts]


def to_sources(where: str | Path, folder: Path, parts: Sequence[Sequence[Row]]) -> list[Source]:
    """Make a source of each part, all with the same class names.

    Args:
        where: The file that lists the images, for error messages.
        folder: The folder at which the paths start.
        parts: The rows of each part.

    Raises:
        SelfTPTError: A label has two names, or a label is missing.
    """
    names: dict[int, str] = {}
    for _, label, name in (row for part in parts for row in part):
        if names.setdefault(label, name) != name:
            raise SelfTPTError(f"{where}: label {label} has two names, {names[label]!r} and {name!r}: fix one of them")
    for label in range(len(names)):
        if label not in names:
            raise SelfTPTError(
                f"{where}: no image has label {label}, but the labels go up to {max(names)}: number them 0, 1, 2, ..."
            )
    class_names = tuple(names[label].replace("_", " ") for label in range(len(names)))
    return [
        Source(class_names, tuple(folder / path for path, _, _ in part), tuple(label for _, label, _ in part))
        for part in parts
    ]


def check_images_exist(where: str | Path, sources: Sequence[Source], hint: str) -> None:
    """Check that all listed images exist. Folders are listed instead of opening files, which is faster.

    Args:
        where: The file that lists the images, for the error message.
        sources: The images.
        hint: What the user can do, for the error message.

    Raises:
        SelfTPTError: An image does not exist.
    """
    folders: dict[Path, set[str]] = {}
    missing = []
    paths = [path for source in sources for path in source.paths]
    for path in paths:
        folder = path.parent
        if folder not in folders:
            try:
                folders[folder] = set(os.listdir(folder))
            except (FileNotFoundError, NotADirectoryError):
                folders[folder] = set()
        if path.name not in folders[folder]:
            missing.append(path)
    if missing:
        raise SelfTPTError(
            f"{len(missing)} of the {len(paths)} images listed in {where} do not exist, the first is {missing[0]}: "
            f"{hint}"
        )


def read_lists(root: Path, spec: Spec, lists: Lists) -> list[list[Row]]:
    """Read the training and test images from the dataset's own lists.

    Raises:
        SelfTPTError: A list names a class that does not exist.
    """
    assert spec.class_of is not None
    parts = [[(spec.class_of(line), line) for line in read_lines(root / file)] for file in (lists.train, lists.test)]
    if lists.classes is None:
        order = sorted({key for part in parts for key, _ in part})
    else:
        order = [lists.class_in(line) for line in read_lines(root / lists.classes)]
    labels = {key: label for label, key in enumerate(order)}
    for key, line in (entry for part in parts for entry in part):
        if key not in labels:
            raise SelfTPTError(f"the lists of {root}: {line!r} is of no class in {lists.classes}: download them again")
    return [[(lists.path(line), labels[key], spec.name_of(key)) for key, line in part] for part in parts]


def read_classes(folder: Path, spec: Spec) -> Source:
    """Read all images below a folder. The class of an image is part of its path.

    Raises:
        SelfTPTError: There are fewer than two classes.
    """
    assert spec.class_of is not None
    groups: dict[str, list[Path]] = {}
    for path in images_in(folder):
        groups.setdefault(spec.class_of(path.relative_to(folder).as_posix()), []).append(path)
    groups = {key: groups[key] for key in sorted(groups) if spec.name_of(key)}
    if len(groups) < 2:
        raise SelfTPTError(f"{folder} has images of {len(groups)} classes, at least two are needed: download it again")
    return Source(
        plain_names(folder, [spec.name_of(key) for key in groups]),
        tuple(path for paths in groups.values() for path in paths),
        tuple(label for label, paths in enumerate(groups.values()) for _ in paths),
    )


def plain_names(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Make class names of the names of folders, with spaces for underscores.

    Raises:
        SelfTPTError: Two folders have the same class name.
    """
    plain = tuple(name.replace("_", " ") for name in names)
    for i, name in enumerate(plain):
        if name in plain[:i]:
            first, second = names[plain.index(name)], names[i]
            raise SelfTPTError(f"{folder}: the classes {first!r} and {second!r} are both {name!r}: rename one of them")
    return plain


def random_split(source: Source) -> list[Source]:
    """Split images at random: 50 % of each class for training and 30 % for testing; 20 % are left for validation.

    Raises:
        SelfTPTError: A class has only one image.
    """
    rng = random.Random(1)
    train: list[int] = []
    test: list[int] = []
    for label, indices in by_label(source).items():
        count = len(indices)
        if count < 2:
            raise SelfTPTError(
                f"the class {source.names[label]!r} has one image, {source.paths[indices[0]]}: "
                "at least two are needed, for training and for testing"
            )
        rng.shuffle(indices)
        middle = round(0.5 * count)
        train += indices[:middle]
        test += indices[min(middle + round(0.2 * count), count - 1) :]
    return [
        Source(source.names, tuple(source.paths[i] for i in part), tuple(source.labels[i] for i in part))
        for part in (train, test)
    ]


def read_wnids(folder: Path, classnames: dict[str, str]) -> Source:
    """Read the images of ImageNet or a variant: one folder per class, named by WordNet id, in ImageNetV2 by number.

    Args:
        folder: The folder.
        classnames: Class names by WordNet id.

    Raises:
        SelfTPTError: There are fewer than two folders, a folder has no image, or its class has no name.
    """
    with os.scandir(folder) as entries:
        subfolders = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    numbered = all(name.isdecimal() for name in subfolders)
    subfolders.sort(key=int if numbered else str)
    if len(subfolders) < 2:
        raise SelfTPTError(
            f"{folder} has {len(subfolders)} folders: sort its images into one folder per class, such as n01440764"
        )
    wnids = dict(zip(map(str, range(len(classnames))), sorted(classnames), strict=True)) if numbered else {}
    names, paths, labels = [], [], []
    for label, subfolder in enumerate(subfolders):
        name, path = classnames.get(wnids.get(subfolder, subfolder)), folder / subfolder
        if name is None:
            raise SelfTPTError(f"{path} is of no class in classnames.txt: remove the folder, or add the class")
        files = sorted(
            file
            for file in os.listdir(path)
            if os.path.splitext(file)[1].lower() in SUFFIXES and not file.startswith(".")
        )
        if not files:
            raise SelfTPTError(f"the class folder {path} has no image: download its images again")
        names.append(name.replace("_", " "))
        paths += [path / file for file in files]
        labels += [label] * len(files)
    return Source(tuple(names), tuple(paths), tuple(labels))


def read_classnames(root: Path) -> dict[str, str]:
    """Read class names by WordNet id from classnames.txt of the dataset, or else of ImageNet beside it.

    Raises:
        SelfTPTError: There is no such file.
    """
    for file in (root / "classnames.txt", root.parent / "imagenet" / "classnames.txt"):
        if file.exists():
            pairs = [line.partition(" ") for line in read_lines(file)]
            return {wnid: name for wnid, _, name in pairs}
    raise SelfTPTError(
        f"no class names were found: put CoOp's classnames.txt, with lines such as 'n01440764 tench', into {root}"
    )
