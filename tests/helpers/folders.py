"""Folders for tests: labelled images, generated images, and a small model for the command line."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from open_clip import create_model
from PIL import Image
from safetensors.torch import save_file

from tests.helpers.image_files import noise

CONFIG = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
}


def make_model(folder: Path, **changes: object) -> Path:
    """Create a model folder that open_clip can load, with random weights."""
    folder.mkdir(parents=True)
    (folder / "open_clip_config.json").write_text(
        json.dumps({**CONFIG, "model_cfg": {**CONFIG["model_cfg"], **changes}})
    )
    weights = create_model(f"local-dir:{folder}", load_weights=False).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "open_clip_model.safetensors")
    return folder


def make_photos(folder: Path, classes: tuple[str, ...] = ("red_fox", "blue whale", "kite"), per_class: int = 3) -> Path:
    """Create a folder with one folder of small noise images per class."""
    rng = random.Random(0)
    for name in classes:
        for i in range(per_class):
            path = folder / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (48, 40), rng.randbytes(48 * 40 * 3)).save(path)
    return folder


def make_generated(folder: Path, images: Sequence[Path], per_image: int) -> Path:
    """Create a folder of generated images in the layout that DiffTPT reads; every image is different."""
    for i, path in enumerate(images):
        target = folder / path.parent.name / path.name
        target.mkdir(parents=True)
        for k in range(per_image):
            noise(i * per_image + k).save(target / f"{k:02d}.png")
    return folder
