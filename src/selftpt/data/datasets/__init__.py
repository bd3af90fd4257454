"""The datasets of the paper and a user's own: where the images lie, splits, class names, sentences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from selftpt.data.datasets import splits
from selftpt.data.datasets.sampling import fraction, half, limit, some_classes
from selftpt.data.datasets.table import COOP, DATASETS, Spec
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError

__all__ = ["COOP", "DATASETS", "Dataset", "Spec", "fraction", "half", "limit", "read_dataset", "some_classes"]


@dataclass(frozen=True)
class Dataset:
    """Images to train and to test with, of the same classes."""

    name: str
    title: str  # as the paper's tables write it
    template: str  # the dataset's own sentence
    train: Source | None  # None: for testing only
    test: Source
    split: str  # where the split comes from
    published: bool  # it is the published split, and of the published size
    root: Path
    image_folder: str = ""  # below `root`: where the paths of its lists begin

    def few_shot(self, shots: int | None, seed: int) -> tuple[Source, str, bool]:
        """At most `shots` training images a class, or all; where the choice comes from; if the published rule has it.

        It comes from the file fewshot_{shots}_seed{seed}.json beside the split if there is one.
        """
        if self.train is None:
            raise SelfTPTError(f"{self.title} has no training images in {self.root}: learn from another dataset")
        if shots is None:
            return self.train, "all training images", True
        drawn = self.train.few(shots, seed)
        file = self.root / f"fewshot_{shots}_seed{seed}.json"
        with _readable():
            if not file.exists():
                return drawn, f"drawn here: {shots} of each class, seed {seed}", True
            rows = splits.read_rows(file, "train")
            (chosen,) = splits.to_sources(file, self.root / self.image_folder, rows)
            if chosen.names != self.train.names:
                raise SelfTPTError(f"{file} has other classes than {self.title} has here: get it again, or remove it")
            splits.check_there(file, [chosen], "put them there, or remove the list")
        if others := {*chosen.paths} - {*self.train.paths}:
            raise SelfTPTError(f"{file} has {min(others)}, which {self.split} does not train with: remove the list")
        return chosen, file.name, chosen == drawn


def read_dataset(name: str, data: Path | None) -> Dataset:
    """A dataset of the paper, by its name, below the folder `data`; or a folder of the user's own."""
    with _readable():
        if name not in DATASETS:
            return _read_own(Path(name))
        if data is None:
            raise SelfTPTError(f"where is {name}? Say with --data DIR in which folder the datasets lie")
        if not data.is_dir():
            raise SelfTPTError(f"there is no data folder {data}: make it, or give another --data DIR")
        return _read_known(name, DATASETS[name], data / DATASETS[name].folder)


def _read_known(name: str, spec: Spec, root: Path) -> Dataset:
    folder = root / spec.image_folder
    if not folder.is_dir():
        split = f", and {spec.split} from {COOP} in {root}" if spec.split and not (root / spec.split).exists() else ""
        raise SelfTPTError(f"there is no folder {folder}: put {spec.title}'s images from {spec.page} there{split}")
    read = _read_imagenet if spec.wnids else _read_split
    train, test, split = read(spec, root, folder)
    sizes = len(test.names), len(train.paths) if train else spec.size.train, len(test.paths)
    published = split == (spec.split or split) and sizes == (spec.size.classes, spec.size.train, spec.size.test)
    return Dataset(name, spec.title, spec.template, train, test, split, published, root, spec.image_folder)


def _read_imagenet(spec: Spec, root: Path, folder: Path) -> tuple[Source | None, Source, str]:
    """ImageNet has the folders train, which may be missing, and val, to test on; its kin are to test on."""
    classnames = splits.read_classnames(root)
    if spec.size.train is None:
        return None, splits.read_wnids(folder, classnames), f"the folder {folder.name}"
    test = splits.read_wnids(folder / "val", classnames)
    if not (folder / "train").is_dir():
        return None, test, "the folder val"
    train = splits.read_wnids(folder / "train", classnames)
    if train.names != test.names:
        raise SelfTPTError(f"{folder}: train and val have not the same {len(test.names)} classes: complete them")
    return train, test, "the folders train and val"


def _read_split(spec: Spec, root: Path, folder: Path) -> tuple[Source, Source, str]:
    """By the published split file, or else the dataset's own lists, or else a split made here."""
    where: str | Path
    if spec.split and (root / spec.split).exists():
        split, where = spec.split, root / spec.split
        rows = splits.read_rows(where, "train", "test")
    elif spec.lists and (files := spec.lists.files) and all((root / file).exists() for file in files):
        split, where = f"official lists: {', '.join(files)}", f"the lists of {root}"
        rows = splits.read_lists(root, spec, spec.lists)
    elif spec.split is None:
        assert spec.lists
        raise SelfTPTError(f"{root} must have the lists {', '.join(spec.lists.files)}: get them from {spec.page}")
    elif spec.class_of is None:
        raise SelfTPTError(
            f"{spec.title} needs {spec.split}, for its labels are in .mat files: put it from {COOP} in {root}"
        )
    else:
        train, test = splits.cut(splits.read_classes(folder, spec))
        return train, test, splits.MADE
    train, test = splits.to_sources(where, folder, rows)
    splits.check_there(where, (train, test), f"get them from {spec.page}, or another list")
    return train, test, split


def _read_own(root: Path) -> Dataset:
    """A user's folder: with a split.json, or with the folders train and test, or with a folder a class."""
    if not root.is_dir():
        raise SelfTPTError(f"{root} is neither a folder nor a dataset of the paper, which are {', '.join(DATASETS)}")
    if (root / "split.json").exists():
        split, file = "split.json", root / "split.json"
        train, test = splits.to_sources(file, root, splits.read_rows(file, "train", "test"))
        splits.check_there(file, (train, test), "put them there, or take them out of the list")
    elif (root / "train").is_dir() and (root / "test").is_dir():
        split = "the folders train and test"
        train, test = Source.from_folder(root / "train"), Source.from_folder(root / "test")
        if odd := sorted({*train.names} ^ {*test.names}):
            raise SelfTPTError(f"{root}: the class {odd[0]!r} is in only one of the folders train and test")
    else:
        split, whole = splits.MADE, Source.from_folder(root)
        if {*whole.names} <= {"train", "val", "test"}:
            raise SelfTPTError(f"{root} must have both train and test, or else a folder a class")
        train, test = splits.cut(whole)
    names = splits.plain_names(root, test.names)
    train, test = replace(train, names=names), replace(test, names=names)
    if both := {*train.paths} & {*test.paths}:
        raise SelfTPTError(f"{root}: {min(both)} is both to train and to test: take it out of one list")
    name = root.resolve().name
    name = f"./{name}" if name in DATASETS else name  # not to be taken for the paper's
    return Dataset(name, name, "a photo of a {}.", train, test, split, False, root)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SelfTPTError(f"cannot read {error.filename}: {error.strerror}") from error
