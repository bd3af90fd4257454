"""The 15 datasets of the paper: where they lie, how large they are, what their classes are called."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

COOP = "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md"  # where the split files are to be had


class Size(NamedTuple):
    """How many classes there are, and how many images of each part; None: there is no such part."""

    classes: int
    train: int | None
    val: int | None
    test: int


@dataclass(frozen=True)
class Lists:
    """A dataset's own split: text files below its folder with a image a line."""

    train: str
    test: str
    path: Callable[[str], str] = str  # a line to a path below the folder of images
    classes: str | None = None  # a file with a class a line, in the order of labels; else they are sorted
    class_in: Callable[[str], str] = lambda line: line.strip("/")  # a line of that file to a class

    @property
    def files(self) -> tuple[str, ...]:
        return (self.train, self.test, self.classes) if self.classes else (self.train, self.test)


def folder_of(line: str) -> str:
    """The folder that a image lies in, from a path or a line of a list."""
    return line.strip("/").rpartition("/")[0]


@dataclass(frozen=True)
class Spec:
    """A dataset of the paper: its published size, its folders, its names."""

    title: str
    short_title: str  # heads its column of a table
    folder: str  # below the data folder
    image_folder: str  # below `folder`: where the paths of its lists begin
    size: Size
    page: str  # where the images are to be had
    template: str = "a photo of a {}."
    split: str | None = None  # the published split file, in `folder`; None: the dataset has its own
    lists: Lists | None = None
    wnids: bool = False  # ImageNet and its kin: folders of WordNet ids or numbers, named by classnames.txt
    class_of: Callable[[str], str] | None = folder_of  # a path, or a line of a list, to a class; None: no telling
    name_of: Callable[[str], str] = str  # a class to its name, "" for what is no class


CALTECH = {
    "BACKGROUND_Google": "",
    "Faces_easy": "",
    "Faces": "face",
    "Leopards": "leopard",
    "Motorbikes": "motorbike",
    "airplanes": "airplane",
}
EUROSAT = {
    "AnnualCrop": "Annual Crop Land",
    "HerbaceousVegetation": "Herbaceous Vegetation Land",
    "Highway": "Highway or Road",
    "Industrial": "Industrial Buildings",
    "Pasture": "Pasture Land",
    "PermanentCrop": "Permanent Crop Land",
    "Residential": "Residential Buildings",
    "SeaLake": "Sea or Lake",
}


def scene(folder: str) -> str:
    """SUN397: "c/church/indoor" is "indoor church"; the first part is a letter."""
    return " ".join(reversed(folder.split("/")[1:]))


def spaced(action: str) -> str:
    """UCF101: "JumpRope" is "Jump_Rope", which stays as it is."""
    return re.sub("(?<=[^_])(?=[A-Z])", "_", action)


def frame(line: str) -> str:
    """UCF101: "JumpRope/v_JumpRope_g01_c01.avi 48" is the image "Jump_Rope/v_JumpRope_g01_c01.jpg"."""
    action, _, video = line.split(" ")[0].partition("/")
    return f"{spaced(action)}/{video.removesuffix('.avi')}.jpg"


