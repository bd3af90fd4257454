"""Datasets: layouts, splits, class names, few-shot samples, subsets, and error messages."""

from __future__ import annotations

import itertools
import json
import os
import random
import runpy
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selftpt.cli import datasets as listing
from selftpt.data.datasets import DATASETS, Dataset, fraction, half, limit, read_dataset, some_classes
from selftpt.data.datasets.table import Size
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError
from tests.helpers.datasets import LISTED, WNIDS, make_tree, rows_of
from tests.helpers.folders import make_photos

NAMES = {
    "imagenet": tuple(WNIDS.values()),
    "caltech101": ("face", "accordion", "airplane", "cougar body"),
    "oxford_pets": ("abyssinian", "american bulldog", "bengal"),
    "stanford_cars": ("2000 AM General Hummer SUV", "2012 Audi TTS Coupe"),
    "oxford_flowers": ("pink primrose", "colt's foot"),
    "food101": ("apple pie", "baby back ribs"),
    "fgvc_aircraft": ("707-320", "Cessna 172", "An-12"),
    "sun397": ("abbey", "outdoor church", "indoor church", "outdoor control tower"),
    "dtd": ("banded", "polka-dotted"),
    "eurosat": ("Annual Crop Land", "Forest", "Highway or Road", "Sea or Lake"),
    "ucf101": ("Apply Eye Makeup", "Hammering", "Hammer Throw"),
    "imagenetv2": tuple(WNIDS.values()),
    "imagenet_sketch": tuple(WNIDS.values()),
    "imagenet_a": ("tiger shark", "hammerhead shark", "electric ray"),
    "imagenet_r": ("tiger shark", "hammerhead shark", "electric ray"),
}
SIZES = {  # number of classes, then of training, validation and test images
    "imagenet": (1000, 1281167, None, 50000),
    "caltech101": (100, 4128, 1649, 2465),
    "oxford_pets": (37, 2944, 736, 3669),
    "stanford_cars": (196, 6509, 1635, 8041),
    "oxford_flowers": (102, 4093, 1633, 2463),
    "food101": (101, 50500, 20200, 30300),
    "fgvc_aircraft": (100, 3334, 3333, 3333),
    "sun397": (397, 15880, 3970, 19850),
    "dtd": (47, 2820, 1128, 1692),
    "eurosat": (10, 13500, 5400, 8100),
    "ucf101": (101, 7639, 1898, 3783),
    "imagenetv2": (1000, None, None, 10000),
    "imagenet_sketch": (1000, None, None, 50889),
    "imagenet_a": (200, None, None, 7500),
    "imagenet_r": (200, None, None, 30000),
}
TEMPLATES = {
    "oxford_pets": "a photo of a {}, a type of pet.",
    "oxford_flowers": "a photo of a {}, a type of flower.",
    "fgvc_aircraft": "a photo of a {}, a type of aircraft.",
    "food101": "a photo of {}, a type of food.",
    "dtd": "{} texture.",
    "eurosat": "a centered satellite photo of {}.",
    "ucf101": "a photo of a person doing {}.",
}


def per_class(source: Source | None) -> set[int]:
    """Return the set of numbers of images per class."""
    assert source is not None
    assert sorted(set(source.labels)) == list(range(len(source.names)))
    return set(Counter(source.labels).values())


def refused(name: str, data: Path | None, *words: str) -> None:
    with pytest.raises(SelfTPTError) as error:
        read_dataset(name, data)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


# The 15 datasets of the paper


def test_table_has_the_datasets_templates_and_sizes_of_the_paper() -> None:
    assert list(DATASETS) == list(NAMES)
    assert {name: spec.template for name, spec in DATASETS.items() if spec.template != "a photo of a {}."} == TEMPLATES
    assert {name: spec.size for name, spec in DATASETS.items()} == SIZES
    assert [spec.title for spec in DATASETS.values()][1:5] == ["Caltech101", "OxfordPets", "StanfordCars", "Flowers102"]


