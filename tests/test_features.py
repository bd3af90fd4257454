"""Image features are computed once, and kept."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import selftpt.data.features
from selftpt.data.decoding import ImageError, open_image
from selftpt.data.features import FeatureStore, ViewSpec, shelves
from selftpt.errors import SelfTPTError
from selftpt.files import write_tensors
from tests import pictures
from tests.small import model

LOOK = ViewSpec(3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test, with two pictures in a group and every group in a pack of its own."""
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(selftpt.data.features, "GROUP", 2)
    monkeypatch.setattr(selftpt.data.features, "PACK_SECONDS", -1)
    return tmp_path / "cache"


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return pictures.noises(tmp_path / "pictures", 5)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The pictures that were opened."""
    seen: list[Path] = []
    real: Callable[..., Any] = selftpt.data.features.open_image

    def open_and_tell(source: Path, *limits: Any) -> Any:
        seen.append(source)
        return real(source, *limits)

    monkeypatch.setattr(selftpt.data.features, "open_image", open_and_tell)
    return seen


def failing(error: ImageError) -> None:
    raise AssertionError(error)


def features(paths: list[Path], look: ViewSpec = LOOK, **more: Any) -> Tensor:
    return FeatureStore(**{"model": model(), "look": look, "on_error": failing} | more)(paths)


def packs(cache: Path) -> list[Path]:
    """In the order they were written."""
    found = [path for path in cache.rglob("*") if path.is_file()]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


@pytest.mark.parametrize("look", [LOOK, ViewSpec(), ViewSpec(2, seed=7)], ids=str)
def test_features_of_every_look(paths: list[Path], look: ViewSpec) -> None:
    """Each view looked at alone. Crops depend on the seed, or on the picture's name and its folder's."""
    found, eyes = features(paths, look), model()
    assert found.shape == (5, look.views, eyes.dimension)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(5, look.views))
    for i, path in enumerate(paths):
        picture = open_image(path)
        rng = random.Random(f"pictures/{path.name}" if look.seed is None else look.seed)
        views = [] if look.crops else [eyes.preprocess(picture)[None]]
        views += [eyes.preprocess.views(picture, 1, rng, whole=False) for _ in range(look.crops)]
        torch.testing.assert_close(found[i], torch.cat([eyes.encode_images(v) for v in views]), rtol=0, atol=1e-5)
    assert look.views == 1 or (found[0, 0] - found[0, 1]).abs().max() > 1e-3, "all views look the same to this model"


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_any_batch(paths: list[Path], cache: Path, batch: int) -> None:
    first = features(paths, batch=batch)
    shutil.rmtree(cache)
    torch.testing.assert_close(features(paths), first, rtol=0, atol=1e-5)


def test_a_picture_passes_the_tower_once(paths: list[Path], opened: list[Path]) -> None:
    """In whatever list it comes: another order, another few, with new ones."""
    eyes = model()
    before = eyes.encoded
    store = FeatureStore(eyes, LOOK, failing)
    first = store(paths[:3])
    assert sorted(opened) == paths[:3]
    assert eyes.encoded - before == 3 * 3
    again = store([paths[4], paths[2], paths[0]])
    assert torch.equal(again[1:], first[[2, 0]])
    assert eyes.encoded - before == 4 * 3
    later = FeatureStore(model(), LOOK, failing)
    assert torch.equal(later(paths)[[4, 2, 0]], again)
    assert eyes.encoded - before == 5 * 3
    assert sorted(opened) == sorted(paths)


def test_where_they_are_kept(paths: list[Path], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features(paths)
    assert len(packs(cache)) == 3
    assert all(path.is_relative_to(cache / "features") for path in packs(cache))
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(selftpt.data.features, "PACK_SECONDS", 60)
    features(paths)
    assert len(packs(tmp_path / "other")) == 1


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_what_is_lost_is_computed_again_to_the_bit(
    paths: list[Path], cache: Path, opened: list[Path], lost: tuple[int, ...]
) -> None:
    first, kept = features(paths), packs(cache)
    before = {path: path.read_bytes() for path in kept}
    for i in lost:
        kept[i].unlink()
    opened.clear()
    assert torch.equal(features(paths), first)
    assert sorted(opened) == [path for i in lost for path in paths[2 * i : 2 * i + 2]]
    assert {path: path.read_bytes() for path in packs(cache)} == before


def test_a_killed_run_goes_on(paths: list[Path], cache: Path, opened: list[Path], tmp_path: Path) -> None:
    """Killed in the second of three packs: what the first has is not done again, and the end is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFTPT_CACHE", str(tmp_path / "other"))
        wanted = features(paths)

    def killed(file: Path, *rest: Any) -> None:
        if packs(cache):
            raise KeyboardInterrupt
        write_tensors(file, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftpt.data.features, "write_tensors", killed)
        with pytest.raises(KeyboardInterrupt):
            features(paths)
    assert len(packs(cache)) == 1
    opened.clear()
    assert torch.equal(features(paths), wanted)
    assert sorted(opened) == paths[2:]


