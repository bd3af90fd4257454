"""Stage 3: every image is classified directly, at the speed of zero-shot; Self-TPT-v adds 63 augmented views."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch
from PIL import Image
from torch import Tensor

from selftpt.config import PredictConfig
from selftpt.data.decoding import ImageError, ImageInput, warn_of
from selftpt.data.features import Block, FeatureProvider
from selftpt.data.sources import find_images, is_place
from selftpt.data.views import image_and_crops
from selftpt.errors import SelfTPTError
from selftpt.files import Schema, read_tensors, write_tensors
from selftpt.models import Model, ModelId, load_recorded_model
from selftpt.names import check_names
from selftpt.version import __version__

SCHEMA = Schema(
    header={"model": get_type_hints(ModelId), "random_init": bool, "names": list, "scale": float, "origin": dict},
    tensors={"weights": "C D"},
)


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image, best first.

    Attributes:
        path: The image's path; None for an image in memory.
        names: Class names.
        probabilities: Their probabilities.
        labels: Their indices in the class list.
    """

    path: str | None
    names: tuple[str, ...]
    probabilities: tuple[float, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Classifier:
    """One vector per class: all that stage 3 needs besides the model's image tower.

    Attributes:
        names: Class names, [C].
        weights: Class vectors [C, D], on the CPU.
        scale: 1 / τ of Eq. 1.
        model_id: The model whose image features they are compared with.
        origin: How the class vectors were made.
        model: The model, or None until it is needed.
    """

    names: tuple[str, ...]
    weights: Tensor
    scale: float
    model_id: ModelId
    origin: Mapping[str, Any] = field(default_factory=dict)
    model: Model | None = None
    _on_device: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", check_names(self.names))

    @classmethod
    def of(cls, model: Model, names: Sequence[str], weights: Tensor, **origin: Any) -> Classifier:
        """A classifier of a model's class vectors [C, D]; `origin` says how they were made."""
        return cls(tuple(names), weights.cpu(), model.scale, model.id, {**origin, "selftpt": __version__}, model)

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, which is loaded again when it is needed."""
        return {**self.__dict__, "model": None, "_on_device": {}}

    def __repr__(self) -> str:
        return f"Classifier({len(self.names)} classes, {self.model_id})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the classifier to a file; the model itself is not in it."""
        header = {
            "model": dataclasses.asdict(self.model_id),
            "random_init": self.model_id.random_init,
            "names": self.names,
            "scale": self.scale,
            "origin": dict(self.origin),
        }
        write_tensors(Path(path), "classifier", {"weights": self.weights}, header, SCHEMA)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model | None = None) -> Classifier:
        """Read a classifier; without a model, the one it names is loaded when it is first needed."""
        header, tensors = read_tensors(Path(path), "classifier", SCHEMA)
        weights, scale, model_id = tensors["weights"], header["scale"], ModelId(**header["model"])
        try:
            names = check_names(header["names"])
            if len(names) != len(weights):
                raise SelfTPTError(f"{len(names)} names for {len(weights)} class vectors")
            if not scale > 0:
                raise SelfTPTError(f"the scale must be above 0, not {scale}")
        except SelfTPTError as error:
            raise SelfTPTError(f"{path} is not a valid classifier file: {error}") from error
        made = cls(names, weights, scale, model_id, header["origin"])
        return made if model is None else made.with_model(model, f"the classifier {path}")

    def with_model(self, model: Model, what: str = "the classifier") -> Classifier:
        """The classifier with its model.

        Raises:
            SelfTPTError: It was made with another model; `what` names it in the message.
        """
        self.model_id.check(model, what)
        if self.weights.shape[1] != model.dimension:
            raise SelfTPTError(
                f"{what} does not fit its model: its class vectors have {self.weights.shape[1]} dimensions, and the "
                f"features of {model.id} have {model.dimension}"
            )
        return dataclasses.replace(self, model=model)

    def probabilities(self, features: Tensor) -> Tensor:
        """Eq. 1: L2-normalised image features [..., D] to probabilities [..., C], on the features' device."""
        key = features.device, features.dtype
        if key not in self._on_device:
            self._on_device[key] = self.weights.to(features)
        return (self.scale * features @ self._on_device[key].t()).softmax(-1)

    def __call__(self, features: Tensor) -> Tensor:
        """L2-normalised features of the views of images [N, V, D] to probabilities [N, C], the mean over the views."""
        return self.probabilities(features).mean(-2)

    def predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        top: int | None = None,
        config: PredictConfig | None = None,
        on_error: Callable[[ImageError], None] = warn_of,
    ) -> Iterator[Prediction]:
        """Classify images, one after the other, in the order given.

        Args:
            images: Paths of files, folders or patterns, PIL images, uint8 arrays [H, W, 3] or tensors [3, H, W], or
                float tensors [3, S, S] that are preprocessed already.
            top: Number of classes in each prediction.
            config: The configuration of stage 3.
            on_error: Called for every image that cannot be used; it is then left out.
        """
        config = config or PredictConfig()
        if top is not None:
            config = dataclasses.replace(config, top=top)
        model = self.model or load_recorded_model(self.model_id, "the classifier")
        object.__setattr__(self, "model", self.with_model(model).model)
        return self._predict(model, images, config, on_error)

    def _predict(
        self,
        model: Model,
        images: ImageInput | Iterable[ImageInput],
        config: PredictConfig,
        on_error: Callable[[ImageError], None],
    ) -> Iterator[Prediction]:
        specs = image_and_crops(config.views, seed=config.seed, max_megapixels=config.max_megapixels)
        provider = FeatureProvider(model, specs, batch=config.batch, on_error=on_error)
        for block in provider.blocks(expand(images, on_error)):
            yield from top_classes(
                merge_views(self.probabilities(block.views), config.confidence_ratio), self.names, block, config.top
            )