@pytest.mark.parametrize("name", NAMES)
def test_every_dataset_is_read(tmp_path: Path, name: str) -> None:
    root = make_tree(tmp_path, name)
    dataset = read_dataset(name, tmp_path)
    assert (dataset.name, dataset.title, dataset.root) == (name, DATASETS[name].title, root)
    assert dataset.test.names == NAMES[name]
    assert dataset.template == TEMPLATES.get(name, "a photo of a {}.")
    assert not dataset.published  # the generated copies are too small
    sources = [dataset.test]
    if name in LISTED:
        assert per_class(dataset.test) == {3}
        assert per_class(dataset.train) == {5}
    else:
        assert per_class(dataset.test) == {2}
    if dataset.train:
        assert dataset.train.names == dataset.test.names
        assert not {*dataset.train.paths} & {*dataset.test.paths}
        sources.append(dataset.train)
    assert (dataset.train is None) == (DATASETS[name].size.train is None)
    assert all(path.is_file() for source in sources for path in source.paths)


@pytest.mark.parametrize("name", [name for name in LISTED if name != "fgvc_aircraft"])
def test_published_split_is_used_unchanged(tmp_path: Path, name: str) -> None:
    root = make_tree(tmp_path, name)
    dataset = read_dataset(name, tmp_path)
    assert dataset.split == DATASETS[name].split
    for part, source in (("train", dataset.train), ("test", dataset.test)):
        assert source is not None
        rows = rows_of(name)[part]
        assert [path.relative_to(root / DATASETS[name].image_folder).as_posix() for path in source.paths] == [
            path for path, _, _ in rows
        ]
        assert list(source.labels) == [label for _, label, _ in rows]


@pytest.mark.parametrize(
    ("name", "size", "published"),
    [
        ("oxford_pets", Size(3, 15, 6, 9), True),
        ("oxford_pets", Size(3, 15, 6, 10), False),
        ("oxford_pets", Size(3, 16, 6, 9), False),
        ("oxford_pets", Size(4, 15, 6, 9), False),
        ("fgvc_aircraft", Size(3, 15, 6, 9), True),
        ("imagenet", Size(12, 36, None, 24), True),
        ("imagenet_a", Size(3, None, None, 6), True),
        ("imagenet_a", Size(3, None, None, 7), False),
    ],
)
def test_dataset_is_published_if_split_and_sizes_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: Size, published: bool
) -> None:
    make_tree(tmp_path, name)
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], size=size))
    assert read_dataset(name, tmp_path).published == published


def test_dataset_with_another_split_of_the_published_size_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (make_tree(tmp_path, "dtd") / "split_zhou_DescribableTextures.json").unlink()
    monkeypatch.setitem(DATASETS, "dtd", replace(DATASETS["dtd"], size=Size(2, 10, 4, 6)))
    dataset = read_dataset("dtd", tmp_path)
    assert dataset.train is not None
    assert (len(dataset.train.paths), len(dataset.test.paths)) == (10, 6)
    assert not dataset.published


@pytest.mark.parametrize("name", ["oxford_pets", "food101", "sun397", "dtd", "ucf101"])
def test_official_lists_replace_a_missing_split_file(tmp_path: Path, name: str) -> None:
    """Test images, labels and names are the same. Except in DTD, all other images are training images."""
    root = make_tree(tmp_path, name)
    published = read_dataset(name, tmp_path)
    (root / str(DATASETS[name].split)).unlink()
    official = read_dataset(name, tmp_path)
    assert official.split.startswith("official lists: ")
    assert official.test == published.test
    assert per_class(official.train) == ({5} if name == "dtd" else {7})


