"""Image features are computed once, and kept."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import selftpt.features
from selftpt.errors import SelfTPTError
from selftpt.features import crop_features
from selftpt.files import write_tensors
from selftpt.images import PictureError, open_picture
from tests import pictures
from tests.small import model

CROPS, SEED = 3, 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test, with two pictures in a shard."""
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(selftpt.features, "SHARD", 2)
    return tmp_path / "cache"


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return pictures.noises(tmp_path / "pictures", 5)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The pictures that were opened."""
    seen: list[Path] = []
    real: Callable[..., Any] = selftpt.features.open_picture

    def open_and_tell(source: Path, *limits: Any) -> Any:
        seen.append(source)
        return real(source, *limits)

    monkeypatch.setattr(selftpt.features, "open_picture", open_and_tell)
    return seen


def failing(error: PictureError) -> None:
    raise AssertionError(error)


def features(paths: list[Path], **more: Any) -> Tensor:
    return crop_features(**{"model": model(), "paths": paths, "crops": CROPS, "seed": SEED, "on_error": failing} | more)


def shards(cache: Path) -> list[Path]:
    found = sorted(cache.rglob("*"))
    return [path for path in found if path.is_file()]


def test_features_of_crops(paths: list[Path]) -> None:
    """Each crop looked at alone: they depend on the seed and the place in the list."""
    found, eyes = features(paths), model()
    assert found.shape == (5, CROPS, eyes.dimension)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(5, CROPS))
    for i, path in enumerate(paths):
        crops = eyes.preprocess.crops(open_picture(path), CROPS, random.Random(f"crops {SEED} {i}"))
        wanted = torch.cat([eyes.encode_images(crop[None]) for crop in crops])
        torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-5)
    assert (found[0, 0] - found[0, 1]).abs().max() > 1e-3, "all crops look the same to this model"


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_any_batch(paths: list[Path], batch: int) -> None:
    torch.testing.assert_close(features(paths, batch=batch), features(paths), rtol=0, atol=1e-5)


def test_a_second_call_opens_no_picture(paths: list[Path], opened: list[Path]) -> None:
    first = features(paths)
    assert sorted(opened) == paths
    opened.clear()
    assert torch.equal(features(paths), first)
    assert opened == []


def test_where_they_are_kept(paths: list[Path], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features(paths)
    assert [path.name for path in shards(cache)] == [f"{i:08d}.safetensors" for i in (0, 2, 4)]
    assert all(path.is_relative_to(cache / "features") for path in shards(cache))
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "other"))
    features(paths)
    assert len(shards(tmp_path / "other")) == 3


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_what_is_lost_is_computed_again_to_the_bit(
    paths: list[Path], cache: Path, opened: list[Path], lost: tuple[int, ...]
) -> None:
    first, kept = features(paths), shards(cache)
    before = [path.read_bytes() for path in kept]
    for i in lost:
        kept[i].unlink()
    opened.clear()
    assert torch.equal(features(paths), first)
    assert sorted(opened) == [path for i in lost for path in paths[2 * i : 2 * i + 2]]
    assert [path.read_bytes() for path in shards(cache)] == before


def test_a_killed_run_goes_on(paths: list[Path], cache: Path, opened: list[Path], tmp_path: Path) -> None:
    """Killed in the second of three shards: what the first has is not done again, and the end is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFTPT_CACHE", str(tmp_path / "other"))
        wanted = features(paths)

    def killed(file: Path, *rest: Any) -> None:
        if file.name != "00000000.safetensors":
            raise KeyboardInterrupt
        write_tensors(file, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftpt.features, "write_tensors", killed)
        with pytest.raises(KeyboardInterrupt):
            features(paths)
    assert len(shards(cache)) == 1
    opened.clear()
    assert torch.equal(features(paths), wanted)
    assert sorted(opened) == paths[2:]


def other_tensor(file: Path) -> None:
    write_tensors(file, "features", {"other": torch.zeros(1)}, {"errors": []})


def other_kind(file: Path) -> None:
    write_tensors(file, "prompt", {"features": torch.zeros(1)}, {"errors": []})


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-4]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_text("text"),
        other_tensor,
        other_kind,
    ],
    ids=["cut", "empty", "text", "tensor", "kind"],
)
def test_a_damaged_shard_is_computed_again(
    paths: list[Path], cache: Path, opened: list[Path], harm: Callable[[Path], None]
) -> None:
    first = features(paths)
    harm(shards(cache)[1])
    opened.clear()
    assert torch.equal(features(paths), first)
    assert sorted(opened) == paths[2:4]
    opened.clear()
    assert torch.equal(features(paths), first)
    assert opened == []


