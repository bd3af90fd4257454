"""Compare split files with the published counts of images: python tools/check_splits.py --data DIR"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from selftpt.data.datasets import DATASETS, half
from selftpt.data.datasets.splits import read_rows, to_sources
from selftpt.errors import SelfTPTError, exit_on_error

BASE_AND_NEW = {  # published numbers of test images of the base and of the new classes
    "caltech101": (1549, 916),
    "oxford_pets": (1881, 1788),
    "stanford_cars": (4002, 4039),
    "oxford_flowers": (1053, 1410),
    "dtd": (864, 828),
    "eurosat": (4200, 3900),
    "ucf101": (1934, 1849),
}


def split_files(data: Path) -> dict[str, Path]:
    """Return the split file of each dataset; of a reduced dataset, the complete split file in its folder full/."""
    files = {}
    for name, spec in DATASETS.items():
        folder = data / spec.folder
        file = (folder / "full" if (folder / "full").is_dir() else folder) / (spec.split or "")
        if file.is_file():
            files[name] = file
    return files


def check(name: str, file: Path) -> bool:
    """Print the counts of a split and the published ones, and return whether they are equal."""
    sources = to_sources(file, file.parent, read_rows(file, "train", "val", "test"))
    test = sources[2]
    counts = len(test.names), *(len(source.paths) for source in sources)
    halves = len(half(test, new=False).paths), len(half(test, new=True).paths)
    equal = counts == DATASETS[name].size and halves == BASE_AND_NEW.get(name, halves)
    print(f"{name}: {file}")
    print(f"  classes, train, val, test: {counts}, published {tuple(DATASETS[name].size)}")
    print(f"  test images of base and new classes: {halves}, published {BASE_AND_NEW.get(name, 'unknown')}")
    print("  equal" if equal else "  DIFFERENT")
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the datasets, in CoOp's layout")
    data = parser.parse_args().data
    files = split_files(data)
    if not files:
        raise SelfTPTError(f"{data} contains no split file: pass the folder of the datasets with --data")
    equal = [check(name, file) for name, file in files.items()]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    with exit_on_error():
        sys.exit(main())
