"""Train and test images of a dataset: from a split file, from its own lists, from its folders."""

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

Row = tuple[str, int, str]  # a image's path below its folder, label and class name
MADE = "made here: 50/20/30 % of each class, seed 1"


def read_lines(file: Path) -> list[str]:
    """The lines of a text file that say something."""
    lines = [line.strip() for line in _text(file).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SelfTPTError(f"{file} is not a text in UTF-8: get it again") from error


def read_rows(file: Path, *parts: str) -> list[list[Row]]:
    """Parts of a split file or few-shot list: {part: [[path, label, class name], ...], ...}."""
    try:
        found: Any = json.loads(_text(file))
    except ValueError as error:
        raise SelfTPTError(f"{file} is not JSON ({error}): get it again") from error
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
    """A source of each part, all with the same names; `where` is what lists them."""
    names: dict[int, str] = {}
    for _, label, name in (row for part in parts for row in part):
        if names.setdefault(label, name) != name:
            raise SelfTPTError(f"{where}: label {label} has two names, {names[label]!r} and {name!r}: mend one of them")
    for label in range(len(names)):
        if label not in names:
            raise SelfTPTError(
                f"{where}: no image has label {label}, and others go up to {max(names)}: labels must be 0, 1, 2, ..."
            )
    told = tuple(names[label].replace("_", " ") for label in range(len(names)))
    return [
        Source(told, tuple(folder / path for path, _, _ in part), tuple(label for _, label, _ in part))
        for part in parts
    ]


def check_there(where: str | Path, sources: Sequence[Source], cure: str) -> None:
    """Refuse a list of images that do not exist; each folder is read once, no file is touched."""
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
            f"{cure}"
        )


def read_lists(root: Path, spec: Spec, lists: Lists) -> list[list[Row]]:
    """Train and test as the dataset's own lists have them."""
    assert spec.class_of is not None
    parts = [[(spec.class_of(line), line) for line in read_lines(root / file)] for file in (lists.train, lists.test)]
    if lists.classes is None:
        order = sorted({key for part in parts for key, _ in part})
    else:
        order = [lists.class_in(line) for line in read_lines(root / lists.classes)]
    labels = {key: label for label, key in enumerate(order)}
    for key, line in (entry for part in parts for entry in part):
        if key not in labels:
            raise SelfTPTError(f"the lists of {root}: {line!r} is of no class in {lists.classes}: get them again")
    return [[(lists.path(line), labels[key], spec.name_of(key)) for key, line in part] for part in parts]


def read_classes(folder: Path, spec: Spec) -> Source:
    """All images below a folder, by the class that each one's path tells."""
    assert spec.class_of is not None
    groups: dict[str, list[Path]] = {}
    for path in images_in(folder):
        groups.setdefault(spec.class_of(path.relative_to(folder).as_posix()), []).append(path)
    groups = {key: groups[key] for key in sorted(groups) if spec.name_of(key)}
    if len(groups) < 2:
        raise SelfTPTError(f"{folder} has images of {len(groups)} classes, two at least are needed: get them again")
    return Source(
        plain_names(folder, [spec.name_of(key) for key in groups]),
        tuple(path for paths in groups.values() for path in paths),
        tuple(label for label, paths in enumerate(groups.values()) for _ in paths),
    )


def plain_names(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Class names from those of folders: "_" is a space."""
    plain = tuple(name.replace("_", " ") for name in names)
    for i, name in enumerate(plain):
        if name in plain[:i]:
            one, other = names[plain.index(name)], names[i]
            raise SelfTPTError(f"{folder}: the classes {one!r} and {other!r} are both {name!r}: rename one of them")
    return plain


def cut(source: Source) -> list[Source]:
    """Train and test for images that have no split: 50 % and 30 % of each class, 20 % stay for validation."""
    rng = random.Random(1)
    train: list[int] = []
    test: list[int] = []
    for label, places in by_label(source).items():
        count = len(places)
        if count < 2:
            raise SelfTPTError(
                f"the class {source.names[label]!r} has one image, {source.paths[places[0]]}: "
                "to train and to test takes two at least"
            )
        rng.shuffle(places)
        middle = round(0.5 * count)
        train += places[:middle]
        test += places[min(middle + round(0.2 * count), count - 1) :]
    return [
        Source(source.names, tuple(source.paths[i] for i in part), tuple(source.labels[i] for i in part))
        for part in (train, test)
    ]


def read_wnids(folder: Path, classnames: dict[str, str]) -> Source:
    """Images of ImageNet or its kin: a folder a class, its name a WordNet id, or a number in ImageNetV2."""
    with os.scandir(folder) as entries:
        subs = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    numbered = all(sub.isdecimal() for sub in subs)
    subs.sort(key=int if numbered else str)
    if len(subs) < 2:
        raise SelfTPTError(
            f"{folder} has {len(subs)} folders: sort its images into a folder a class, such as n01440764"
        )
    wnids = dict(zip(map(str, range(len(classnames))), sorted(classnames), strict=True)) if numbered else {}
    names, paths, labels = [], [], []
    for label, sub in enumerate(subs):
        name, place = classnames.get(wnids.get(sub, sub)), folder / sub
        if name is None:
            raise SelfTPTError(f"{place} is of no class that classnames.txt names: take it out or mend the file")
        files = sorted(
            file
            for file in os.listdir(place)
            if os.path.splitext(file)[1].lower() in SUFFIXES and not file.startswith(".")
        )
        if not files:
            raise SelfTPTError(f"the class folder {place} has no image: get them again")
        names.append(name.replace("_", " "))
        paths += [place / file for file in files]
        labels += [label] * len(files)
    return Source(tuple(names), tuple(paths), tuple(labels))


def read_classnames(root: Path) -> dict[str, str]:
    """WordNet ids to class names: a dataset's own classnames.txt, or else ImageNet's beside it."""
    places = [root / "classnames.txt", root.parent / "imagenet" / "classnames.txt"]
    for file in places:
        if file.exists():
            pairs = [line.partition(" ") for line in read_lines(file)]
            return {wnid: name for wnid, _, name in pairs}
    raise SelfTPTError(
        f"no class names: put CoOp's classnames.txt, a line such as 'n01440764 tench' a class, in {root}"
    )
