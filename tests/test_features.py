"""Features of images, and their cache."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import selftpt
import selftpt.data.cache
import selftpt.data.features
import selftpt.data.views
from selftpt.data.cache import Cache, cache_entries, code_digest, content_digest
from selftpt.data.decoding import ImageError, open_image
from selftpt.data.features import FeatureProvider
from selftpt.data.views import ViewSpec
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.files import read_header, write_tensors
from selftpt.methods import METHODS
from tests.helpers import image_files
from tests.helpers.commands import Run
from tests.helpers.folders import make_photos
from tests.helpers.models import model

CROPS = ViewSpec(3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate cache for every test, with one shard per block of images."""
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(selftpt.data.features, "SHARD_SECONDS", -1)
    return tmp_path / "cache"


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return image_files.noises(tmp_path / "images", 5)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list to which every opened image is appended."""
    seen: list[Path] = []
    real: Callable[..., Any] = selftpt.data.views.open_image

    def open_and_record(source: Path, *limits: Any) -> Any:
        seen.append(source)
        return real(source, *limits)

    monkeypatch.setattr(selftpt.data.views, "open_image", open_and_record)
    return seen


def failing(error: ImageError) -> None:
    raise AssertionError(error)


def provider(spec: ViewSpec = CROPS, **more: Any) -> FeatureProvider:
    """Return a provider with a batch size of two images, so that there are several shards."""
    settings: dict[str, Any] = {"model": model(), "on_error": failing, "fixed_batch": True, "batch": 2}
    return FeatureProvider(specs=[spec], **settings | {"cache": Cache()} | more)


def features(paths: list[Path], spec: ViewSpec = CROPS, **more: Any) -> Tensor:
    return provider(spec, **more)(paths)


def shards(cache: Path) -> list[Path]:
    """Return the shards in the order in which they were written."""
    found = [path for path in cache.rglob("*.safetensors") if path.is_file()]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def encode_each(paths: list[Path], spec: ViewSpec) -> Tensor:
    """Return features [N, views, D], with each view encoded separately."""
    own, rows = model(), []
    for path in paths:
        image = open_image(path)
        rng = random.Random(os.fsencode(f"images/{path.name}") if spec.seed is None else spec.seed)
        views = [] if spec.crops else [own.preprocess(image)[None]]
        views += [own.preprocess.views(image, 1, rng, whole=False) for _ in range(spec.crops)]
        rows.append(torch.cat([own.encode_images(view) for view in views]))
    return torch.stack(rows)


@pytest.mark.parametrize("fixed_batch", [True, False])
@pytest.mark.parametrize("spec", [CROPS, ViewSpec(), ViewSpec(2, seed=7)], ids=str)
def test_features_equal_views_encoded_one_by_one(paths: list[Path], spec: ViewSpec, fixed_batch: bool) -> None:
    """The seed determines the crops; without a seed, the names of the image and its folder do."""
    found = features(paths, spec, fixed_batch=fixed_batch)
    assert found.shape == (5, spec.views, model().dimension)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(5, spec.views))
    torch.testing.assert_close(found, encode_each(paths, spec), rtol=0, atol=1e-5)
    assert spec.views == 1 or (found[0, 0] - found[0, 1]).abs().max() > 1e-3, "all views are the same to this model"


def test_several_view_specs_are_concatenated_and_cached_separately(paths: list[Path], opened: list[Path]) -> None:
    """An image is decoded once for all specifications that are not cached."""
    crops = features(paths, ViewSpec(2, seed=7))
    opened.clear()
    both = FeatureProvider(model(), [ViewSpec(), ViewSpec(2, seed=7)], Cache(), batch=2, fixed_batch=True)(paths)
    assert sorted(opened) == paths
    assert torch.equal(both[:, 1:], crops)
    assert torch.equal(both[:, :1], features(paths, ViewSpec()))
    assert sorted(opened) == paths


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_features_do_not_depend_on_the_batch_size(paths: list[Path], cache: Path, batch: int) -> None:
    first = features(paths, batch=batch)
    shutil.rmtree(cache)
    torch.testing.assert_close(features(paths), first, rtol=0, atol=1e-5)


def test_images_in_memory_equal_files(paths: list[Path], cache: Path) -> None:
    expected = features(paths, ViewSpec(2, seed=7), cache=Cache("off"))
    images = [open_image(path) for path in paths]
    for given in (images, [np.asarray(image) for image in images]):
        assert torch.equal(features(given, ViewSpec(2, seed=7)), expected)
    assert shards(cache) == []


def test_crops_of_an_image_in_memory_depend_on_its_pixels(paths: list[Path]) -> None:
    images = [open_image(path) for path in paths]
    assert torch.equal(features(images)[2:], features(images[2:]))
    assert not torch.equal(features(images)[0], features(images)[1])


def test_blocks_are_lazy_and_ordered(paths: list[Path]) -> None:
    taken: list[Path] = []

    def listing() -> Iterator[Path]:
        for path in paths * 20:
            taken.append(path)
            yield path

    blocks = provider(ViewSpec(), cache=Cache("off")).blocks(listing())
    first = next(blocks)
    assert first.indices.tolist() == [0, 1]
    assert first.sources == paths[:2]
    assert len(taken) < 20
    assert [i for block in blocks for i in block.indices.tolist()] == list(range(2, 100))


def test_image_is_encoded_once_for_all_lists(paths: list[Path], opened: list[Path]) -> None:
    """The order of a list and its other images do not matter."""
    own = model()
    before = own.encoded
    store = provider()
    first = store(paths[:3])
    assert sorted(opened) == paths[:3]
    assert own.encoded - before == 3 * 3
    again = store([paths[4], paths[2], paths[0]])
    assert torch.equal(again[1:], first[[2, 0]])
    assert own.encoded - before == 4 * 3
    assert torch.equal(features(paths)[[4, 2, 0]], again)
    assert own.encoded - before == 5 * 3
    assert sorted(opened) == sorted(paths)


def test_features_are_cached_in_the_cache_folder(
    paths: list[Path], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features(paths)
    assert len(shards(cache)) == 3
    assert all(path.is_relative_to(cache / "features") for path in shards(cache))
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(selftpt.data.features, "SHARD_SECONDS", 60)
    features(paths)
    assert len(shards(tmp_path / "other")) == 1


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_lost_shards_are_computed_again_bitwise(
    paths: list[Path], cache: Path, opened: list[Path], lost: tuple[int, ...]
) -> None:
    first, kept = features(paths), shards(cache)
    for i in lost:
        kept[i].unlink()
    opened.clear()
    assert torch.equal(features(paths), first)
    assert sorted(opened) == [path for i in lost for path in paths[2 * i : 2 * i + 2]]


def test_interrupted_run_resumes(paths: list[Path], cache: Path, opened: list[Path], tmp_path: Path) -> None:
    """The run is interrupted in the second of three shards. The first shard is reused, and the result is the same."""
    expected = features(paths, cache=Cache(folder=tmp_path / "other"))

    def interrupt_second_write(file: Path, *rest: Any) -> None:
        if shards(cache):
            raise KeyboardInterrupt
        write_tensors(file, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftpt.data.cache, "write_tensors", interrupt_second_write)
        with pytest.raises(KeyboardInterrupt):
            features(paths)
    assert len(shards(cache)) == 1
    opened.clear()
    assert torch.equal(features(paths), expected)
    assert sorted(opened) == paths[2:]


HEADER = {"model": "vit", "views": "the image"}


def rewritten(file: Path, tensors: dict[str, Tensor], kind: str = "features") -> None:
    header = read_header(file, "features")
    write_tensors(file, kind, tensors, HEADER | {"images": header["images"]})


def other_tensor(file: Path) -> None:
    rewritten(file, {"other": torch.zeros(2, 3, 24)})


def other_count(file: Path) -> None:
    rewritten(file, {"features": torch.zeros(1, 3, 24)})


def other_shape(file: Path) -> None:
    rewritten(file, {"features": torch.zeros(2, 3, 5)})


def other_kind(file: Path) -> None:
    rewritten(file, {"features": torch.zeros(2, 3, 24)}, "prompt")


def flipped_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-4]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_text("text"),
        flipped_bit,
        other_tensor,
        other_count,
        other_shape,
        other_kind,
    ],
    ids=["cut", "empty", "text", "bit", "tensor", "count", "shape", "kind"],
)
def test_damaged_shard_is_set_aside_and_computed_again(
    paths: list[Path], cache: Path, opened: list[Path], damage: Callable[[Path], None]
) -> None:
    first = features(paths)
    damaged = shards(cache)[1]
    damage(damaged)
    opened.clear()
    with pytest.warns(SelfTPTWarning, match=damaged.name):
        assert torch.equal(features(paths), first)
    assert sorted(opened) == paths[2:4]
    opened.clear()
    assert torch.equal(features(paths), first)
    assert opened == []


def test_shard_that_was_written_again_is_used_by_the_same_provider(
    paths: list[Path], cache: Path, opened: list[Path]
) -> None:
    first = features(paths)
    damaged = shards(cache)[1]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    same = provider()
    with pytest.warns(SelfTPTWarning, match="set aside"):
        assert torch.equal(same(paths), first)
    opened.clear()
    assert torch.equal(same(paths), first)
    assert opened == []


def test_changed_image_is_encoded_again(paths: list[Path], opened: list[Path]) -> None:
    """A change is detected by file size or modification time."""
    first = features(paths)
    image_files.noise(99).save(paths[3])
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
    [ViewSpec(3, 6), ViewSpec(2), ViewSpec(), ViewSpec(3, max_megapixels=70), "one-layer", False],
    ids=str,
)
def test_other_views_models_and_batches_are_cached_separately(
    paths: list[Path], cache: Path, opened: list[Path], change: ViewSpec | str | bool
) -> None:
    first = features(paths)
    opened.clear()
    if isinstance(change, ViewSpec):
        features(paths, change)
    else:
        features(paths, **({"model": model(change)} if isinstance(change, str) else {"fixed_batch": False}))
    assert sorted(opened) == paths
    assert len(shards(cache)) > 3
    assert torch.equal(features(paths), first)


def test_features_of_another_code_version_are_not_used(
    paths: list[Path], opened: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Development versions may have different code and the same version number."""
    features(paths)
    opened.clear()
    monkeypatch.setattr(selftpt.data.cache, "code_digest", lambda *packages: f"other {packages}")
    features(paths)
    assert sorted(opened) == paths


