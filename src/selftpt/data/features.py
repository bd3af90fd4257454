"""Features of the views of images, for learning, prediction, methods and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selftpt.data.cache import NO_CACHE, Cache, FeatureCache
from selftpt.data.decoding import ImageError, ImageInput, warn_of
from selftpt.data.threads import in_threads
from selftpt.data.views import FileFingerprint, LazyImage, ViewSpec, stack_views
from selftpt.errors import SelfTPTError
from selftpt.models import Model
from selftpt.progress import Bar

BATCH = 64  # views that the image tower encodes at once
BLOCK_VIEWS = 4096  # views whose features are in memory at once
BLOCK_PIXELS = 256  # views whose pixels are in memory at once
SHARD_SECONDS = 5.0  # of work in one shard of the cache, which an interrupted run loses at most


@dataclass(frozen=True, eq=False)
class Block:
    """A batch of usable images.

    Attributes:
        indices: Their positions in the list of images, [n].
        sources: The images as they were given.
        views: L2-normalised features [n, V, D], or pixels, uint8 [n, V, 3, S, S]; on the model's device.
    """

    indices: Tensor
    sources: list[ImageInput]
    views: Tensor


@dataclass
class _Item:
    """An image with its features, or else its pixels, for each view specification."""

    index: int
    source: ImageInput
    parts: list[Tensor]
    encoded: list[bool]
    fingerprints: list[FileFingerprint | None]


class FeatureProvider:
    """Computes the features of views of images with the image tower, or reads them from the cache.

    Args:
        model: The model.
        specs: View specifications. Their views are concatenated.
        cache: The cache of features.
        batch: The maximum number of views that the image tower encodes at once.
        fixed_batch: Whether every batch is zero-padded to `batch` views. The features of an image are then bitwise
            identical whatever the other images are and whatever was cached before. Training and benchmarks rely on
            this.
        on_error: Called for every image that cannot be used. The image is then left out.
    """

    def __init__(
        self,
        model: Model,
        specs: Sequence[ViewSpec],
        cache: Cache = NO_CACHE,
        *,
        batch: int = BATCH,
        fixed_batch: bool = False,
        on_error: Callable[[ImageError], None] = warn_of,
    ) -> None:
        self.model, self.specs, self.batch, self.fixed_batch = model, list(specs), batch, fixed_batch
        self.on_error = on_error
        self.caches = [FeatureCache(cache, model, spec, batch if fixed_batch else None) for spec in self.specs]
        self.views = sum(spec.views for spec in self.specs)

    def __call__(self, images: Sequence[ImageInput]) -> Tensor:
        """Compute the features [N, V, D] of images, on the CPU. They are NaN for an image that cannot be used."""
        features = torch.full((len(images), self.views, self.model.dimension), float("nan"))
        with Bar("image features", len(images)) as bar:
            for block in self.blocks(images):
                features[block.indices] = block.views.cpu()
                bar.step(len(block.indices))
        return features

    def blocks(self, images: Iterable[ImageInput], *, pixels: bool = False) -> Iterator[Block]:
        """Yield the usable images in their order, in blocks.

        Images are decoded in threads while the image tower computes.

        Args:
            images: The images. They are read as the work proceeds.
            pixels: Whether the blocks contain pixels instead of features.
        """
        limit = max(1, (BLOCK_PIXELS if pixels else BLOCK_VIEWS) // self.views)
        # With a fixed batch size, five batches are encoded together, and only the last one is padded.
        group = max(1, min(self.batch, (5 if self.fixed_batch else 1) * self.batch // self.views))

        def prepare(numbered: tuple[int, ImageInput]) -> _Item | ImageError:
            return self._prepare(*numbered, pixels)

        waiting: list[_Item] = []
        missing = 0
        fresh: list[dict[FileFingerprint, Tensor]] = [{} for _ in self.specs]
        begin = time.monotonic()
        try:
            for item in in_threads(prepare, enumerate(images), ahead=2 * group):
                if isinstance(item, ImageError):
                    self.on_error(item)
                    continue
                waiting.append(item)
                missing += not all(item.encoded)
                if len(waiting) == limit or (not pixels and missing == group):
                    yield self._finish(waiting, pixels, fresh)
                    waiting, missing = [], 0
                    if time.monotonic() - begin > SHARD_SECONDS:
                        self._write(fresh)
                        begin = time.monotonic()
            if waiting:
                yield self._finish(waiting, pixels, fresh)
        finally:
            self._write(fresh)

    def _prepare(self, index: int, source: ImageInput, pixels: bool) -> _Item | ImageError:
        image, item = LazyImage(source), _Item(index, source, [], [], [])
        try:
            for spec, cache in zip(self.specs, self.caches, strict=True):
                fingerprint = None if pixels or not cache.cache.reads else spec.fingerprint(source)
                features = cache.get(fingerprint)
                item.parts.append(spec.make_views(self.model.preprocess, image) if features is None else features)
                item.encoded.append(features is not None)
                item.fingerprints.append(fingerprint)
        except ImageError as error:
            return error
        return item

    def _finish(self, items: list[_Item], pixels: bool, fresh: list[dict[FileFingerprint, Tensor]]) -> Block:
        if not pixels:
            self._encode(items, fresh)
        device = self.model.device
        parts = [part for item in items for part in item.parts]
        views = (stack_views(parts, self.model.preprocess) if pixels else torch.cat(parts)).to(device)
        views = views.unflatten(0, (len(items), self.views))
        return Block(torch.tensor([item.index for item in items]), [item.source for item in items], views)

    def _encode(self, items: list[_Item], fresh: list[dict[FileFingerprint, Tensor]]) -> None:
        """Replace the pixels of items with their features."""
        todo = [(item, k) for k in range(len(self.specs)) for item in items if not item.encoded[k]]
        if not todo:
            return
        pixels = stack_views([item.parts[k] for item, k in todo], self.model.preprocess)
        features = torch.cat([self._encode_batch(rows) for rows in pixels.split(self.batch)])
        if not features.isfinite().all():
            hint = "" if self.model.precision == "fp32" else f" in {self.model.precision}: use fp32"
            raise SelfTPTError(f"the features of the image tower are not finite{hint}")
        for (item, k), part in zip(todo, features.split([len(item.parts[k]) for item, k in todo]), strict=True):
            item.parts[k], fingerprint = part, item.fingerprints[k]
            if fingerprint is not None:
                fresh[k][fingerprint] = part

    def _encode_batch(self, pixels: Tensor) -> Tensor:
        """Compute the features [n, D] of n views."""
        count = len(pixels)
        if self.fixed_batch:
            pixels = torch.cat([pixels, pixels.new_zeros(self.batch - count, *pixels.shape[1:])])
        self.model.encoded += count
        return self.model.encode_images(pixels)[:count].cpu()

    def _write(self, fresh: list[dict[FileFingerprint, Tensor]]) -> None:
        for cache, features in zip(self.caches, fresh, strict=True):
            cache.put(features)
            features.clear()