def top_classes(probabilities: Tensor, names: Sequence[str], block: Block, top: int) -> Iterator[Prediction]:
    """The `top` best of probabilities [N, C] for the images of a block [N], as predictions."""
    best = probabilities.topk(min(top, len(names)))
    for source, values, labels in zip(block.sources, best.values.tolist(), best.indices.tolist(), strict=True):
        path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
        yield Prediction(path, tuple(names[i] for i in labels), tuple(values), tuple(labels))


def expand(images: ImageInput | Iterable[ImageInput], on_error: Callable[[ImageError], None]) -> Iterator[ImageInput]:
    """Single images, with folders and patterns replaced by the images in them."""
    alone = isinstance(images, str | bytes | os.PathLike | Image.Image) or getattr(images, "ndim", 4) <= 3
    if alone or not isinstance(images, Iterable):
        images = [images]  # type: ignore[list-item]
    for image in images:
        if not isinstance(image, str | os.PathLike) or not is_place(image):
            yield image
            continue
        try:
            yield from find_images([image])
        except SelfTPTError as error:
            on_error(ImageError(str(error)))


def entropy(probabilities: Tensor) -> Tensor:
    """In nats: [..., C] to [...]."""
    terms: Tensor = torch.special.entr(probabilities)
    return terms.sum(-1)


def confident_views(probabilities: Tensor, confidence_ratio: float) -> Tensor:
    """Indices of the views with the lowest entropy, in rising order.

    Args:
        probabilities: [..., V, C].
        confidence_ratio: The share of the views that is kept.

    Returns:
        [..., K], K = int(confidence_ratio * V) as in TPT's code, at least 1.
    """
    count = max(1, int(confidence_ratio * probabilities.shape[-2]))
    return entropy(probabilities).argsort(dim=-1, stable=True)[..., :count]


def select_views(values: Tensor, chosen: Tensor) -> Tensor:
    """The values [..., V, X] of chosen views [..., K]: [..., K, X]."""
    return values.gather(-2, chosen[..., None].expand(*chosen.shape, values.shape[-1]))


def merge_views(probabilities: Tensor, confidence_ratio: float) -> Tensor:
    """The mean over the most confident views: [..., V, C] to [..., C]."""
    if confidence_ratio == 1:
        return probabilities.mean(-2)
    return select_views(probabilities, confident_views(probabilities, confidence_ratio)).mean(-2)