@pytest.mark.parametrize("name", ["caltech101", "oxford_pets", "food101", "sun397", "dtd", "eurosat", "ucf101"])
def test_split_is_created_without_split_file_and_lists(tmp_path: Path, name: str) -> None:
    """Each class is split 50/20/30 %, deterministically, and class names are edited as in the published split."""
    root = make_tree(tmp_path, name)
    (root / str(DATASETS[name].split)).unlink()
    for folder in ("annotations", "meta", "labels", "ucfTrainTestlist"):
        shutil.rmtree(root / folder, ignore_errors=True)
    for file in root.glob("*.txt"):
        file.unlink()
    made = read_dataset(name, tmp_path)
    assert made == read_dataset(name, tmp_path)
    assert made.split == "made here: 50/20/30 % of each class, seed 1"
    assert sorted(made.test.names) == sorted(NAMES[name])
    assert per_class(made.train) == {5}
    assert per_class(made.test) == {3}
    assert made.train is not None
    assert not {*made.train.paths} & {*made.test.paths}
    name_of_folder = {pattern.rpartition("/")[0]: name.replace("_", " ") for pattern, name in LISTED[name]}
    if name != "oxford_pets":
        for path, label in zip(made.test.paths, made.test.labels, strict=True):
            folder = path.parent.relative_to(root / DATASETS[name].image_folder).as_posix()
            assert made.test.names[label] == name_of_folder[folder]


def test_created_split_shuffles_each_class_with_seed_1(tmp_path: Path) -> None:
    make_photos(tmp_path / "mine", ("a", "b"), per_class=7)
    dataset = read_dataset(str(tmp_path / "mine"), None)
    random.seed(1)
    train, test = [], []
    for name in ("a", "b"):
        files = [tmp_path / "mine" / name / f"{i}.png" for i in range(7)]
        random.shuffle(files)
        train += files[:4]  # 3.5 is rounded to the even number
        test += files[5:]
    assert dataset.train is not None
    assert list(dataset.train.paths) == train
    assert list(dataset.test.paths) == test


@pytest.mark.parametrize("each", [2, 3, 4, 5])
def test_created_split_puts_images_of_small_classes_in_both_parts(tmp_path: Path, each: int) -> None:
    make_photos(tmp_path / "mine", per_class=each)
    dataset = read_dataset(str(tmp_path / "mine"), None)
    assert min(per_class(dataset.train)) >= 1
    assert min(per_class(dataset.test)) >= 1


# ImageNet and its variants


def test_imagenet_images_are_sorted_by_name(tmp_path: Path) -> None:
    make_tree(tmp_path, "imagenet")
    train = read_dataset("imagenet", tmp_path).train
    assert train is not None
    assert [path.name for path in train.paths[:3]] == [f"n01440764_{i}.JPEG" for i in (10, 2, 3)]


def test_imagenet_is_read_without_training_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(make_tree(tmp_path, "imagenet") / "images" / "train")
    monkeypatch.setitem(DATASETS, "imagenet", replace(DATASETS["imagenet"], size=Size(12, 36, None, 24)))
    dataset = read_dataset("imagenet", tmp_path)
    assert dataset.train is None
    assert dataset.published  # only the images that exist are compared
    with pytest.raises(SelfTPTError, match="no training images"):
        dataset.few_shot(16, 1)


def test_imagenetv2_folders_are_sorted_by_number(tmp_path: Path) -> None:
    """Folder 10 comes after folder 9, not after folder 1."""
    make_tree(tmp_path, "imagenetv2")
    test = read_dataset("imagenetv2", tmp_path).test
    assert [int(path.parent.name) for path in test.paths] == [*test.labels]
    assert test.names[10] == "brambling"


@pytest.mark.parametrize("name", ["imagenetv2", "imagenet_a", "imagenet_r", "imagenet_sketch"])
def test_class_names_are_read_from_the_imagenet_folder(tmp_path: Path, name: str) -> None:
    root = make_tree(tmp_path, name)
    (root / "classnames.txt").unlink()
    refused(name, tmp_path, "classnames.txt", str(root))
    make_tree(tmp_path, "imagenet")
    assert read_dataset(name, tmp_path).test.names == NAMES[name]


