"""Labelled images from folders, CSV files, lists and datasets; images by path, folder or pattern."""

from __future__ import annotations

import csv
import glob
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeAlias

from selftpt.data.decoding import SUFFIXES, DatasetImage, ImageInput, is_tensor
from selftpt.errors import SelfTPTError
from selftpt.names import check_names

if TYPE_CHECKING:  # files are listed without importing torch
    from numpy.typing import NDArray
    from torch import Tensor


class IndexedDataset(Protocol):
    """A dataset with a length, whose items are accessed by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


SourceLike: TypeAlias = str | os.PathLike[str] | IndexedDataset


@dataclass(frozen=True, repr=False)
class Source:
    """Labelled images to learn from or to test on.

    Attributes:
        names: The class names.
        images: Paths, PIL images, arrays or tensors. Empty if there are features instead.
        labels: The index of each image's class.
        features: L2-normalised image features [N, crops, D], instead of images.

    Raises:
        SelfTPTError: The number or the range of the labels, or the shape of the features, is wrong.

    Example:
        >>> import numpy as np
        >>> from selftpt import Source
        >>> photos = [np.zeros((32, 32, 3), dtype=np.uint8), np.ones((32, 32, 3), dtype=np.uint8)]
        >>> Source.from_images(photos, ["cat", "dog"]).names
        ('cat', 'dog')
    """

    names: tuple[str, ...]
    images: tuple[ImageInput, ...]
    labels: tuple[int, ...]
    features: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", check_names(self.names))
        if self.features is not None and not is_tensor(self.features):
            raise SelfTPTError(f"the features of a source must be a tensor, not {type(self.features).__name__}")
        count = len(self.images) if self.features is None else len(self.features)
        if self.features is not None and (self.images or self.features.ndim != 3):
            raise SelfTPTError("a source must have either images, or features of shape [N, crops, D]")
        if len(self.labels) != count:
            raise SelfTPTError(
                f"a source must have one label per image, not {count} images and {len(self.labels)} labels"
            )
        if self.labels and not 0 <= min(self.labels) <= max(self.labels) < len(self.names):
            raise SelfTPTError(f"the labels of a source must be indices of its {len(self.names)} class names")

    def __repr__(self) -> str:
        what = "images" if self.features is None else "features"
        names = ", ".join(map(repr, self.names[:3])) + (", ..." if len(self.names) > 3 else "")
        return f"Source({len(self.labels)} {what} of {len(self.names)} classes: {names})"

    @classmethod
    def read(cls, source: Source | SourceLike) -> Source:
        """Read labelled images.

        Args:
            source: A folder with one folder of images per class, a CSV file of image paths and class names, a dataset
                of torchvision or Hugging Face, or a `Source`, which is returned as it is.

        Returns:
            The labelled images. Images of folders and CSV files are paths; they are read when they are needed.

        Raises:
            SelfTPTError: The source cannot be read, or is none of these.
        """
        if isinstance(source, Source):
            return source
        if isinstance(source, str | os.PathLike):
            return cls.from_csv(source) if Path(source).suffix.lower() == ".csv" else cls.from_folder(source)
        if hasattr(source, "column_names"):
            return cls.from_huggingface(source)
        if hasattr(source, "__getitem__") and hasattr(_base_dataset(source), "classes"):
            return cls.from_torchvision(source)
        raise SelfTPTError(
            "a source must be a folder, a CSV file, a dataset of torchvision or Hugging Face, or a selftpt.Source, "
            f"not {type(source).__name__}: make a source of lists with Source.from_images"
        )

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Source:
        """Read a folder with one folder of images per class, named after the class.

        Args:
            folder: The folder. Hidden files and folders in it are ignored.

        Returns:
            The paths of all images below the class folders. Classes are in alphabetical order.

        Raises:
            SelfTPTError: The folder cannot be read, has fewer than two classes, or a class has no image.
        """
        root = Path(folder)
        try:
            if not root.is_dir():
                wrong = "is neither a folder nor a CSV file" if root.exists() else "does not exist"
                raise SelfTPTError(f"{root} {wrong}: give a folder with one folder of images per class, or a CSV file")
            classes = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError as error:
            raise SelfTPTError(f"cannot read the folder {root}: {error.strerror}") from error
        if len(classes) < 2:
            raise SelfTPTError(
                f"{root} must have one folder of images per class, at least two; folders in it: {len(classes)}"
            )
        images: list[Path] = []
        labels: list[int] = []
        for label, place in enumerate(classes):
            found = images_in(place)
            if not found:
                raise SelfTPTError(f"the class folder {place} has no image")
            images += found
            labels += [label] * len(found)
        return cls(tuple(path.name for path in classes), tuple(images), tuple(labels))

    @classmethod
    def from_csv(cls, file: str | os.PathLike[str]) -> Source:
        """Read a CSV file with two columns, image path and class name.

        Args:
            file: The CSV file, in UTF-8. A first line `path,label` is optional; with `label,path`, the columns are in
                that order. Relative paths are resolved against the folder of the file.

        Returns:
            The paths of the images, in the order of the file. Classes are in alphabetical order.

        Raises:
            SelfTPTError: The file cannot be read, a line is invalid, or there are fewer than two classes.
        """
        path = Path(file)
        rows: list[tuple[Path, str]] = []
        columns = (0, 1)
        try:
            with path.open(encoding="utf-8-sig", newline="") as lines:
                for number, row in enumerate(csv.reader(lines, strict=True), 1):
                    cells = [cell.strip() for cell in row]
                    if not row:
                        continue
                    if number == 1 and sorted(cell.lower() for cell in cells) == ["label", "path"]:
                        columns = (0, 1) if cells[0].lower() == "path" else (1, 0)
                        continue
                    if len(row) != 2 or not all(cells):
                        raise SelfTPTError(
                            f"{path}, line {number}: expected an image path and a class name, separated by a comma"
                        )
                    image, label = (cells[column] for column in columns)
                    rows.append((path.parent / image, label))
        except FileNotFoundError as error:
            raise SelfTPTError(f"{path} does not exist") from error
        except OSError as error:
            raise SelfTPTError(f"cannot read {path}: {error.strerror}") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise SelfTPTError(f"{path} is not a CSV file in UTF-8: {error}") from error
        if len({name for _, name in rows}) < 2:
            raise SelfTPTError(f"{path} must name images of at least two classes")
        return cls.from_images([image for image, _ in rows], [name for _, name in rows])

    @classmethod
    def from_images(
        cls, images: Sequence[ImageInput], labels: Sequence[str | int], names: Sequence[str] | None = None
    ) -> Source:
        """Make a source from a list of images.

        Args:
            images: Paths, PIL images, arrays or tensors, as `Classifier.predict` takes them.
            labels: The class of each image: its name, or its index in `names`.
            names: The class names; by default those of the labels in alphabetical order.

        Returns:
            The source, with labels as indices of the class names.

        Raises:
            SelfTPTError: A label is not one of the class names, or the numbers of images and labels differ.
        """
        if isinstance(images, str | os.PathLike):
            raise SelfTPTError(f"images must be a list of images, not the path {os.fspath(images)}: use Source.read")
        return cls(*_indexed(labels, names, tuple(images)))

    @classmethod
    def from_torchvision(cls, dataset: IndexedDataset, names: Sequence[str] | None = None) -> Source:
        """Make a source from a torchvision dataset, or from a `torch.utils.data.Subset` of one.

        Images are read from the dataset when they are needed.

        Args:
            dataset: Its items are pairs of an image and a label. It must not have a transform.
            names: The class names; by default `dataset.classes`, with spaces instead of underscores.

        Returns:
            The source.

        Raises:
            SelfTPTError: The dataset has a transform, or no labels or class names can be found.
        """
        base = _base_dataset(dataset)
        if (
            getattr(base, "transforms", None)
            or getattr(base, "transform", None)
            or getattr(base, "target_transform", None)
        ):
            raise SelfTPTError("the dataset has a transform: make it without one, because selftpt preprocesses images")
        if names is None:
            names = [name.replace("_", " ") for name in getattr(base, "classes", ()) if isinstance(name, str)]
            if not names:
                raise SelfTPTError(f"{type(base).__name__} has no class names: give them with names=[...]")
        labels = [int(label) for label in _torchvision_labels(dataset)]
        images = [DatasetImage(dataset, i, 0) for i in range(len(labels))]
        return cls(check_names(names), tuple(images), tuple(labels))

    @classmethod
    def from_huggingface(
        cls,
        dataset: IndexedDataset,
        image: str | None = None,
        label: str | None = None,
        names: Sequence[str] | None = None,
    ) -> Source:
        """Make a source from a `datasets.Dataset` of Hugging Face.

        Images are read from the dataset when they are needed.

        Args:
            dataset: One split, not a `DatasetDict`, and not streamed.
            image: The column of the images; by default the only column of type `Image`, or else "image" or "img".
            label: The column of the labels; by default the only column of type `ClassLabel`, or else "label" or
                "labels".
            names: The class names; by default those of the `ClassLabel`, or the labels themselves if they are strings.

        Returns:
            The source.

        Raises:
            SelfTPTError: The dataset is not one split, or a column or the class names cannot be found.
        """
        features = getattr(dataset, "features", None)
        if isinstance(dataset, dict) or features is None or not hasattr(dataset, "__len__"):
            raise SelfTPTError('the dataset must be one split, not streamed: choose one, such as dataset["train"]')
        image = _column(features, image, "Image", ("image", "img"))
        label = _column(features, label, "ClassLabel", ("label", "labels"))
        known = getattr(features[label], "names", None) if names is None else names
        labels = list(dataset[label])
        images = [DatasetImage(dataset, i, image) for i in range(len(labels))]
        if known is None and not all(isinstance(one, str) for one in labels):
            raise SelfTPTError(f"the column {label!r} has numbers without class names: give them with names=[...]")
        return cls.from_images(images, labels, known)

    @classmethod
    def from_features(
        cls, features: Tensor | NDArray[Any], labels: Sequence[str | int], names: Sequence[str] | None = None
    ) -> Source:
        """Make a source from L2-normalised image features.

        Args:
            features: Features [N, D], or [N, crops, D] for several crops of each image, which are used in turn, one per
                epoch.
            labels: The class of each image: its name, or its index in `names`.
            names: The class names; by default those of the labels in alphabetical order.

        Returns:
            The source, with features [N, crops, D] instead of images.

        Raises:
            SelfTPTError: The features have another shape or are not L2-normalised, a label is not one of the class
                names, or the numbers of features and labels differ.
        """
        import numpy as np
        import torch

        tensor = torch.as_tensor(features) if isinstance(features, np.ndarray) else features
        crops = tensor[:, None] if getattr(tensor, "ndim", None) == 2 else tensor
        source = cls(*_indexed(labels, names, ()), crops)
        if not crops.is_floating_point() or not torch.allclose(crops.norm(dim=-1), torch.ones(()).to(crops), atol=1e-2):
            raise SelfTPTError("features must be L2-normalised: use torch.nn.functional.normalize(features, dim=-1)")
        return source

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of the images, which must all be files."""
        assert all(isinstance(image, Path) for image in self.images)
        return self.images  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Sequence[int]) -> Source:
        """Select images.

        Args:
            indices: The positions of the images to keep, in the new order.

        Returns:
            A source with these images or features and the same class names.
        """
        return Source(
            self.names,
            tuple(self.images[i] for i in indices) if self.features is None else (),
            tuple(self.labels[i] for i in indices),
            None if self.features is None else self.features[list(indices)],
        )

    def few(self, shots: int | None, seed: int) -> Source:
        """Sample at most `shots` images per class as CoOp does: class by class, in the order of first appearance.

        Args:
            shots: Number of images per class; None keeps all images.
            seed: The seed of the sample.

        Returns:
            A source with the sampled images. A class with fewer than `shots` images keeps all of them.
        """
        if shots is None:
            return self
        rng = random.Random(seed)
        by_class: dict[int, list[int]] = {}
        for i, label in enumerate(self.labels):
            by_class.setdefault(label, []).append(i)
        return self.select(
            [
                i
                for members in by_class.values()
                for i in (rng.sample(members, shots) if len(members) >= shots else members)
            ]
        )