def test_code_digest_depends_on_the_source_of_the_packages() -> None:
    digests = {code_digest(), code_digest("data"), code_digest("models"), code_digest("data", "models")}
    assert len(digests) == 4
    assert code_digest("data") == code_digest.__wrapped__("data")


def test_unusable_images_give_nan_rows_and_are_reported_every_time(
    paths: list[Path], opened: list[Path], tmp_path: Path
) -> None:
    """Errors are reported in input order; the features of other images do not change."""
    whole = features(paths)
    paths[1].write_text("no image")
    paths[4].unlink()
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    long = tmp_path / ("x" * 300)
    several = [*paths, odd, long]
    reports = []
    for _ in range(2):
        opened.clear()
        errors: list[str] = []
        found = features(several, on_error=lambda error, errors=errors: errors.append(str(error)))
        reports.append(errors)
        assert found.shape == (7, 3, model().dimension)
        assert found.isnan().all(-1).all(-1).tolist() == [False, True, False, False, True, True, True]
        assert torch.equal(found[[0, 2, 3]], whole[[0, 2, 3]])
        assert set(opened) == {paths[1], paths[4], odd, long}  # unusable images are tried every time
    assert reports[0] == reports[1]
    for line, path in zip(reports[0], (paths[1], paths[4], odd, long), strict=True):
        assert line.startswith(f"{path}: ")


