"""The 15 datasets of the paper: their folders, sizes, templates and class names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

COOP = "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md"  # links to the split files


class Size(NamedTuple):
    """The number of classes, and of images in each part; None if the part does not exist."""

    classes: int
    train: int | None
    val: int | None
    test: int


@dataclass(frozen=True)
class Lists:
    """The lists of a dataset's own split: text files below its folder, with one image per line.

    Attributes:
        train: The list of training images.
        test: The list of test images.
        path: Returns the path below the image folder for a line of a list.
        classes: A file with one class per line, in the order of the labels. None sorts the classes by name.
        class_in: Returns the class for a line of `classes`.
    """

    train: str
    test: str
    path: Callable[[str], str] = str
    classes: str | None = None
    class_in: Callable[[str], str] = lambda line: line.strip("/")

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are needed."""
        return (self.train, self.test, self.classes) if self.classes else (self.train, self.test)


def folder_of(line: str) -> str:
    """Return the folder of an image, for its path or its line of a list."""
    return line.strip("/").rpartition("/")[0]


@dataclass(frozen=True)
class Spec:
    """A dataset of the paper.

    Attributes:
        title: The title in the paper's tables.
        short_title: The heading of its column in a table.
        folder: The folder below the data folder.
        image_folder: The folder below `folder` that the paths of its lists are relative to.
        size: The published size.
        page: The page from which the images can be downloaded.
        template: The template.
        split: The published split file, in `folder`; None if the dataset has a split of its own.
        lists: The lists of the dataset's own split.
        wnids: Whether the folders are named by WordNet id or number, as in ImageNet, with names in classnames.txt.
        class_of: Returns the class for the path of an image, or its line of a list; None if the path does not name the
            class.
        name_of: Returns the class name for a class, or "" for a folder that is not a class.
    """

    title: str
    short_title: str
    folder: str
    image_folder: str
    size: Size
    page: str
    template: str = "a photo of a {}."
    split: str | None = None
    lists: Lists | None = None
    wnids: bool = False
    class_of: Callable[[str], str] | None = folder_of
    name_of: Callable[[str], str] = str


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
    """Return the class name of a folder of SUN397: "indoor church" for "c/church/indoor"."""
    return " ".join(reversed(folder.split("/")[1:]))


def spaced(action: str) -> str:
    """Return the class of an action of UCF101: "Jump_Rope" for "JumpRope" and for "Jump_Rope"."""
    return re.sub("(?<=[^_])(?=[A-Z])", "_", action)


def frame(line: str) -> str:
    """Return the image for a line of UCF101's lists.

    It is "Jump_Rope/v_JumpRope_g01_c01.jpg" for "JumpRope/v_JumpRope_g01_c01.avi 48".
    """
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
