"""The datasets of the paper, and folders of the user: their images, splits, class names and templates."""

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
    """A dataset with training and test images of the same classes.

    Attributes:
        name: The name.
        title: The title in the paper's tables.
        template: The dataset's own template.
        train: The training images; None for a dataset that is only tested on.
        test: The test images.
        split: The origin of the split.
        published: Whether this is the published split, with the published numbers of classes and images.
        root: The folder of the dataset.
        image_folder: The folder below `root` that the paths of its lists are relative to.
    """

    name: str
    title: str
    template: str
    train: Source | None
    test: Source
    split: str
    published: bool
    root: Path
    image_folder: str = ""

    def few_shot(self, shots: int | None, seed: int) -> tuple[Source, str, bool]:
        """Choose at most `shots` training images per class.

        The file fewshot_{shots}_seed{seed}.json in the dataset's folder decides, if it exists. Otherwise the images are
        sampled.

        Args:
            shots: The number of images; None for all.
            seed: The seed of the sample.

        Returns:
            The images, the origin of the choice, and whether it is the choice that CoOp's sampling rule makes.

        Raises:
            SelfTPTError: There are no training images, or the file does not fit the dataset.
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
                raise SelfTPTError(f"{file} has other classes than {self.title} here: download it again, or remove it")
            splits.check_images_exist(file, [chosen], "add them, or remove the list")
        if others := {*chosen.paths} - {*self.train.paths}:
            raise SelfTPTError(
                f"{file} lists {min(others)}, which is no training image of {self.split}: remove the list"
            )
        return chosen, file.name, chosen == drawn


def read_dataset(name: str, data: Path | None) -> Dataset:
    """Read a dataset.

    Args:
        name: The name of a dataset of the paper, or a folder of the user.
        data: The folder that contains the datasets of the paper; None if there is none.

    Raises:
        SelfTPTError: The dataset is missing or incomplete.
    """
    with _readable():
        if name not in DATASETS:
            return _read_own(Path(name))
        if data is None:
            raise SelfTPTError(
                f"no folder is given for the dataset {name}: give --data FOLDER, which contains the datasets"
            )
        if not data.is_dir():
            raise SelfTPTError(f"the data folder {data} does not exist: create it, or give another --data FOLDER")
        return _read_known(name, DATASETS[name], data / DATASETS[name].folder)


def _read_known(name: str, spec: Spec, root: Path) -> Dataset:
    folder = root / spec.image_folder
    if not folder.is_dir():
        split = f", and {spec.split} from {COOP} into {root}" if spec.split and not (root / spec.split).exists() else ""
        raise SelfTPTError(f"the folder {folder} does not exist: put {spec.title} from {spec.page} there{split}")
    read = _read_imagenet if spec.wnids else _read_split
    train, test, split = read(spec, root, folder)
    sizes = len(test.names), len(train.paths) if train else spec.size.train, len(test.paths)
    published = split == (spec.split or split) and sizes == (spec.size.classes, spec.size.train, spec.size.test)
    return Dataset(name, spec.title, spec.template, train, test, split, published, root, spec.image_folder)


def _read_imagenet(spec: Spec, root: Path, folder: Path) -> tuple[Source | None, Source, str]:
    """Read ImageNet from its folders train, which may be missing, and val, or a variant, which has only test images."""
    classnames = splits.read_classnames(root)
    if spec.size.train is None:
        return None, splits.read_wnids(folder, classnames), f"the folder {folder.name}"
    test = splits.read_wnids(folder / "val", classnames)
    if not (folder / "train").is_dir():
        return None, test, "the folder val"
    train = splits.read_wnids(folder / "train", classnames)
    if train.names != test.names:
        raise SelfTPTError(f"{folder}: train and val must have the same classes: add the missing folders")
    return train, test, "the folders train and val"


def _read_split(spec: Spec, root: Path, folder: Path) -> tuple[Source, Source, str]:
    """Read the published split file, or else the dataset's own lists, or else split the images at random."""
    where: str | Path
    if spec.split and (root / spec.split).exists():
        split, where = spec.split, root / spec.split
        rows = splits.read_rows(where, "train", "test")
    elif spec.lists and (files := spec.lists.files) and all((root / file).exists() for file in files):
        split, where = f"official lists: {', '.join(files)}", f"the lists of {root}"
        rows = splits.read_lists(root, spec, spec.lists)
    elif spec.split is None:
        assert spec.lists
        raise SelfTPTError(f"{root} must contain {', '.join(spec.lists.files)}: get them from {spec.page}")
    elif spec.class_of is None:
        raise SelfTPTError(
            f"{spec.title} needs {spec.split}, because its own labels are in .mat files, which selftpt does not read: "
            f"get it from {COOP} and put it into {root}"
        )
    else:
        train, test = splits.random_split(splits.read_classes(folder, spec))
        return train, test, splits.RANDOM_SPLIT
    train, test = splits.to_sources(where, folder, rows)
    splits.check_images_exist(where, (train, test), f"get them from {spec.page}, or use another list")
    return train, test, split


def _read_own(root: Path) -> Dataset:
    """Read a folder of the user: with a split.json, with folders train and test, or with one folder per class."""
    if not root.is_dir():
        raise SelfTPTError(
            f"{root} is neither a folder nor a dataset of the paper: choose one of {', '.join(DATASETS)}"
        )
    if (root / "split.json").exists():
        split, file = "split.json", root / "split.json"
        train, test = splits.to_sources(file, root, splits.read_rows(file, "train", "test"))
        splits.check_images_exist(file, (train, test), "add them, or remove them from the list")
    elif (root / "train").is_dir() and (root / "test").is_dir():
        split = "the folders train and test"
        train, test = Source.from_folder(root / "train"), Source.from_folder(root / "test")
        if odd := sorted({*train.names} ^ {*test.names}):
            raise SelfTPTError(
                f"{root}: the class {odd[0]!r} is in only one of the folders train and test: add it to both"
            )
    else:
        split, images = splits.RANDOM_SPLIT, Source.from_folder(root)
        if {*images.names} <= {"train", "val", "test"}:
            raise SelfTPTError(f"{root} must have both train and test, or one folder per class")
        train, test = splits.random_split(images)
    names = splits.names_from_folders(root, test.names)
    train, test = replace(train, names=names), replace(test, names=names)
    if both := {*train.paths} & {*test.paths}:
        raise SelfTPTError(f"{root}: {min(both)} is in train and in test: remove it from one of them")
    name = root.resolve().name
    name = f"./{name}" if name in DATASETS else name  # distinguishes it from the paper's
    return Dataset(name, name, "a photo of a {}.", train, test, split, False, root)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Turn an OSError of the block into a SelfTPTError."""
    try:
        yield
    except OSError as error:
        raise SelfTPTError(f"cannot read {error.filename}: {error.strerror}") from error
