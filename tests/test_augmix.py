"""AugMix equals a slow reference, and is applied only where it is configured."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import PreprocessCfg
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from selftpt.data.augmix import OPERATIONS, Operation, augmix
from selftpt.data.cache import Cache, cache_entries
from selftpt.data.features import FeatureProvider
from selftpt.data.threads import in_threads
from selftpt.data.transforms import Preprocess
from selftpt.data.views import LazyImage, ViewSpec
from tests.helpers import image_files
from tests.helpers.models import model
from tests.oracle import augmix as oracle


def as_array(image: oracle.Image | list[list[list[float]]]) -> np.ndarray:
    return np.array(image, float).transpose(1, 2, 0)


@pytest.mark.parametrize("index", range(len(oracle.NAMES)), ids=oracle.NAMES)
def test_operations_equal_the_reference(index: int) -> None:
    """Each operation has several strengths. Pillow shears and rotates in fixed-point arithmetic: values differ by 1."""
    tolerance = 1.01 if oracle.NAMES[index] in ("rotate", "shear_x", "shear_y") else 0
    changed = 0.0
    for seed in range(6):
        image = image_files.noise(seed, 40, 33)
        found = np.asarray(OPERATIONS[index](image, random.Random(seed)), float)
        slow = oracle.operate(oracle.planes(np.asarray(image).tolist()), oracle.NAMES[index], random.Random(seed))
        difference = np.abs(found - as_array(slow))
        assert np.mean(difference > tolerance) < 0.01, difference.max()  # pixels at the image border may differ
        changed = max(changed, np.abs(found - np.asarray(image, float)).max())
    assert changed > 0


def on_pixel_rows(operation: Operation) -> oracle.Operation:
    """Convert an operation on PIL images to one on rows of pixels."""

    def on_rows(rows: oracle.Image, rng: random.Random) -> oracle.Image:
        image = Image.fromarray(np.array(rows, np.uint8).transpose(1, 2, 0).copy())
        return oracle.planes(np.asarray(operation(image, rng)).tolist())

    return on_rows


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), width=st.integers(4, 24), height=st.integers(4, 24))
def test_mix_equals_the_reference(seed: int, width: int, height: int) -> None:
    """The chains use the operations that are compared above."""
    image = image_files.noise(seed % 1000, width, height)
    found = augmix(image, random.Random(seed))
    rows = oracle.planes(np.asarray(image).tolist())
    expected = as_array(oracle.mix(rows, random.Random(seed), [on_pixel_rows(operation) for operation in OPERATIONS]))
    assert found.size == image.size
    np.testing.assert_allclose(np.asarray(found, float), expected, rtol=0, atol=0.501)


def test_image_that_no_operation_changes_is_unchanged_bitwise() -> None:
    """The mixing weights sum to one."""
    black = Image.new("RGB", (30, 20))
    for seed in range(20):
        assert augmix(black, random.Random(seed)).getextrema() == ((0, 0),) * 3


def preprocess(size: tuple[int, int] = (24, 40)) -> Preprocess:
    return Preprocess.from_config({**vars(PreprocessCfg(size=size))})


def test_views_are_mixed_crops() -> None:
    """One generator draws box, flip and mix of each crop in turn, also if only one crop is computed."""
    image, cut = image_files.noise(0, 90, 50), preprocess()
    found = cut.views(image, 3, random.Random(5), mixed=True)
    assert torch.equal(found[0], cut(image))
    rng = random.Random(5)
    for view in found[1:]:
        crop = cut.views(image, 1, rng, whole=False)[0]
        expected = augmix(Image.fromarray(crop.permute(1, 2, 0).numpy()), random.Random(rng.random()))
        assert torch.equal(view, pil_to_tensor(expected))
        assert not torch.equal(view, crop)
    single = cut.views(image, 3, random.Random(5), whole=False, mixed=True, only=1)
    assert torch.equal(single, found[2:3])


def test_view_specification_mixes_the_crops(tmp_path: Path) -> None:
    (path,) = image_files.noises(tmp_path, 1)
    image = LazyImage(path)
    found = ViewSpec(3, 5, augmix=True).make_views(preprocess(), image)
    assert torch.equal(found, preprocess().views(image.decode(80), 3, random.Random(5), whole=False, mixed=True))
    assert not torch.equal(found, ViewSpec(3, 5).make_views(preprocess(), image))


def test_views_in_threads_equal_views_one_by_one() -> None:
    cut, images = preprocess(), [image_files.noise(i, 60, 60) for i in range(12)]

    def views(i: int) -> torch.Tensor:
        return cut.views(images[i], 4, random.Random(i), mixed=True)

    one_by_one = [views(i) for i in range(12)]
    for together, expected in zip(in_threads(views, range(12), ahead=12, threads=4), one_by_one, strict=True):
        assert torch.equal(together, expected)


def test_features_with_and_without_augmix_are_cached_separately(tmp_path: Path) -> None:
    assert ViewSpec(3, 7).key == (3, 7, 80)
    assert ViewSpec(3, 7, augmix=True).key == (3, 7, 80, "augmix")
    paths, specs = image_files.noises(tmp_path, 2), (ViewSpec(3, 7), ViewSpec(3, 7, augmix=True))
    plain, mixed = (FeatureProvider(model(), [spec], Cache())(paths) for spec in specs)
    assert not torch.allclose(plain, mixed, atol=1e-3)
    encoded = model().encoded
    again = [FeatureProvider(model(), [spec], Cache())(paths) for spec in specs]
    assert torch.equal(again[0], plain)
    assert torch.equal(again[1], mixed)
    assert model().encoded == encoded
    assert sorted(entry.content.rpartition(": ")[2] for entry in cache_entries(Cache())) == [
        "3 random crops, seed 7",
        "3 random crops, seed 7, AugMix",
    ]