def test_duplicate_imagenet_names_and_extra_files_are_accepted(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "imagenet_r")
    (root / "imagenet-r" / "README.txt").write_text("about")
    (root / "imagenet-r" / "n01491361" / "._0.jpg").write_text("not a image")
    text = (root / "classnames.txt").read_text()
    (root / "classnames.txt").write_text(text.replace("tiger shark", "electric ray"))
    test = read_dataset("imagenet_r", tmp_path).test
    assert test.names == ("electric ray", "hammerhead shark", "electric ray")
    assert per_class(test) == {2}


def flatten_val(root: Path) -> str:
    for folder in (root / "images" / "val").iterdir():
        shutil.rmtree(folder)
    return "at least two class folders"


def remove_class_names(root: Path) -> str:
    (root / "classnames.txt").write_text("n01440764 tench\n")
    return "n01443537 is not in classnames.txt"


def empty_a_class(root: Path) -> str:
    shutil.rmtree(root / "images" / "val" / "n01440764")
    (root / "images" / "val" / "n01440764").mkdir()
    return "n01440764 has no image"


def remove_training_class(root: Path) -> str:
    shutil.rmtree(root / "images" / "train" / "n01440764")
    return "must have the same classes"


@pytest.mark.parametrize("damage", [flatten_val, remove_class_names, empty_a_class, remove_training_class])
def test_incomplete_imagenet_is_refused(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    refused("imagenet", tmp_path, damage(make_tree(tmp_path, "imagenet")))


# Errors


def test_missing_folders_are_refused(tmp_path: Path) -> None:
    refused("dtd", None, "--data")
    refused("dtd", tmp_path / "nowhere", "does not exist", "nowhere")
    refused(
        "dtd",
        tmp_path,
        str(tmp_path / "dtd" / "images"),
        "https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        "split_zhou_DescribableTextures.json",
    )
    refused("no_such_thing", tmp_path, "neither a folder nor a dataset", "imagenet, caltech101")


@pytest.mark.parametrize("name", ["stanford_cars", "oxford_flowers"])
def test_labels_in_matlab_files_are_refused(tmp_path: Path, name: str) -> None:
    root = make_tree(tmp_path, name)
    (root / str(DATASETS[name].split)).unlink()
    (root / "imagelabels.mat").write_bytes(b"")
    refused(name, tmp_path, ".mat", str(DATASETS[name].split), str(root))


def test_aircraft_without_lists_is_refused(tmp_path: Path) -> None:
    (make_tree(tmp_path, "fgvc_aircraft") / "variants.txt").unlink()
    refused("fgvc_aircraft", tmp_path, "variants.txt", "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/")


def test_list_with_an_unknown_class_is_refused(tmp_path: Path) -> None:
    (make_tree(tmp_path, "fgvc_aircraft") / "variants.txt").write_text("707-320\nAn-12\n")
    refused("fgvc_aircraft", tmp_path, "Cessna 172", "variants.txt")


SPLIT = {
    "train": [["a_1.jpg", 0, "a"], ["b_1.jpg", 1, "b"]],
    "val": [],
    "test": [["a_8.jpg", 0, "a"], ["b_8.jpg", 1, "b"]],
}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ('{"train": ' + "[" * 100_000, "is not valid JSON"),
        ("[]", 'no images in "train"'),
        (b"\xff\xfe\x00", "not a text"),
        ({**SPLIT, "test": []}, 'no images in "test"'),
        ({"train": SPLIT["train"]}, 'no images in "test"'),
        ({**SPLIT, "test": [["a_8.jpg", 0]]}, '["a_8.jpg", 0] in "test" is not of the form'),
        ({**SPLIT, "test": [["a_8.jpg", "0", "a"]]}, "is not of the form"),
        ({**SPLIT, "test": [["a_8.jpg", -1, "c"]]}, '["a_8.jpg", -1, "c"] in "test" has a negative label'),
        ({**SPLIT, "test": [["a_8.jpg", 3, "d"]]}, "no image has label 2, but the labels go up to 3"),
        ({**SPLIT, "test": [["a_8.jpg", 0, "c"]]}, "label 0 has two names, 'a' and 'c'"),
        (SPLIT, "4 of the 4 images"),
    ],
)
def test_invalid_split_file_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    root = make_tree(tmp_path, "oxford_pets")
    file = root / "split_zhou_OxfordPets.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    refused("oxford_pets", tmp_path, str(file), words)