def _base_dataset(dataset: Any) -> Any:
    """Return the dataset below one or more `torch.utils.data.Subset` objects."""
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        dataset = dataset.dataset
    return dataset


def _torchvision_labels(dataset: Any) -> Sequence[Any]:
    """Return the labels of a dataset. Its images are read only if it has no list of labels."""
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        labels = _torchvision_labels(dataset.dataset)
        return [labels[i] for i in dataset.indices]
    for name in ("targets", "labels", "_labels"):
        if (listed := getattr(dataset, name, None)) is not None and len(listed) == len(dataset):
            return listed.tolist() if hasattr(listed, "tolist") else listed  # type: ignore[no-any-return]
    return [dataset[i][1] for i in range(len(dataset))]


def _column(features: Any, name: str | None, kind: str, usual: Sequence[str]) -> str:
    """Find a column of a Hugging Face dataset: by name if given, else by type, else by its usual names."""
    if name is not None:
        if name not in features:
            raise SelfTPTError(f"the dataset has no column {name!r}: it has {', '.join(features)}")
        return name
    found = [column for column, feature in features.items() if type(feature).__name__ == kind]
    found = found if len(found) == 1 else [column for column in usual if column in features]
    if not found:
        raise SelfTPTError(f"no {usual[0]} column was found: choose one with {usual[0]}=, from {', '.join(features)}")
    return str(found[0])