DATASETS = {
    "imagenet": Spec(
        "ImageNet",
        "ImageNet",
        "imagenet",
        "images",
        Size(1000, 1281167, None, 50000),
        "https://image-net.org/download.php",
        wnids=True,
    ),
    "caltech101": Spec(
        "Caltech101",
        "Caltech",
        "caltech-101",
        "101_ObjectCategories",
        Size(100, 4128, 1649, 2465),
        "https://data.caltech.edu/records/mzrjq-6wc02",
        split="split_zhou_Caltech101.json",
        name_of=lambda folder: CALTECH.get(folder, folder),
    ),
    "oxford_pets": Spec(
        "OxfordPets",
        "Pets",
        "oxford_pets",
        "images",
        Size(37, 2944, 736, 3669),
        "https://www.robots.ox.ac.uk/~vgg/data/pets/",
        "a photo of a {}, a type of pet.",
        split="split_zhou_OxfordPets.json",
        lists=Lists("annotations/trainval.txt", "annotations/test.txt", lambda line: f"{line.split(' ')[0]}.jpg"),
        class_of=lambda line: line.rpartition("_")[0].lower(),  # great_pyrenees_12.jpg
    ),
    "stanford_cars": Spec(
        "StanfordCars",
        "Cars",
        "stanford_cars",
        "",
        Size(196, 6509, 1635, 8041),
        "https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        split="split_zhou_StanfordCars.json",
        class_of=None,
    ),
    "oxford_flowers": Spec(
        "Flowers102",
        "Flowers",
        "oxford_flowers",
        "jpg",
        Size(102, 4093, 1633, 2463),
        "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        "a photo of a {}, a type of flower.",
        split="split_zhou_OxfordFlowers.json",
        class_of=None,
    ),
    "food101": Spec(
        "Food101",
        "Food101",
        "food-101",
        "images",
        Size(101, 50500, 20200, 30300),
        "https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        "a photo of {}, a type of food.",
        split="split_zhou_Food101.json",
        lists=Lists("meta/train.txt", "meta/test.txt", lambda line: f"{line}.jpg"),
    ),
    "fgvc_aircraft": Spec(
        "FGVCAircraft",
        "Aircraft",
        "fgvc_aircraft",
        "images",
        Size(100, 3334, 3333, 3333),
        "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
        "a photo of a {}, a type of aircraft.",
        lists=Lists(
            "images_variant_train.txt",
            "images_variant_test.txt",
            lambda line: f"{line.split(' ')[0]}.jpg",
            "variants.txt",
        ),
        class_of=lambda line: line.partition(" ")[2],
    ),
    "sun397": Spec(
        "SUN397",
        "SUN397",
        "sun397",
        "SUN397",
        Size(397, 15880, 3970, 19850),
        "https://vision.princeton.edu/projects/2010/SUN/",
        split="split_zhou_SUN397.json",
        lists=Lists("Training_01.txt", "Testing_01.txt", lambda line: line.strip("/"), "ClassName.txt"),
        name_of=scene,
    ),
    "dtd": Spec(
        "DTD",
        "DTD",
        "dtd",
        "images",
        Size(47, 2820, 1128, 1692),
        "https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        "{} texture.",
        split="split_zhou_DescribableTextures.json",
        lists=Lists("labels/train1.txt", "labels/test1.txt"),
    ),
    "eurosat": Spec(
        "EuroSAT",
        "EuroSAT",
        "eurosat",
        "2750",
        Size(10, 13500, 5400, 8100),
        "https://github.com/phelber/EuroSAT",
        "a centered satellite photo of {}.",
        split="split_zhou_EuroSAT.json",
        name_of=lambda folder: EUROSAT.get(folder, folder),
    ),
    "ucf101": Spec(
        "UCF101",
        "UCF101",
        "ucf101",
        "UCF-101-midframes",
        Size(101, 7639, 1898, 3783),
        COOP,  # the middle frames; the videos are at https://www.crcv.ucf.edu/data/UCF101.php
        "a photo of a person doing {}.",
        split="split_zhou_UCF101.json",
        lists=Lists(
            "ucfTrainTestlist/trainlist01.txt",
            "ucfTrainTestlist/testlist01.txt",
            frame,
            "ucfTrainTestlist/classInd.txt",
            lambda line: line.rpartition(" ")[2],
        ),
        name_of=spaced,
    ),
    "imagenetv2": Spec(
        "ImageNetV2",
        "V2",
        "imagenetv2",
        "imagenetv2-matched-frequency-format-val",
        Size(1000, None, None, 10000),
        "https://github.com/modestyachts/ImageNetV2",
        wnids=True,
    ),
    "imagenet_sketch": Spec(
        "ImageNet-Sketch",
        "Sketch",
        "imagenet-sketch",
        "images",
        Size(1000, None, None, 50889),
        "https://github.com/HaohanWang/ImageNet-Sketch",
        wnids=True,
    ),
    "imagenet_a": Spec(
        "ImageNet-A",
        "A",
        "imagenet-adversarial",
        "imagenet-a",
        Size(200, None, None, 7500),
        "https://github.com/hendrycks/natural-adv-examples",
        wnids=True,
    ),
    "imagenet_r": Spec(
        "ImageNet-R",
        "R",
        "imagenet-rendition",
        "imagenet-r",
        Size(200, None, None, 30000),
        "https://github.com/hendrycks/imagenet-r",
        wnids=True,
    ),
}