def test_file_name_that_is_not_utf8_is_cached(tmp_path: Path, opened: list[Path]) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    image_files.noise(1).save(odd)
    first = features([odd])
    assert torch.equal(features([odd]), first)
    assert opened == [odd]


def test_images_above_the_size_limit_are_reported(paths: list[Path]) -> None:
    errors: list[ImageError] = []
    found = features(paths, ViewSpec(3, max_megapixels=2.5e-3), on_error=errors.append)
    large = [width * height > 2500 for width, height in (open_image(path).size for path in paths)]
    assert 0 < sum(large) < 5
    assert found.isnan().all(-1).all(-1).tolist() == large
    assert all("over the limit of 0.0025" in str(error) for error in errors)


def test_image_that_was_missing_before_is_encoded(paths: list[Path]) -> None:
    hidden = paths[2].rename(paths[2].with_suffix(".away"))
    errors: list[ImageError] = []
    assert features(paths, on_error=errors.append)[2].isnan().all()
    assert len(errors) == 1
    hidden.rename(paths[2])
    assert not features(paths).isnan().any()


def test_features_of_unusable_or_no_images(tmp_path: Path) -> None:
    errors: list[ImageError] = []
    found = features([tmp_path / "a.jpg", tmp_path / "b.jpg", tmp_path / "c.jpg"], on_error=errors.append)
    assert found.shape == (3, 3, model().dimension)
    assert found.isnan().all()
    assert len(errors) == 3
    assert features([]).shape == (0, 3, model().dimension)