def _indexed(
    labels: Sequence[str | int], names: Sequence[str] | None, images: tuple[ImageInput, ...]
) -> tuple[tuple[str, ...], tuple[ImageInput, ...], tuple[int, ...]]:
    """Return class names, images, and the labels as indices of the names."""
    if names is None and not all(isinstance(label, str) for label in labels):
        raise SelfTPTError("labels that are numbers need the class names: pass names=[...]")
    known = check_names(sorted({*labels}) if names is None else names)
    index_of = {name: i for i, name in enumerate(known)}
    indices = []
    for i, label in enumerate(labels):
        found = index_of.get(label) if isinstance(label, str) else int(label)
        if found is None:
            raise SelfTPTError(f"label {i + 1} of {len(labels)}, {label!r}, is not one of the class names")
        indices.append(found)
    return known, images, tuple(indices)


def images_in(folder: Path) -> list[Path]:
    """List the image files below a folder in sorted order, without hidden files and folders.

    Raises:
        SelfTPTError: A folder cannot be read.
    """
    found = []
    for root, folders, files in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(root, name) for name in files if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
        ]
    return sorted(found)


def _raise_unreadable(error: OSError) -> None:
    raise SelfTPTError(f"cannot read the folder {error.filename}: {error.strerror}")


def is_place(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder or a glob pattern, which `find_images` expands, rather than one image."""
    return os.path.isdir(path) or (glob.has_magic(os.fspath(path)) and not os.path.exists(path))


def find_images(places: Iterable[str | os.PathLike[str]], listing: TextIO | None = None) -> Iterator[Path]:
    """Yield the paths of images.

    Args:
        places: Files, folders, which stand for all images below them, and glob patterns. "-" stands for the paths in
            `listing`.
        listing: A text with one path per line. These paths are not checked.

    Raises:
        SelfTPTError: A file or folder does not exist, a folder has no image, or a pattern matches no file.
    """
    for place in places:
        text = os.fspath(place)
        path = Path(text)
        if text == "-" and listing is not None:
            yield from (Path(line.rstrip("\r\n")) for line in listing if line.strip())
            continue
        if os.path.isdir(text):
            found = images_in(path)
            if not found:
                raise SelfTPTError(f"{path}: the folder has no image")
            yield from found
        elif os.path.exists(text):
            yield path
        elif glob.has_magic(text):
            matches = sorted(match for match in map(Path, glob.glob(text, recursive=True)) if not match.is_dir())
            if not matches:
                raise SelfTPTError(f"{text}: no file matches this pattern")
            yield from matches
        else:
            raise SelfTPTError(f"{text} does not exist")