def test_split_with_missing_images_is_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "eurosat")
    first, second = root / "2750" / "AnnualCrop" / "AnnualCrop_2.jpg", root / "2750" / "Forest" / "Forest_9.jpg"
    first.unlink()
    second.unlink()
    refused("eurosat", tmp_path, "2 of the 32 images", f"(first: {first})", "split_zhou_EuroSAT.json", "get them")
    (root / "split_zhou_EuroSAT.json").unlink()
    assert read_dataset("eurosat", tmp_path).split.startswith("made here")  # from the existing images


def test_missing_image_folder_is_refused(tmp_path: Path) -> None:
    shutil.rmtree(make_tree(tmp_path, "stanford_cars") / "cars_train")
    refused("stanford_cars", tmp_path, "16 of the 16 images", "https://ai.stanford.edu")


def test_missing_validation_images_are_ignored(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "dtd")
    (root / "images" / "banded" / "banded_0006.jpg").unlink()
    assert per_class(read_dataset("dtd", tmp_path).train) == {5}


def test_two_folders_with_the_same_class_name_are_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "caltech101")
    (root / "split_zhou_Caltech101.json").unlink()
    shutil.copytree(root / "101_ObjectCategories" / "cougar_body", root / "101_ObjectCategories" / "cougar body")
    refused("caltech101", tmp_path, "the name 'cougar body' (from 'cougar body' and 'cougar_body')")
    refused(str(make_photos(tmp_path / "mine", ("red fox", "red_fox"))), None, "(from 'red fox' and 'red_fox')")


def test_folder_without_class_folders_is_refused(tmp_path: Path) -> None:
    (tmp_path / "eurosat" / "2750").mkdir(parents=True)
    refused("eurosat", tmp_path, "at least two classes, and has 0", "2750")


