"""Tiny copies of the paper's 15 datasets: the original folder layout, few classes and small noise images."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from selftpt.data.datasets import DATASETS

# For each class: the path pattern of its images below the image folder, and its name in the published split.
LISTED = {
    "caltech101": [
        ("Faces/image_{:04}.jpg", "face"),
        ("accordion/image_{:04}.jpg", "accordion"),
        ("airplanes/image_{:04}.jpg", "airplane"),
        ("cougar_body/image_{:04}.jpg", "cougar_body"),
    ],
    "oxford_pets": [
        ("Abyssinian_{}.jpg", "abyssinian"),
        ("american_bulldog_{}.jpg", "american_bulldog"),
        ("Bengal_{}.jpg", "bengal"),
    ],
    "stanford_cars": [
        ("cars_train/{:05}.jpg", "2000 AM General Hummer SUV"),
        ("cars_train/1{:04}.jpg", "2012 Audi TTS Coupe"),
    ],
    "oxford_flowers": [("image_{:05}.jpg", "pink primrose"), ("image_1{:04}.jpg", "colt's foot")],
    "food101": [("apple_pie/{}.jpg", "apple_pie"), ("baby_back_ribs/{}.jpg", "baby_back_ribs")],
    "fgvc_aircraft": [("{:07}.jpg", "707-320"), ("1{:06}.jpg", "Cessna 172"), ("2{:06}.jpg", "An-12")],
    "sun397": [
        ("a/abbey/sun_{}.jpg", "abbey"),
        ("c/church/outdoor/sun_{}.jpg", "outdoor church"),
        ("c/church/indoor/sun_{}.jpg", "indoor church"),
        ("c/control_tower/outdoor/sun_{}.jpg", "outdoor control_tower"),
    ],
    "dtd": [("banded/banded_{:04}.jpg", "banded"), ("polka-dotted/polka-dotted_{:04}.jpg", "polka-dotted")],
    "eurosat": [
        ("AnnualCrop/AnnualCrop_{}.jpg", "Annual Crop Land"),
        ("Forest/Forest_{}.jpg", "Forest"),
        ("Highway/Highway_{}.jpg", "Highway or Road"),
        ("SeaLake/SeaLake_{}.jpg", "Sea or Lake"),
    ],
    "ucf101": [
        ("Apply_Eye_Makeup/v_ApplyEyeMakeup_g{:02}_c01.jpg", "Apply_Eye_Makeup"),
        ("Hammering/v_Hammering_g{:02}_c01.jpg", "Hammering"),
        ("Hammer_Throw/v_HammerThrow_g{:02}_c01.jpg", "Hammer_Throw"),
    ],
}
PARTS = {"train": range(1, 6), "val": range(6, 8), "test": range(8, 11)}  # image numbers of each class
WNIDS = {
    "n01440764": "tench",
    "n01443537": "goldfish",
    "n01484850": "great white shark",
    "n01491361": "tiger shark",
    "n01494475": "hammerhead shark",
    "n01496331": "electric ray",
    "n01498041": "stingray",
    "n01514668": "rooster",
    "n01514859": "hen",
    "n01518878": "ostrich",
    "n01530575": "brambling",
    "n01531178": "goldfinch",
}


def make_tree(data: Path, name: str) -> Path:
    """Create a dataset in the folder `data` with the layout that its download instructions give; return its folder."""
    spec = DATASETS[name]
    root = data / spec.folder
    images = root / spec.image_folder
    if spec.wnids:
        _write(root / "classnames.txt", (f"{wnid} {class_name}" for wnid, class_name in WNIDS.items()))
        for path in _imagenet(name):
            _image(images / path)
        return root
    for rows in rows_of(name).values():
        for path, _, _ in rows:
            _image(images / path)
    if spec.split:
        (root / spec.split).write_text(json.dumps(rows_of(name)))
    _write_lists(root, name)
    return root


def rows_of(name: str) -> dict[str, list[tuple[str, int, str]]]:
    """Return the content of the published split file."""
    return {
        part: [
            (pattern.format(number), label, class_name)
            for label, (pattern, class_name) in enumerate(LISTED[name])
            for number in numbers
        ]
        for part, numbers in PARTS.items()
    }


def _imagenet(name: str) -> list[str]:
    wnids = list(WNIDS)
    if name == "imagenet":
        train = [f"train/{wnid}/{wnid}_{i}.JPEG" for wnid in wnids for i in (2, 10, 3)]
        return train + [f"val/{wnid}/ILSVRC2012_val_{i:08}.JPEG" for i, wnid in enumerate(wnids * 2)]
    if name == "imagenetv2":
        return [f"{i}/{i}f{j}.jpeg" for i in range(len(wnids)) for j in range(2)]
    if name == "imagenet_sketch":
        return [f"{wnid}/sketch_{i}.JPEG" for wnid in wnids for i in range(2)]
    return [f"{wnid}/{name}_{i}.jpg" for wnid in wnids[5:2:-1] for i in range(2)]


def _write_lists(root: Path, name: str) -> None:
    """Write the dataset's own list files, and folders that are not classes."""
    rows = rows_of(name)
    trainval_test = {"train": rows["train"] + rows["val"], "test": rows["test"]}
    if name == "caltech101":
        for other in ("BACKGROUND_Google", "Faces_easy"):
            _image(root / "101_ObjectCategories" / other / "image_0001.jpg")
    elif name == "oxford_pets":
        for part, file in (("train", "trainval"), ("test", "test")):
            _write(root / f"annotations/{file}.txt", (f"{Path(p).stem} {i + 1} 1 1" for p, i, _ in trainval_test[part]))
        _write(root / "annotations/list.txt", ["#Image CLASS-ID SPECIES BREED ID"])
    elif name == "food101":
        for part, listed in trainval_test.items():
            _write(root / f"meta/{part}.txt", (path.removesuffix(".jpg") for path, _, _ in listed))
    elif name == "fgvc_aircraft":
        for part, listed in rows.items():
            _write(
                root / f"images_variant_{part}.txt",
                (f"{Path(path).stem} {class_name}" for path, _, class_name in listed),
            )
        _write(root / "variants.txt", (class_name for _, class_name in LISTED[name]))
    elif name == "sun397":
        for part, file in (("train", "Training_01"), ("test", "Testing_01")):
            _write(root / f"{file}.txt", (f"/{path}" for path, _, _ in trainval_test[part]))
        _write(root / "ClassName.txt", (f"/{pattern.rpartition('/')[0]}" for pattern, _ in LISTED[name]))
    elif name == "dtd":
        for part, listed in rows.items():
            _write(root / f"labels/{part}1.txt", (path for path, _, _ in listed))
    elif name == "ucf101":
        folder = root / "ucfTrainTestlist"
        _write(folder / "classInd.txt", (f"{i + 1} {c.replace('_', '')}" for i, (_, c) in enumerate(LISTED[name])))
        videos = {
            part: [(p.replace(c, c.replace("_", "")).replace(".jpg", ".avi"), i + 1) for p, i, c in listed]
            for part, listed in trainval_test.items()
        }
        _write(folder / "trainlist01.txt", (f"{video} {label}" for video, label in videos["train"]))
        _write(folder / "testlist01.txt", (video for video, _ in videos["test"]))


def _write(file: Path, lines: Iterable[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def _image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random("/".join(path.parts[-2:]))
    size = rng.randrange(24, 48), rng.randrange(24, 48)
    Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])).save(path, "JPEG")