def test_unwritable_cache_is_a_warning(paths: list[Path], tmp_path: Path) -> None:
    expected = features(paths, cache=Cache("off"))
    with pytest.warns(SelfTPTWarning, match="not cached: cannot write"):
        found = features(paths, cache=Cache(folder=paths[0] / "cache"))
    assert torch.equal(found, expected)


def test_learn_works_with_an_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = make_photos(tmp_path / "photos")
    monkeypatch.setenv("SELFTPT_CACHE", str(photos / "kite" / "0.png" / "cache"))
    config = selftpt.LearnConfig(epochs=1)
    with pytest.warns(SelfTPTWarning, match="not cached"):
        found = selftpt.learn(model(), photos, config)
    assert torch.equal(found.context, selftpt.learn(model(), photos, config, cache=Cache("off")).context)


def test_cache_that_is_off_is_neither_read_nor_written(paths: list[Path], cache: Path, opened: list[Path]) -> None:
    features(paths, cache=Cache("off"))
    assert not cache.exists()
    features(paths)
    opened.clear()
    features(paths, cache=Cache("off"))
    assert sorted(opened) == paths


def test_read_only_cache_is_read_and_not_changed(paths: list[Path], cache: Path, opened: list[Path]) -> None:
    first = features(paths[:4])
    flipped_bit(shards(cache)[1])
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cache.rglob("*") if path.is_file()}
    opened.clear()
    with pytest.warns(SelfTPTWarning, match="not used"):
        found = features(paths, cache=Cache("read-only"))
    assert torch.equal(found[:4], first)
    assert sorted(opened) == paths[2:]
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cache.rglob("*") if path.is_file()} == before


def test_least_recently_used_shards_are_evicted(paths: list[Path], cache: Path, opened: list[Path]) -> None:
    features(paths)
    oldest, middle, newest = shards(cache)
    for age, shard in ((300, oldest), (200, middle), (100, newest)):
        os.utime(shard, (time.time() - age, time.time() - age))
    features(paths[:2])  # makes the oldest the most recently used
    size = sum(path.stat().st_size for path in shards(cache))
    opened.clear()
    limit = (size - newest.stat().st_size + 200) / 1e9  # only two of the shards fit
    Cache(max_gigabytes=limit).evict()
    assert {oldest, newest} == {*shards(cache)}
    features(paths, cache=Cache(max_gigabytes=limit))
    assert sorted(opened) == paths[2:4]
    assert sum(path.stat().st_size for path in shards(cache)) <= limit * 1e9


@pytest.mark.parametrize("wrong", [{"mode": "maybe"}, {"max_gigabytes": 0}, {"max_gigabytes": -1.0}])
def test_invalid_cache_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match="cache"):
        Cache(**wrong)