def other_tensor(file: Path) -> None:
    write_tensors(file, "features", {"other": torch.zeros(1)}, {"pictures": []})


def other_count(file: Path) -> None:
    write_tensors(file, "features", {"features": torch.zeros(1, 3, 16)}, {"pictures": []})


def other_kind(file: Path) -> None:
    write_tensors(file, "prompt", {"features": torch.zeros(1)}, {"pictures": []})


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-4]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_text("text"),
        other_tensor,
        other_count,
        other_kind,
    ],
    ids=["cut", "empty", "text", "tensor", "count", "kind"],
)
def test_a_damaged_pack_is_computed_again(
    paths: list[Path], cache: Path, opened: list[Path], harm: Callable[[Path], None]
) -> None:
    first = features(paths)
    harm(packs(cache)[1])
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
    assert torch.equal(second[[0, 1, 2, 4]], first[[0, 1, 2, 4]])
    assert not torch.isclose(second[3], first[3], atol=1e-4).all()
    opened.clear()
    stat = paths[0].stat()
    os.utime(paths[0], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    torch.testing.assert_close(features(paths), second, rtol=0, atol=1e-6)
    assert opened == [paths[0]]
    stat = paths[0].stat()
    paths[0].write_bytes(paths[0].read_bytes() + b"more")
    os.utime(paths[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    opened.clear()
    features(paths)
    assert opened == [paths[0]]


@pytest.mark.parametrize(
    "change",
    [ViewSpec(3, 6), ViewSpec(2), ViewSpec(), ViewSpec(3, max_megapixels=70), "one-layer"],
    ids=str,
)
def test_other_looks_and_models_are_kept_apart(
    paths: list[Path], cache: Path, opened: list[Path], change: ViewSpec | str
) -> None:
    first = features(paths)
    opened.clear()
    features(paths, change) if isinstance(change, ViewSpec) else features(paths, model=model(change))
    assert sorted(opened) == paths
    assert len(packs(cache)) == 6
    assert torch.equal(features(paths), first)


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
        assert found.shape == (7, 3, model().dimension)
        assert found.isnan().all(-1).all(-1).tolist() == [False, True, False, False, True, True, True]
        assert torch.equal(found[[0, 2, 3]], whole[[0, 2, 3]])
        assert set(opened) == {paths[1], paths[4], odd, long}  # they are tried every time
    assert reports[0] == reports[1]
    for line, path in zip(reports[0], (paths[1], paths[4], odd, long), strict=True):
        assert line.startswith(f"{path}: ")


def test_a_name_that_is_no_text(tmp_path: Path, opened: list[Path]) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    pictures.noise(1).save(odd)
    first = features([odd])
    assert torch.equal(features([odd]), first)
    assert opened == [odd]


def test_large_pictures_by_the_limit(paths: list[Path]) -> None:
    told: list[ImageError] = []
    found = features(paths, ViewSpec(3, max_megapixels=2.5e-3), on_error=told.append)
    large = [width * height > 2500 for width, height in (open_image(path).size for path in paths)]
    assert 0 < sum(large) < 5
    assert found.isnan().all(-1).all(-1).tolist() == large
    assert all("over the limit of 0.0025" in str(error) for error in told)


def test_a_picture_that_comes_back(paths: list[Path]) -> None:
    hidden = paths[2].rename(paths[2].with_suffix(".away"))
    told: list[ImageError] = []
    assert features(paths, on_error=told.append)[2].isnan().all()
    assert len(told) == 1
    hidden.rename(paths[2])
    assert not features(paths).isnan().any()


def test_nothing_to_use(tmp_path: Path) -> None:
    told: list[ImageError] = []
    found = features([tmp_path / "a.jpg", tmp_path / "b.jpg", tmp_path / "c.jpg"], on_error=told.append)
    assert found.shape == (3, 3, model().dimension)
    assert found.isnan().all()
    assert len(told) == 3
    assert features([]).shape == (0, 3, model().dimension)


def test_a_cache_that_cannot_be_written(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFTPT_CACHE", str(paths[0] / "cache"))
    with pytest.raises(SelfTPTError, match="cannot write"):
        features(paths)


def test_shelves(paths: list[Path], cache: Path) -> None:
    assert list(shelves()) == []
    features(paths)
    features(paths[:2], ViewSpec())
    packs(cache)[0].write_text("damaged")
    found = {shelf.look: shelf for shelf in shelves()}
    assert {look: shelf.pictures for look, shelf in found.items()} == {"3 random crops": 3, "the picture": 2}
    assert {shelf.model for shelf in found.values()} == {f"{model().id} fp32"}
    assert sum(shelf.bytes for shelf in found.values()) == sum(path.stat().st_size for path in packs(cache))
    found["3 random crops"].remove()
    assert [shelf.look for shelf in shelves()] == ["the picture"]