def test_unreadable_folders_and_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission errors are simulated, because the tests may run as root."""
    root = make_tree(tmp_path, "dtd")
    list_folder = os.listdir

    def locked(path: Path) -> list[str]:
        if path == root / "images" / "banded":
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "listdir", locked)
    refused("dtd", tmp_path, "cannot read", str(root / "images" / "banded"), "Permission denied")
    monkeypatch.undo()

    def unreadable(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", unreadable)
    refused("dtd", tmp_path, "cannot read", "split_zhou_DescribableTextures.json", "Permission denied")


# Few-shot samples


def test_few_shot_samples_follow_the_published_rule(tmp_path: Path) -> None:
    """One generator samples the classes in order of appearance; classes with too few images are used completely."""
    order = {"kite": 2, "ant": 0, "bee": 1}
    files = {name: [f"{name}/{i}.png" for i in range(2 if name == "bee" else 6)] for name in order}
    for path in (path for paths in files.values() for path in paths):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    train = [(path, order[name], name) for name, paths in files.items() for path in paths]
    (tmp_path / "kite" / "test.png").touch()
    test = [("kite/test.png", 2, "kite")]
    (tmp_path / "split.json").write_text(json.dumps({"train": train, "test": test}))
    random.seed(3)
    expected = random.sample(files["kite"], 4) + random.sample(files["ant"], 4) + files["bee"]
    source, where, published = read_dataset(str(tmp_path), None).few_shot(4, 3)
    assert [path.relative_to(tmp_path).as_posix() for path in source.paths] == expected
    assert source.labels == (2,) * 4 + (0,) * 4 + (1,) * 2
    assert source.names == ("ant", "bee", "kite")
    assert where == "drawn here: 4 of each class, seed 3"
    assert published


def test_few_shot_samples_equal_the_published_lists() -> None:
    """The expected positions are those of the published Oxford Pets lists: 16 shots, seed 1, the first two classes.

    Each class has 80 training images.
    """
    rows = [(Path(f"{label}/{position}"), label) for label in range(37) for position in range(80)]
    source = Source(tuple(map(str, range(37))), tuple(path for path, _ in rows), tuple(label for _, label in rows))
    positions = [int(path.name) for path in source.few(16, 1).paths[:32]]
    assert positions[:16] == [17, 72, 8, 32, 15, 63, 57, 60, 48, 26, 12, 62, 3, 49, 55, 0]
    assert positions[16:] == [57, 34, 29, 75, 13, 40, 3, 2, 73, 69, 1, 48, 27, 54, 71, 28]


@pytest.fixture
def pets(tmp_path: Path) -> Dataset:
    make_tree(tmp_path, "oxford_pets")
    return read_dataset("oxford_pets", tmp_path)


def test_no_shot_limit_gives_all_training_images(pets: Dataset) -> None:
    assert pets.few_shot(None, 1) == (pets.train, "all training images", True)


def test_few_shot_list_in_the_folder_is_preferred(pets: Dataset) -> None:
    rows = [rows_of("oxford_pets")["train"][position] for position in (6, 1, 13)]
    (pets.root / "fewshot_1_seed2.json").write_text(json.dumps({"train": rows}))
    source, where, published = pets.few_shot(1, 2)
    assert where == "fewshot_1_seed2.json"
    assert not published  # the list is not the sample that the rule gives for this split
    assert source.paths == tuple(pets.root / "images" / path for path, _, _ in rows)
    assert source.labels == (1, 0, 2)
    assert source.names == pets.test.names
    assert pets.few_shot(1, 1)[1].startswith("drawn here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[:2], "other classes than OxfordPets"),
        (lambda rows: [[path, label, name.upper()] for path, label, name in rows], "other classes than OxfordPets"),
        (lambda rows: [[f"not_{path}", label, name] for path, label, name in rows], "3 of the 3 images"),
        (lambda rows: {}, 'no images in "train"'),
        (lambda rows: [*rows, rows_of("oxford_pets")["test"][0]], "is no training image of"),
    ],
)
def test_invalid_few_shot_list_is_refused(pets: Dataset, change: Callable[[Any], Any], words: str) -> None:
    rows = rows_of("oxford_pets")["train"][::5]
    (pets.root / "fewshot_1_seed1.json").write_text(json.dumps({"train": change(rows)}))
    with pytest.raises(SelfTPTError, match=words):
        pets.few_shot(1, 1)


# User datasets


def test_folder_of_class_folders_is_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_photos(tmp_path / "my_images")
    monkeypatch.chdir(tmp_path)
    dataset = read_dataset("./my_images", None)
    assert (dataset.name, dataset.title, dataset.template) == ("my_images", "my_images", "a photo of a {}.")
    assert dataset.test.names == ("blue whale", "kite", "red fox")
    assert not dataset.published
    assert read_dataset("my_images", tmp_path) == replace(dataset, root=Path("my_images"))


def test_train_and_test_folders_are_a_dataset(tmp_path: Path) -> None:
    make_photos(tmp_path / "mine" / "train", per_class=2)
    make_photos(tmp_path / "mine" / "test", per_class=1)
    dataset = read_dataset(str(tmp_path / "mine"), None)
    assert dataset.split == "the folders train and test"
    assert dataset.train is not None
    assert dataset.train.names == dataset.test.names == ("blue whale", "kite", "red fox")
    assert per_class(dataset.train) == {2}
    assert per_class(dataset.test) == {1}
    shutil.rmtree(tmp_path / "mine" / "train" / "kite")
    refused(str(tmp_path / "mine"), None, "'kite' is in only one")


def test_split_file_defines_a_user_dataset(tmp_path: Path) -> None:
    make_photos(tmp_path)
    rows = {
        "train": [["kite/0.png", 1, "paper_kite"], ["red_fox/0.png", 0, "fox"]],
        "test": [["kite/1.png", 1, "paper_kite"]],
    }
    (tmp_path / "split.json").write_text(json.dumps(rows))
    dataset = read_dataset(str(tmp_path), None)
    assert dataset.train == Source(("fox", "paper kite"), (tmp_path / "kite/0.png", tmp_path / "red_fox/0.png"), (1, 0))
    assert dataset.test == Source(("fox", "paper kite"), (tmp_path / "kite/1.png",), (1,))
    assert dataset.split == "split.json"
    (tmp_path / "kite" / "1.png").unlink()
    refused(str(tmp_path), None, "1 of the 3 images", str(tmp_path / "kite" / "1.png"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"{"])
def test_invalid_split_file_of_the_user_can_be_corrected(tmp_path: Path, content: bytes) -> None:
    """The user wrote `split.json`, so the error does not only say to download it again."""
    (tmp_path / "split.json").write_bytes(content)
    refused(str(tmp_path), None, "save it as UTF-8, or " if content == b"\xff\xfe\x00" else "correct the file, or ")


def test_two_labels_with_the_same_class_name_are_refused(tmp_path: Path) -> None:
    make_photos(tmp_path, ("a", "b"))
    rows = [["a/0.png", 0, "crane"], ["b/0.png", 1, "crane"]]
    (tmp_path / "split.json").write_text(json.dumps({"train": rows, "test": rows}))
    refused(str(tmp_path), None, "two classes have the name 'crane': rename one of them")


def test_invalid_user_datasets_are_refused(tmp_path: Path) -> None:
    make_photos(tmp_path / "halfway" / "train")
    make_photos(tmp_path / "halfway" / "val")
    refused(str(tmp_path / "halfway"), None, "both train and test")
    refused(str(make_photos(tmp_path / "single", per_class=1)), None, "'blue whale' has one image", "two")
    refused(str(make_photos(tmp_path / "one", ("cat",))), None, "at least two")


# Subsets


def source(labels: str, names: str = "abcde") -> Source:
    """Return a source with one image per digit; the digit is its label, and its path has its position and label."""
    return Source(tuple(names), tuple(Path(f"{i}-{c}") for i, c in enumerate(labels)), tuple(map(int, labels)))


def test_first_half_of_the_classes_is_base() -> None:
    """Three of five classes are base classes."""
    whole = source("4021310")
    paths = [str(path) for path in whole.paths]
    assert half(whole, new=False) == Source(
        ("a", "b", "c"), tuple(Path(paths[i]) for i in (1, 2, 3, 5, 6)), (0, 2, 1, 1, 0)
    )
    assert half(whole, new=True) == Source(("d", "e"), (Path("0-4"), Path("4-3")), (1, 0))


def test_limit_takes_images_of_all_classes_in_turn() -> None:
    whole = source("000021120")
    assert sorted(limit(whole, 3).labels) == [0, 1, 2]
    assert [str(path) for path in limit(whole, 6).paths] == ["0-0", "1-0", "4-2", "5-1", "6-1", "7-2"]
    assert limit(whole, 7).labels == (0, 0, 0, 2, 1, 1, 2)
    assert limit(whole, 4) == limit(whole, 4)
    assert limit(whole, 100) == whole
    assert limit(whole, 4).names == whole.names
    with pytest.raises(SelfTPTError, match="not 0"):
        limit(whole, 0)


def test_limit_below_the_number_of_classes_spreads_over_the_class_list() -> None:
    """The first classes of ImageNet are all animals."""
    whole = Source(tuple(map(str, range(1000))), tuple(Path(str(i)) for i in range(1000)), tuple(range(1000)))
    labels = limit(whole, 100).labels
    assert labels == tuple(sorted(labels))
    assert all(any(low <= label < low + 250 for label in labels) for low in range(0, 1000, 250))


def test_fraction_applies_to_each_class() -> None:
    whole = source("0" * 16 + "1" * 16 + "2" * 2)
    parts = [fraction(whole, share, 1) for share in (0.25, 0.5, 0.75, 1)]
    assert [Counter(part.labels) for part in parts] == [
        {0: 4, 1: 4, 2: 1},
        {0: 8, 1: 8, 2: 1},
        {0: 12, 1: 12, 2: 2},
        {0: 16, 1: 16, 2: 2},
    ]
    for small, large in itertools.pairwise(parts):
        assert {*small.paths} < {*large.paths}
    assert parts[3] == whole
    assert fraction(whole, 0.5, 1) == parts[1] != fraction(whole, 0.5, 2)
    for share in (0, 1.5):
        with pytest.raises(SelfTPTError, match=f"not {share:g}"):
            fraction(whole, share, 1)


def test_sampled_classes_keep_their_order() -> None:
    whole = source("0123401234")
    random.seed(5)
    kept = sorted(random.sample(range(5), 3))
    part = some_classes(whole, 3, 5)
    assert part.names == tuple("abcde"[label] for label in kept)
    assert [str(path) for path in part.paths] == [f"{i}-{i % 5}" for i in range(10) if i % 5 in kept]
    assert part.labels == (0, 1, 2, 0, 1, 2)
    assert some_classes(whole, 5, 1) == whole
    for count in (0, 6):
        with pytest.raises(SelfTPTError, match=f"{count} of 5 classes"):
            some_classes(whole, count, 1)


# The `datasets` command


@pytest.mark.parametrize("width", [80, 120])
def test_list_fits_the_terminal_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    make_tree(Path("d"), "oxford_pets")
    (make_tree(Path("d"), "eurosat") / "2750" / "Forest" / "Forest_9.jpg").unlink()
    listing.command(Path("d"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines]
    assert ["oxford_pets", "OxfordPets", "37", "2944", "736", "3669", "15/9"] in rows
    assert ["eurosat", "EuroSAT", "10", "13500", "5400", "8100", "broken"] in rows
    assert ["imagenet_a", "ImageNet-A", "200", "-", "-", "7500", "missing"] in rows
    text = " ".join(word for row in rows for word in row)
    assert "oxford_pets split_zhou_OxfordPets.json; 3 classes, not as published" in text
    assert "eurosat 1 of the 32 images" in text
    assert "imagenet_a https://github.com/hendrycks/natural-adv-examples in imagenet-adversarial/imagenet-a" in text


def test_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path, "imagenet_r")
    (tmp_path / "dtd" / "images").mkdir(parents=True)
    listing.command(tmp_path, as_json=True)
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert list(listed) == list(DATASETS)
    assert listed["imagenet_r"]["found"] == {
        "classes": 3,
        "train": None,
        "test": 6,
        "split": "the folder imagenet-r",
        "published": False,
    }
    assert listed["dtd"]["state"] == "broken"
    assert "at least two" in listed["dtd"]["problem"]
    assert listed["sun397"]["state"] == "missing"
    assert listed["sun397"]["published"] == {"classes": 397, "train": 15880, "val": 3970, "test": 19850}
    assert listed["sun397"]["folder"] == "sun397/SUN397"


def test_list_without_data_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    listing.command()
    out = capsys.readouterr().out
    assert "missing" not in out
    assert all(spec.page in out for spec in DATASETS.values())
    with pytest.raises(SelfTPTError, match="does not exist"):
        listing.command(tmp_path / "nowhere")


def test_check_splits_reports_differences_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 0 for equal counts, 1 for others, 2 without split files; a full split file is preferred."""
    root = make_tree(tmp_path, "food101")
    (root / "full").mkdir()
    shutil.move(root / "split_zhou_Food101.json", root / "full")
    monkeypatch.setattr(sys, "argv", ["check_splits.py", "--data", str(tmp_path)])
    script = str(Path(__file__).parents[1] / "tools" / "check_splits.py")
    for size, code in ((Size(2, 10, 4, 6), 0), (Size(2, 10, 4, 7), 1)):
        monkeypatch.setitem(DATASETS, "food101", replace(DATASETS["food101"], size=size))
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(script, run_name="__main__")
        assert stop.value.code == code
        assert "base and new classes: (3, 3)" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["check_splits.py", "--data", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(script, run_name="__main__")
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'nowhere'} contains no split file")
