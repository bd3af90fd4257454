"""Image features, computed once and kept on disk."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from selftpt.errors import SelfTPTError
from selftpt.files import cache_folder, digest, read_tensors, write_tensors
from selftpt.images import PictureError, in_threads, open_picture
from selftpt.models import Model
from selftpt.progress import Bar
from selftpt.version import __version__

SHARD = 32  # pictures in one file, fewer if they have many crops: what a killed run loses at most


def crop_features(
    model: Model,
    paths: Sequence[Path],
    crops: int,
    seed: int,
    on_error: Callable[[PictureError], None],
    max_megapixels: float = 80,
    batch: int = 64,
) -> Tensor:
    """The features of `crops` random resized crops of each picture: [N, crops, D], NaN for one that cannot be used.

    The crops of a picture depend on the seed and its place in the list alone. Features are kept in the cache folder
    in shards, each written whole, so that a killed run goes on where it was and a second one reads them.
    """
    files = [[str(path.absolute()), *_stamp(path)] for path in paths]
    size = max(1, min(SHARD, 320 // crops))
    key = digest(__version__, model.id.digest, model.precision, crops, seed, max_megapixels, size, batch, files)
    folder = cache_folder() / "features" / key

    def cut(i: int) -> Tensor | PictureError:
        try:
            picture = open_picture(paths[i], max_megapixels)
        except PictureError as error:
            return error
        return model.preprocess.crops(picture, crops, random.Random(f"crops {seed} {i}"))

    parts = [range(i, min(i + size, len(paths))) for i in range(0, len(paths), size)]
    shards = {part: _read(folder / f"{part.start:08d}.safetensors") for part in parts}
    missing = [i for part in parts if shards[part] is None for i in part]
    pictures = in_threads(cut, missing, ahead=size)
    with Bar("image features", len(missing) * crops) as bar:
        for part in parts:
            if shards[part] is None:
                features, errors = _encode(model, [next(pictures) for _ in part], crops, batch)
                if not errors:  # what could not be read today is tried again the next time
                    write_tensors(folder / f"{part.start:08d}.safetensors", "features", {"features": features}, {})
                shards[part] = features, errors
                bar.step(len(part) * crops)
    whole = []
    for part in parts:
        features, errors = shards[part] or (torch.empty(0), [])
        whole.append(features)
        for error in errors:
            on_error(PictureError(error))
    return torch.cat(whole)


def _stamp(path: Path) -> list[int | str]:
    """What is no longer the same when a picture has changed, or can be read where it could not."""
    try:
        stat = path.stat()
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns, *([] if os.access(path, os.R_OK) else ["unreadable"])]


def _read(file: Path) -> tuple[Tensor, list[str]] | None:
    if not os.path.exists(file):
        return None
    try:
        return read_tensors(file, "features")[1]["features"], []
    except (SelfTPTError, KeyError):  # a damaged shard is computed again
        return None


def _encode(
    model: Model, pictures: Sequence[Tensor | PictureError], crops: int, batch: int
) -> tuple[Tensor, list[str]]:
    """Features [n, crops, D] of the crops [crops, 3, S, S] of each picture, NaN where there is an error instead."""
    good = [i for i, crop in enumerate(pictures) if isinstance(crop, Tensor)]
    features = torch.full((len(pictures), crops, model.dimension), float("nan"))
    if good:
        pixels = torch.cat([crop for crop in pictures if isinstance(crop, Tensor)])
        encoded = torch.cat([model.encode_images(some) for some in pixels.split(batch)])
        if not encoded.isfinite().all():
            raise SelfTPTError(f"the image tower's features are no numbers in {model.precision}: take fp32")
        features[good] = encoded.cpu().unflatten(0, (len(good), crops))
    return features, [str(crop) for crop in pictures if isinstance(crop, PictureError)]