def test_cache_entries_are_listed_and_removed(paths: list[Path], cache: Path) -> None:
    assert list(cache_entries(Cache())) == []
    features(paths)
    features(paths[:2], ViewSpec())
    damaged, *_ = shards(cache)
    damaged.write_text("damaged")
    (cache / "classifiers").mkdir()
    (cache / "classifiers" / "one.safetensors").write_bytes(b"12345")
    found = {entry.content: entry for entry in cache_entries(Cache())}
    name = f"{model().id} fp32"
    assert {content: entry.items for content, entry in found.items()} == {
        f"{name}: 3 random crops": 3,
        f"{name}: the image": 2,
        "adapted classifiers": 1,
    }
    assert sum(entry.bytes for entry in found.values()) == sum(path.stat().st_size for path in shards(cache))
    found[f"{name}: 3 random crops"].remove()
    found["adapted classifiers"].remove()
    assert [entry.content for entry in cache_entries(Cache())] == [f"{name}: the image"]


def test_eviction_keeps_the_files_of_running_training(tmp_path: Path) -> None:
    learned = tmp_path / "learned"
    learned.mkdir()
    names = ["a.safetensors.checkpoint", "a.lock", "a.safetensors.log.jsonl", "b.safetensors", "c.safetensors.damaged"]
    for name in names:
        (learned / name).write_bytes(bytes(1000))
    Cache(max_gigabytes=1e-9, folder=tmp_path).evict()
    assert sorted(path.name for path in learned.iterdir()) == sorted(names[:3])


def test_float_tensors_can_be_mixed_with_files(paths: list[Path]) -> None:
    """Float tensors are already normalised, so the files are normalised too, for features and for pixels."""
    own = model()
    ready = own.preprocess.normalize(own.preprocess(open_image(paths[1]))[None])[0]
    mixed = [paths[0], ready, paths[2]]
    expected = features(paths[:3], ViewSpec(), cache=Cache("off"))
    torch.testing.assert_close(features(mixed, ViewSpec(), cache=Cache("off")), expected, rtol=0, atol=1e-5)
    (block,) = provider(ViewSpec(), cache=Cache("off")).blocks(mixed, pixels=True)
    found = own.encode_images(block.views[:, 0])
    torch.testing.assert_close(found, expected[:, 0], rtol=0, atol=1e-5)


def test_float_tensor_that_is_not_finite_is_reported(paths: list[Path]) -> None:
    errors: list[ImageError] = []
    found = features([paths[0], torch.full((3, 32, 32), float("nan")), paths[1]], ViewSpec(), on_error=errors.append)
    assert found.isnan().all(-1).flatten().tolist() == [False, True, False]
    assert "not finite" in str(errors[0])


def test_different_content_gives_different_digests() -> None:
    first, second = (Image.new("P", (2, 2)) for _ in range(2))
    first.putpalette([255, 0, 0])
    second.putpalette([0, 255, 0])
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3).bfloat16(), torch.ones(2, 3, requires_grad=True)]
    assert len({content_digest(value) for value in (first, second, *tensors, np.zeros((2, 3)))}) == 7


def test_cache_that_is_off_needs_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise SelfTPTError("there is no folder")

    monkeypatch.setattr(selftpt.data.cache, "cache_folder", none)
    monkeypatch.setattr("selftpt.methods.difftpt.cache_folder", none)
    Cache("off")
    assert METHODS["difftpt"].cost(METHODS["difftpt"].config) == "127 views, 4 steps"
    with pytest.raises(SelfTPTError, match="no folder"):
        Cache()


def test_generated_images_are_pruned_only_if_named(run: Run, cache: Path) -> None:
    (cache / "generated" / "a").mkdir(parents=True)
    (cache / "generated" / "a" / "000.png").write_bytes(b"12345")
    for text in ([], ["image"], ["diffusion model"]):
        assert "kept the generated images" in run("cache", *text, "--prune").out
    assert (cache / "generated" / "a" / "000.png").exists()
    run("cache", "generated", "--prune")
    assert not (cache / "generated").exists()
