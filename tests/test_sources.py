"""Labelled images from dataset objects of torchvision and Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision.datasets import FakeData, ImageFolder, VisionDataset

from selftpt import Cache, LearnConfig, SelfTPTError, Source, learn
from selftpt.data.decoding import DatasetImage, ImageError, open_image
from tests.helpers.folders import make_photos
from tests.helpers.image_files import noise
from tests.helpers.models import model

CLASSES = ("kite", "red_fox")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", CLASSES, per_class=3)


class Listed(VisionDataset):  # type: ignore[misc]
    """A dataset in memory that counts how often its images are read."""

    def __init__(self, **labels: Any) -> None:
        super().__init__(root=None)
        self.classes, self.reads = list(CLASSES), 0
        for name, values in labels.items():
            setattr(self, name, values)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        self.reads += 1
        return noise(index), index % 2


def test_torchvision_folder_equals_the_folder_itself(photos: Path) -> None:
    found, expected = Source.read(ImageFolder(str(photos))), Source.from_folder(photos)
    assert found.names == ("kite", "red fox")
    assert found.labels == expected.labels
    for one, other in zip(found.images, expected.images, strict=True):
        assert np.array_equal(np.asarray(open_image(one)), np.asarray(open_image(other)))


def test_subset_keeps_its_images_and_labels(photos: Path) -> None:
    dataset = ImageFolder(str(photos))
    found = Source.read(Subset(Subset(dataset, [5, 4, 0]), [0, 2]))
    assert found.labels == (1, 0)
    assert np.array_equal(np.asarray(open_image(found.images[0])), np.asarray(dataset[5][0]))


@pytest.mark.parametrize("attribute", ["targets", "labels", "_labels"])
def test_listed_labels_are_read_without_the_images(attribute: str) -> None:
    for values in ([0, 1, 0, 1], np.array([0, 1, 0, 1]), torch.tensor([0, 1, 0, 1])):
        dataset = Listed(**{attribute: values})
        assert Source.from_torchvision(dataset).labels == (0, 1, 0, 1)
        assert dataset.reads == 0


def test_labels_that_are_not_listed_are_read_from_the_items() -> None:
    dataset = Listed()
    assert Source.from_torchvision(dataset).labels == (0, 1, 0, 1)
    assert dataset.reads == 4


def test_torchvision_datasets_that_cannot_be_used_are_refused(photos: Path) -> None:
    with pytest.raises(SelfTPTError, match="has a transform: make it without one"):
        Source.read(ImageFolder(str(photos), transform=lambda image: image))
    with pytest.raises(SelfTPTError, match="FakeData has no class names: give them with names="):
        Source.from_torchvision(FakeData(4))
    assert Source.from_torchvision(FakeData(4, num_classes=2), ["cat", "dog"]).names == ("cat", "dog")


def test_unreadable_item_is_an_image_error() -> None:
    with pytest.raises(ImageError, match="image 0 of the dataset: cannot be read"):
        open_image(DatasetImage([], 0, 0))
    with pytest.raises(ImageError, match="image 1 of the dataset: it is of type int, not an image"):
        open_image(DatasetImage([(0, 0), (5, 0)], 1, 0))


def test_learn_from_a_dataset_equals_learn_from_its_images(tmp_path: Path) -> None:
    dataset, config = Listed(), LearnConfig(epochs=1, shots=1)
    found = learn(model(), dataset, config, cache=Cache("off"))
    images = Source.from_images([noise(i) for i in range(4)], [0, 1, 0, 1], list(CLASSES))
    expected = learn(model(), images, config, cache=Cache("off"))
    assert found.origin["classes"] == ["kite", "red fox"]
    assert found.context.shape == expected.context.shape
    named = Source.from_images([noise(i) for i in range(4)], [0, 1, 0, 1], ["kite", "red fox"])
    assert torch.equal(learn(model(), named, config, cache=Cache("off")).context, found.context)


# Hugging Face


@pytest.fixture
def hub_dataset() -> Any:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    features = datasets.Features(
        {"id": datasets.Value("int64"), "photo": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {"id": [0, 1, 2], "photo": [noise(i) for i in range(3)], "kind": [0, 1, 1]}
    return datasets.Dataset.from_dict(rows, features=features)


def test_columns_of_a_hugging_face_dataset_are_found_by_type(hub_dataset: Any) -> None:
    found = Source.read(hub_dataset)
    assert found.names == ("cat", "dog")
    assert found.labels == (0, 1, 1)
    for i, image in enumerate(found.images):
        assert np.array_equal(np.asarray(open_image(image)), np.asarray(noise(i)))


def test_columns_of_a_hugging_face_dataset_can_be_named(hub_dataset: Any) -> None:
    found = Source.from_huggingface(hub_dataset, image="photo", label="id", names=["a", "b", "c"])
    assert (found.names, found.labels) == (("a", "b", "c"), (0, 1, 2))
    with pytest.raises(SelfTPTError, match="no column 'image': it has id, photo, kind"):
        Source.from_huggingface(hub_dataset, image="image")
    with pytest.raises(SelfTPTError, match="numbers without class names"):
        Source.from_huggingface(hub_dataset, label="id")
    with pytest.raises(SelfTPTError, match="no label column was found"):
        Source.from_huggingface(hub_dataset.remove_columns("kind"))


def test_string_labels_of_a_hugging_face_dataset_are_class_names(hub_dataset: Any) -> None:
    named = hub_dataset.remove_columns("kind").add_column("label", ["dog", "cat", "dog"])
    found = Source.read(named)
    assert (found.names, found.labels) == (("cat", "dog"), (1, 0, 1))


def test_several_splits_of_a_hugging_face_dataset_are_refused(hub_dataset: Any) -> None:
    datasets = pytest.importorskip("datasets")
    for wrong in (datasets.DatasetDict(train=hub_dataset), hub_dataset.to_iterable_dataset()):
        with pytest.raises(SelfTPTError, match="must be one split"):
            Source.read(wrong)


def test_columns_of_a_csv_file_may_be_swapped(tmp_path: Path) -> None:
    """The first line then is `label,path`."""
    (tmp_path / "a.csv").write_text("label,path\ncat,1.jpg\ndog,2.jpg\n")
    source = Source.from_csv(tmp_path / "a.csv")
    assert source.images == (tmp_path / "1.jpg", tmp_path / "2.jpg")
    assert source.names == ("cat", "dog")


def test_repr_of_a_source_is_short() -> None:
    images = [np.zeros((64, 64, 3), np.uint8)] * 4
    source = Source.from_images(images, ["a", "b", "c", "d"])
    assert repr(source) == "Source(4 images of 4 classes: 'a', 'b', 'c', ...)"


def test_features_must_be_normalized() -> None:
    features = np.eye(3, dtype=np.float32)
    assert Source.from_features(features, ["a", "b", "a"]).features.shape == (3, 1, 3)
    with pytest.raises(SelfTPTError, match="features must be L2-normalised"):
        Source.from_features(50 * features, ["a", "b", "a"])
    with pytest.raises(SelfTPTError, match="features must be L2-normalised"):
        Source.from_features(features.astype(int), ["a", "b", "a"])


def test_arguments_in_the_place_of_lists_are_refused() -> None:
    with pytest.raises(SelfTPTError, match=r"must be a list of images, not the path a\.jpg: use Source.read"):
        Source.from_images("a.jpg", ["a"])
    with pytest.raises(SelfTPTError, match=r"labels that are numbers need the class names: pass names="):
        Source.from_images(["a.jpg", "b.jpg"], [0, 1])
