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
RANDOM_SPLIT = "made here: 50/20/30 % of each class, seed 1"  # written to records, so the text must not change


def read_lines(file: Path) -> list[str]:
    """Read the lines of a text file, without empty lines and comments."""
    lines = [line.strip() for line in _text(file).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SelfTPTError(f"{file} is not a text file in UTF-8: save it as UTF-8, or download it again") from error


def read_rows(file: Path, *parts: str) -> list[list[Row]]:
    """Read parts of a split file or of a few-shot list: {part: [[path, label, class name], ...], ...}.

    Raises:
        SelfTPTError: The file cannot be parsed, a part is missing, or a label is negative.
    """
    try:
        found: Any = json.loads(_text(file))
    except (ValueError, RecursionError) as error:  # RecursionError: too many nested lists or objects
        raise SelfTPTError(f"{file} is not valid JSON ({error}): correct the file, or download it again") from error
    for part in parts:
        if not isinstance(found, dict) or not isinstance(found.get(part), list) or not found[part]:
            raise SelfTPTError(
                f'{file} has no images in "{part}": it must contain "{part}": [[path, label, class name], ...]'
            )
        for row in found[part]:
            if not isinstance(row, list) or [type(value) for value in row] != [str, int, str]:
                raise SelfTPTError(
                    f'{file}: {json.dumps(row)} in "{part}" is not of the form [path, label, class name]'
                )
            if row[1] < 0:
                raise SelfTPTError(
                    f'{file}: {json.dumps(row)} in "{part}" has a negative label: number the labels 0, 1, 2, ...'
                )
    return [[(path, label, name) for path, label, name in found[part]] for part in parts]


def to_sources(where: str | Path, folder: Path, parts: Sequence[Sequence[Row]]) -> list[Source]:
    """Convert each part to a `Source`. All sources have the same class names.

    Args:
        where: The origin of the rows, for error messages.
        folder: The folder that the paths are relative to.
        parts: The rows of each part.

    Raises:
        SelfTPTError: A label has two names, or a label is missing.
    """
    names: dict[int, str] = {}
    for _, label, name in (row for part in parts for row in part):
        if names.setdefault(label, name) != name:
            raise SelfTPTError(f"{where}: label {label} has two names, {names[label]!r} and {name!r}: give it one name")
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
        where: The origin of the rows, for the error message.
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
            f"{len(missing)} of the {len(paths)} images in {where} do not exist (first: {missing[0]}): {hint}"
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
            raise SelfTPTError(
                f"the lists of {root}: the class of {line!r} is not in {lists.classes}: download the lists again"
            )
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
        raise SelfTPTError(
            f"{folder} must have images of at least two classes, and has {len(groups)}: download the dataset again"
        )
    return Source(
        names_from_folders(folder, [spec.name_of(key) for key in groups]),
        tuple(path for paths in groups.values() for path in paths),
        tuple(label for label, paths in enumerate(groups.values()) for _ in paths),
    )


def names_from_folders(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Convert folder names to class names: underscores become spaces.

    Raises:
        SelfTPTError: Two folders have the same class name.
    """
    plain = tuple(name.replace("_", " ") for name in names)
    for i, name in enumerate(plain):
        if name in plain[:i]:
            first, second = names[plain.index(name)], names[i]
            origin = f" (from {first!r} and {second!r})" if first != second else ""
            raise SelfTPTError(f"{folder}: two classes have the name {name!r}{origin}: rename one of them")
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
    """Read ImageNet or one of its variants: one folder per class, named by WordNet id or, in ImageNetV2, by number.

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
            f"{folder} must have at least two class folders, and has {len(subfolders)}: "
            "use one folder per class, named by WordNet id (such as n01440764)"
        )
    wnids = dict(zip(map(str, range(len(classnames))), sorted(classnames), strict=True)) if numbered else {}
    names, paths, labels = [], [], []
    for label, subfolder in enumerate(subfolders):
        name, path = classnames.get(wnids.get(subfolder, subfolder)), folder / subfolder
        if name is None:
            raise SelfTPTError(f"the folder {path} is not in classnames.txt: remove the folder, or add the class")
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
    """Read class names by WordNet id.

    They come from `classnames.txt` of the dataset, or else from `imagenet/classnames.txt` in the parent folder.

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