def test_a_changed_picture_is_looked_at_again(paths: list[Path], opened: list[Path]) -> None:
    """Told by its size, and by its time where the size is the same."""
    first = features(paths)
    pictures.noise(99).save(paths[3])
    second = features(paths)
    assert torch.equal(second[:3], first[:3])
    assert not torch.isclose(second[3], first[3], atol=1e-4).all()
    opened.clear()
    stat = paths[0].stat()
    os.utime(paths[0], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    assert torch.equal(features(paths), second)
    assert paths[0] in opened
    stat = paths[0].stat()
    paths[0].write_bytes(paths[0].read_bytes() + b"more")
    os.utime(paths[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    opened.clear()
    features(paths)
    assert paths[0] in opened


@pytest.mark.parametrize(
    "change",
    [{"seed": 6}, {"crops": 2}, {"model": "one-layer"}, {"max_megapixels": 70}, {"batch": 2}],
    ids=["seed", "crops", "model", "limit", "batch"],
)
def test_other_settings_are_kept_apart(
    paths: list[Path], cache: Path, opened: list[Path], change: dict[str, Any]
) -> None:
    first = features(paths)
    change = {key: model(value) if key == "model" else value for key, value in change.items()}
    opened.clear()
    other = features(paths, **change)
    assert sorted(opened) == paths
    if "seed" in change or "model" in change:
        assert not torch.isclose(other, first, atol=1e-4).all(-1).any()
    assert len(shards(cache)) == 6
    assert torch.equal(features(paths), first)


def test_another_order_is_kept_apart(paths: list[Path], cache: Path) -> None:
    features(paths)
    features(paths[::-1])
    assert len(shards(cache)) == 6


def test_pictures_that_cannot_be_used(paths: list[Path], opened: list[Path], tmp_path: Path) -> None:
    """Their rows are NaN, and they are told every time, in order; the rest is as it would be."""
    whole = features(paths)
    paths[1].write_text("no picture")
    paths[4].unlink()
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    long = tmp_path / ("x" * 300)
    several = [*paths, odd, long]
    reports = []
    for _ in range(2):
        opened.clear()
        told: list[str] = []
        found = features(several, on_error=lambda error, told=told: told.append(str(error)))
        reports.append(told)
        assert found.shape == (7, CROPS, model().dimension)
        assert found.isnan().all(-1).all(-1).tolist() == [False, True, False, False, True, True, True]
        torch.testing.assert_close(found[[0, 2, 3]], whole[[0, 2, 3]], rtol=0, atol=1e-6)
        assert {paths[1], paths[4], odd, long} <= set(opened)  # they are tried every time
    assert reports[0] == reports[1]
    for line, path in zip(reports[0], (paths[1], paths[4], odd, long), strict=True):
        assert line.startswith(f"{path}: ")


def test_large_pictures_by_the_limit(paths: list[Path]) -> None:
    told: list[PictureError] = []
    found = features(paths, max_megapixels=2.5e-3, on_error=told.append)
    large = [width * height > 2500 for width, height in (open_picture(path).size for path in paths)]
    assert 0 < sum(large) < 5
    assert found.isnan().all(-1).all(-1).tolist() == large
    assert all("over the limit of 0.0025" in str(error) for error in told)


def test_a_picture_that_comes_back(paths: list[Path]) -> None:
    wanted = features(paths)
    hidden = paths[2].rename(paths[2].with_suffix(".away"))
    told: list[PictureError] = []
    assert features(paths, on_error=told.append)[2].isnan().all()
    assert len(told) == 1
    hidden.rename(paths[2])
    assert torch.equal(features(paths), wanted)


def test_a_picture_that_may_be_read_again(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """To allow the reading of a file changes neither its size nor its time."""

    def locked(source: Path, *limits: Any) -> Any:
        if source == paths[2]:
            raise PictureError(f"{source}: no permission to read it")
        return open_picture(source, *limits)

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != paths[2] or mode != os.R_OK)
        patch.setattr(selftpt.features, "open_picture", locked)
        assert features(paths, on_error=lambda _: None)[2].isnan().all()
    assert not features(paths).isnan().any()


def test_nothing_to_use(tmp_path: Path) -> None:
    told: list[PictureError] = []
    found = features([tmp_path / "a.jpg", tmp_path / "b.jpg", tmp_path / "c.jpg"], on_error=told.append)
    assert found.shape == (3, CROPS, model().dimension)
    assert found.isnan().all()
    assert len(told) == 3


def test_a_cache_that_cannot_be_written(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFTPT_CACHE", str(paths[0] / "cache"))
    with pytest.raises(SelfTPTError, match="cannot write"):
        features(paths)
