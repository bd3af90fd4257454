"""Stage 3: every picture is classified directly, at the speed of zero-shot; Self-TPT-v looks at 63 more views."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch
from PIL import Image
from torch import Tensor

from selftpt.config import PredictConfig
from selftpt.data.decoding import ImageError, open_image, warn_of
from selftpt.data.sources import find_images, is_place
from selftpt.data.threads import in_threads
from selftpt.errors import SelfTPTError
from selftpt.files import Schema, read_tensors, write_tensors
from selftpt.models import Model, ModelId, load_model
from selftpt.names import check_names
from selftpt.version import __version__

Picture = str | os.PathLike[str] | Image.Image | Tensor
SCHEMA = Schema(
    header={"model": get_type_hints(ModelId), "meaningless": bool, "names": list, "scale": float, "origin": dict},
    tensors={"weights": "C D"},
)


@dataclass(frozen=True)
class Prediction:
    """The best classes of a picture, best first. `path` is None for a picture that came without one."""

    path: str | None
    names: tuple[str, ...]
    probabilities: tuple[float, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Classifier:
    """One vector a class: all that stage 3 needs, besides the model's image tower.

    names: [C]; weights: [C, D]; scale: 1 / τ of Eq. 1; model_id: whose features they are compared with.
    """

    names: tuple[str, ...]
    weights: Tensor
    scale: float
    model_id: ModelId
    origin: Mapping[str, Any] = field(default_factory=dict)
    model: Model | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", check_names(self.names))

    @classmethod
    def of(cls, model: Model, names: Sequence[str], weights: Tensor, **origin: Any) -> Classifier:
        """Of a model's own class vectors [C, D]; `origin` says how they came about."""
        told = {**origin, "selftpt": __version__}
        return cls(tuple(names), weights.cpu(), model.scale, model.id, told, model)

    def __repr__(self) -> str:
        return f"Classifier({len(self.names)} classes, {self.model_id})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the classifier to a file; the model itself is not in it."""
        header = {
            "model": dataclasses.asdict(self.model_id),
            "meaningless": self.model_id.meaningless,
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
        if model is not None:
            model_id.check(model, f"the classifier {path}")
            if weights.shape[1] != model.dimension:
                raise SelfTPTError(
                    f"{path} is not a valid classifier file: its class vectors have {weights.shape[1]} dimensions, and "
                    f"the features of {model_id} have {model.dimension}"
                )
        return cls(names, weights, scale, model_id, header["origin"], model)

    def probabilities(self, features: Tensor) -> Tensor:
        """Eq. 1: unit image features [..., D] to probabilities [..., C]."""
        return (self.scale * features @ self.weights.to(features).t()).softmax(-1)

    def __call__(self, features: Tensor) -> Tensor:
        """Unit features of the views of pictures [N, V, D] to probabilities [N, C], their mean over the views."""
        return self.probabilities(features).mean(-2)

    def predict(
        self,
        pictures: Picture | Iterable[Picture],
        top: int | None = None,
        config: PredictConfig | None = None,
        on_error: Callable[[ImageError], None] = warn_of,
    ) -> Iterator[Prediction]:
        """Classify pictures, one after the other, in the order they come.

        pictures: paths of files, folders or patterns, PIL images, uint8 tensors [3, H, W], or float tensors [3, S, S]
        that are preprocessed already.
        on_error: is told of every picture that cannot be used, which is then left out.
        """
        config = config or PredictConfig()
        if top is not None:
            config = dataclasses.replace(config, top=top)
        if self.model is None:
            object.__setattr__(self, "model", load_recorded_model(self.model_id, "the classifier"))
        assert self.model is not None
        model = self.model
        self.model_id.check(model, "the classifier")
        if not isinstance(pictures, Iterable) or isinstance(pictures, str | os.PathLike | Image.Image):
            pictures = [pictures]
        elif getattr(pictures, "ndim", 4) == 3:  # one tensor
            pictures = [pictures]  # type: ignore[list-item]

        def look(picture: Picture) -> tuple[str | None, Tensor | ImageError]:
            path = os.fspath(picture) if isinstance(picture, str | os.PathLike) else None
            try:
                return path, see(model, picture, config)
            except ImageError as error:
                return path, error

        waiting: list[tuple[str | None, Tensor]] = []
        per_batch = max(1, config.batch // config.views)
        for path, seen in in_threads(look, _spread(pictures, on_error), ahead=2 * per_batch):
            if isinstance(seen, ImageError):
                on_error(seen)
                continue
            waiting.append((path, seen))
            if len(waiting) == per_batch:
                yield from self._answer(model, waiting, config)
                waiting = []
        if waiting:
            yield from self._answer(model, waiting, config)

    def _answer(
        self, model: Model, seen: list[tuple[str | None, Tensor]], config: PredictConfig
    ) -> Iterator[Prediction]:
        shown = [views for _, views in seen]
        if any(views.is_floating_point() for views in shown):  # those are normalised: the others in their company too
            shown = [model.preprocess.normalize(views.to(model.device)) for views in shown]
        pixels = torch.cat(shown)
        features = torch.cat([model.encode_images(some) for some in pixels.split(config.batch)])
        views = self.probabilities(features).unflatten(0, (len(seen), -1))
        yield from best(merge_views(views, config.confident), self.names, [path for path, _ in seen], config.top)


def best(probabilities: Tensor, names: Sequence[str], paths: Sequence[str | None], top: int) -> Iterator[Prediction]:
    """The `top` best of probabilities [N, C] for pictures [N], as predictions."""
    found = probabilities.topk(min(top, len(names)))
    for values, labels, path in zip(found.values.tolist(), found.indices.tolist(), paths, strict=True):
        yield Prediction(path, tuple(names[i] for i in labels), tuple(values), tuple(labels))


def _spread(pictures: Iterable[Picture], on_error: Callable[[ImageError], None]) -> Iterator[Picture]:
    """Folders and patterns as the pictures in them, everything else as it is."""
    for picture in pictures:
        if not isinstance(picture, str | os.PathLike) or not is_place(picture):
            yield picture
            continue
        try:
            yield from find_images([picture])
        except SelfTPTError as error:
            on_error(ImageError(str(error)))


def see(model: Model, picture: Picture, config: PredictConfig) -> Tensor:
    """What the image tower is shown of a picture: itself, then `views - 1` random crops, [views, 3, S, S].

    The crops depend on the seed and the picture's size alone, so that a picture has one answer in any company.
    """
    if isinstance(picture, Tensor):
        if picture.is_floating_point():
            if tuple(picture.shape) != (3, *model.preprocess.size) or config.views > 1:
                raise ImageError(
                    f"a float tensor must be one preprocessed picture of shape {(3, *model.preprocess.size)} "
                    f"and has no further views; this one has shape {tuple(picture.shape)}"
                )
            return picture[None]
        if picture.dtype != torch.uint8 or picture.ndim != 3 or picture.shape[0] != 3:
            raise ImageError(f"a tensor must be uint8 [3, H, W] or float, not {picture.dtype} {tuple(picture.shape)}")
        picture = Image.fromarray(picture.permute(1, 2, 0).cpu().numpy())
    if not isinstance(picture, str | os.PathLike | Image.Image):
        raise ImageError(f"a picture is a path, a PIL image or a tensor, not a {type(picture).__name__}")
    whole = open_image(picture, config.max_megapixels)
    return model.preprocess.views(whole, config.views - 1, random.Random(config.seed))


def merge_views(probabilities: Tensor, confident: float) -> Tensor:
    """The mean over the most confident (least entropy) share of the views: [..., V, C] to [..., C]."""
    count = max(1, round(confident * probabilities.shape[-2]))
    if count == probabilities.shape[-2]:
        return probabilities.mean(-2)
    entropy = torch.special.entr(probabilities).sum(-1)
    chosen = entropy.topk(count, largest=False).indices
    return probabilities.gather(-2, chosen[..., None].expand(*chosen.shape, probabilities.shape[-1])).mean(-2)
