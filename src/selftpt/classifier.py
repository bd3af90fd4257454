"""Stage 3: classify images with fixed class vectors, as fast as zero-shot; Self-TPT-v adds 63 augmented views."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from selftpt import hub
from selftpt.config import PredictConfig
from selftpt.data.decoding import ImageError, ImageInput, warn_of
from selftpt.data.features import Block, FeatureProvider
from selftpt.data.sources import find_images, is_place
from selftpt.data.views import image_and_crops
from selftpt.errors import SelfTPTError, check_type
from selftpt.files import Schema, read_tensors, write_tensors
from selftpt.models import Model, ModelId, load_recorded_model
from selftpt.names import check_names
from selftpt.version import __version__

OnError: TypeAlias = Callable[[ImageError], None]
# Maps images to blocks of n images with their probabilities [n, C].
Stream: TypeAlias = Callable[[Iterable[ImageInput], OnError], Iterator[tuple[Block, Tensor]]]

SCHEMA = Schema(
    header={"model": get_type_hints(ModelId), "random_init": bool, "names": list, "scale": float, "origin": dict},
    tensors={"weights": "C D"},
)


@dataclass(frozen=True, repr=False)
class Prediction:
    """The most probable classes of an image, best first.

    Attributes:
        path: The path of the image; None for an image in memory.
        names: Class names, [top].
        probabilities: Their probabilities, [top].
        labels: Their indices in the class list, [top].
        index: The position of the image in the input, after folders and patterns were expanded.
    """

    path: str | None
    names: tuple[str, ...]
    probabilities: tuple[float, ...]
    labels: tuple[int, ...]
    index: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """The most probable class."""
        return self.names[0]

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return self.probabilities[0]

    def __repr__(self) -> str:
        path = "" if self.path is None else f", path={self.path!r}"
        return f"Prediction({self.name!r}, {self.probability:.1%}{path})"


@dataclass(frozen=True, eq=False, repr=False)
class Classifier:
    """An image classifier: one vector per class, which is compared with the image features of a model.

    Attributes:
        names: Class names, [C].
        weights: Class vectors [C, D], on the CPU.
        scale: Logit scale, 1 / τ of Eq. 1.
        model_id: Identifies the model.
        origin: How the class vectors were made.
        model: The model; None until it is loaded.
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
        """Make a classifier from the class vectors of a model.

        Args:
            model: The model.
            names: Class names, [C].
            weights: Class vectors, [C, D].
            **origin: How the class vectors were made, as JSON values.

        Returns:
            The classifier.

        Raises:
            SelfTPTError: The names are not a sequence of strings.
        """
        return cls(tuple(names), weights.cpu(), model.scale, model.id, {**origin, "selftpt": __version__}, model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the model, which is loaded again when it is needed."""
        return {**self.__dict__, "model": None, "_on_device": {}}

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.names[:3])) + (", ..." if len(self.names) > 3 else "")
        return f"Classifier({len(self.names)} classes: {shown}; model {self.model_id})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the classifier to a safetensors file, without the model.

        Args:
            path: The file. It takes a few kB per class.

        Raises:
            SelfTPTError: The file cannot be written.
        """
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
        """Read a classifier from a file.

        Args:
            path: The file that `save` wrote.
            model: Its model. By default the model that the file names is loaded when it is first needed, if it is the
                embedded one or one that open_clip publishes.

        Returns:
            The classifier.

        Raises:
            SelfTPTError: The file cannot be read, is not a valid classifier, or was made with another model.
        """
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
        classifier = cls(names, weights, scale, model_id, header["origin"])
        return classifier if model is None else classifier.with_model(model, f"the classifier {path}")

    @classmethod
    def from_hub(
        cls, repo: str, *, model: Model | None = None, revision: str | None = None, token: hub.Token = None
    ) -> Classifier:
        """Download a classifier from the Hugging Face hub; it is verified like a local file.

        Args:
            repo: The repository, `"user/name"`.
            model: Its model. By default the model that the file names is loaded when it is first needed, if it is the
                embedded one or one that open_clip publishes.
            revision: A branch, tag or commit; by default the main branch.
            token: An access token of the hub; by default HF_TOKEN or the token of `hf auth login`.

        Returns:
            The classifier.

        Raises:
            SelfTPTError: The file cannot be downloaded, is not a valid classifier, or was made with another model.
        """
        return cls.load(hub.download(repo, "classifier", revision=revision, token=token), model)

    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool | None = None,
        token: hub.Token = None,
        revision: str | None = None,
        commit_message: str | None = None,
        accuracy: Mapping[str, float] | None = None,
        license: str | None = None,
    ) -> str:
        """Upload the classifier to the Hugging Face hub, with a model card.

        Args:
            repo: The repository, `"user/name"`. It is created if it does not exist.
            private: Whether a new repository is private; by default the hub decides.
            token: An access token with write permission; by default HF_TOKEN or the token of `hf auth login`.
            revision: The branch, which is created if it does not exist; by default the main branch.
            commit_message: The commit message.
            accuracy: Top-1 accuracy in percent for each test set, for the model card: `{"my test set": 81.2}`.
            license: The identifier of a license on the hub for the model card, such as `"apache-2.0"`.

        Returns:
            The URL of the commit.

        Raises:
            SelfTPTError: The upload failed; the message says why and what to do.
        """
        shared = dataclasses.replace(self, model_id=hub.shareable(self.model_id), model=None)
        card = hub.model_card(
            repo,
            "classifier",
            shared.model_id,
            self.origin,
            names=self.names,
            accuracy=accuracy,
            license=license,
        )
        return hub.push(
            repo,
            "classifier",
            shared.save,
            card,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
        )

    def with_model(self, model: Model, what: str = "the classifier") -> Classifier:
        """Return a copy of the classifier that uses a loaded model.

        Args:
            model: The model that the classifier was made with.
            what: What to call the classifier in error messages.

        Returns:
            The copy. The class vectors are shared.

        Raises:
            SelfTPTError: The classifier was made with another model.
        """
        self.model_id.check(model, what)
        if self.weights.shape[1] != model.dimension:
            raise SelfTPTError(
                f"{what} does not fit its model: its class vectors have {self.weights.shape[1]} dimensions, and the "
                f"features of {model.id} have {model.dimension}"
            )
        return dataclasses.replace(self, model=model)

    def probabilities(self, features: Tensor) -> Tensor:
        """Compute the class probabilities of Eq. 1.

        Args:
            features: L2-normalised image features, [..., D].

        Returns:
            Probabilities [..., C], on the device of the features.
        """
        key = features.device, features.dtype
        if key not in self._on_device:
            self._on_device[key] = self.weights.to(features)
        return (self.scale * features @ self._on_device[key].t()).softmax(-1)

    def __call__(self, features: Tensor) -> Tensor:
        """Compute the class probabilities of images, averaged over their views.

        Args:
            features: L2-normalised features of V views of N images, [N, V, D].

        Returns:
            Probabilities, [N, C].
        """
        return self.probabilities(features).mean(-2)

    @overload
    def predict(
        self,
        images: ImageInput,
        top: int | None = None,
        config: PredictConfig | None = None,
        on_error: OnError = warn_of,
    ) -> Any: ...

    @overload
    def predict(
        self,
        images: Iterable[ImageInput],
        top: int | None = None,
        config: PredictConfig | None = None,
        on_error: OnError = warn_of,
    ) -> list[Prediction]: ...

    def predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        top: int | None = None,
        config: PredictConfig | None = None,
        on_error: OnError = warn_of,
    ) -> Any:
        """Classify images.

        Args:
            images: One image or a list of images: paths, PIL images, uint8 arrays [H, W, 3], uint8 tensors [3, H, W],
                or preprocessed float tensors [3, S, S]. A folder or a pattern such as `"photos/*.jpg"` stands for the
                list of its images.
            top: Maximum number of classes in each prediction; by default `config.top`.
            config: The configuration of stage 3; `PredictConfig(views=64)` is Self-TPT-v.
            on_error: Called for every image of a list that cannot be used; the image is then left out. By default a
                warning is issued.

        Returns:
            A `Prediction` for one image; a list of them, in the order of the input, for a list, folder or pattern.

        Raises:
            SelfTPTError: An argument is invalid, the model cannot be loaded, or a single image cannot be used.

        Example:
            >>> import numpy as np, selftpt
            >>> classifier = selftpt.zero_shot(selftpt.load_model(device="cpu"), ["night sky", "snow"])
            >>> classifier.predict(np.zeros((32, 32, 3), np.uint8)).name
            'night sky'
        """
        stream, top = self._stream(config, top)
        return predict_all(stream, images, self.names, top, on_error)

    def iter_predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        top: int | None = None,
        config: PredictConfig | None = None,
        on_error: OnError = warn_of,
    ) -> Iterator[Prediction]:
        """Classify images one after the other.

        Args:
            images: As in `predict`. An iterable is consumed lazily, so its images need not fit into memory.
            top: As in `predict`.
            config: As in `predict`.
            on_error: Called for every image that cannot be used; the image is then left out. By default a warning is
                issued.

        Returns:
            An iterator over one `Prediction` per image, in the order of the input.

        Raises:
            SelfTPTError: An argument is invalid, or the model cannot be loaded. This is checked at the call.
        """
        stream, top = self._stream(config, top)
        return predict_each(stream, as_list(images), self.names, top, on_error)

    def predict_proba(
        self,
        images: ImageInput | Iterable[ImageInput],
        config: PredictConfig | None = None,
        on_error: OnError = warn_of,
    ) -> NDArray[np.float32]:
        """Compute the probabilities of all classes, in the order of the input.

        Args:
            images: As in `predict`.
            config: The configuration of stage 3; its `top` is not used.
            on_error: Called for every image of a list that cannot be used. By default a warning is issued.

        Returns:
            Probabilities, [N, C]. The row of an image that cannot be used is NaN.

        Raises:
            SelfTPTError: An argument is invalid, the model cannot be loaded, or a single image cannot be used.
        """
        return probability_matrix(self._stream(config, None)[0], images, len(self.names), on_error)

    def _stream(self, config: PredictConfig | None, top: int | None) -> tuple[Stream, int]:
        """Return the function that maps images to probabilities, and the number of classes in a prediction."""
        config = config or PredictConfig()
        check_type(config, PredictConfig, "config")
        if top is not None:
            config = dataclasses.replace(config, top=top)
        model = self.model or load_recorded_model(self.model_id, "the classifier")
        object.__setattr__(self, "model", self.with_model(model).model)

        def stream(images: Iterable[ImageInput], on_error: OnError) -> Iterator[tuple[Block, Tensor]]:
            specs = image_and_crops(config.views, seed=config.seed, max_megapixels=config.max_megapixels)
            provider = FeatureProvider(model, specs, batch=config.batch, on_error=on_error)
            for block in provider.blocks(images):
                yield block, merge_views(self.probabilities(block.views), config.confidence_ratio)

        return stream, config.top


def predict_each(
    stream: Stream, images: Iterable[ImageInput], names: Sequence[str], top: int, on_error: OnError
) -> Iterator[Prediction]:
    """Yield predictions for an iterable of images, folders and patterns."""
    for block, probabilities in stream(expand(images, on_error), on_error):
        yield from top_classes(probabilities, names, block, top)


def predict_all(
    stream: Stream,
    images: ImageInput | Iterable[ImageInput],
    names: Sequence[str],
    top: int,
    on_error: OnError,
) -> Prediction | list[Prediction]:
    """Return one prediction for one image, and a list of predictions for several."""
    if not is_one_image(images):
        return list(predict_each(stream, as_list(images), names, top, on_error))
    (prediction,) = predict_each(stream, as_list(images), names, top, raise_error)
    return prediction


def probability_matrix(
    stream: Stream, images: ImageInput | Iterable[ImageInput], classes: int, on_error: OnError
) -> NDArray[np.float32]:
    """Return the probabilities [N, C] of images; the rows of images that cannot be used are NaN."""
    report = raise_error if is_one_image(images) else on_error
    expanded = list(expand(as_list(images), report))
    matrix = np.full((len(expanded), classes), np.nan, dtype=np.float32)
    for block, probabilities in stream(expanded, report):
        matrix[block.indices.numpy()] = probabilities.float().cpu().numpy()
    return matrix


def top_classes(probabilities: Tensor, names: Sequence[str], block: Block, top: int) -> Iterator[Prediction]:
    """Yield the `top` most probable classes of each image of a block, given its probabilities [N, C]."""
    best = probabilities.topk(min(top, len(names)))
    rows = zip(block.sources, block.indices.tolist(), best.values.tolist(), best.indices.tolist(), strict=True)
    for source, index, values, labels in rows:
        path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
        yield Prediction(path, tuple(names[i] for i in labels), tuple(values), tuple(labels), index)


def is_one_image(images: object) -> bool:
    """Return whether `images` is a single image, and not a folder, a pattern or several images."""
    if isinstance(images, str | os.PathLike):
        return not is_place(images)
    if isinstance(images, np.ndarray) and images.dtype.kind in "OU":  # an array of paths or images
        return False
    return isinstance(images, Image.Image) or getattr(images, "ndim", 4) <= 3


def as_list(images: ImageInput | Iterable[ImageInput]) -> Iterable[ImageInput]:
    """Return `images` as an iterable of images, folders and patterns.

    Raises:
        SelfTPTError: `images` is neither an image nor an iterable.
    """
    if isinstance(images, str | os.PathLike) or is_one_image(images):
        return [images]  # type: ignore[list-item]
    if isinstance(images, bytes | bytearray | io.IOBase) or not isinstance(images, Iterable):
        raise SelfTPTError(
            f"images must be a path, a PIL image, an array, a tensor or a list of these, not {type(images).__name__}"
        )
    return images


def expand(images: Iterable[ImageInput], on_error: OnError) -> Iterator[ImageInput]:
    """Yield single images; folders and patterns are replaced by their images."""
    for image in images:
        if not isinstance(image, str | os.PathLike) or not is_place(image):
            yield image
            continue
        try:
            yield from find_images([image])
        except SelfTPTError as error:
            on_error(ImageError(str(error)))


def raise_error(error: ImageError) -> None:
    """Raise the error; used as `on_error` where an image must not be left out."""
    raise error


def entropy(probabilities: Tensor) -> Tensor:
    """Compute the entropy [...] in nats of probabilities [..., C]."""
    terms: Tensor = torch.special.entr(probabilities)
    return terms.sum(-1)


def confident_views(probabilities: Tensor, confidence_ratio: float) -> Tensor:
    """Return the indices of the views with the lowest entropy, in ascending order of entropy.

    Args:
        probabilities: Probabilities of V views, [..., V, C].
        confidence_ratio: Share of the views to keep.

    Returns:
        [..., K], K = int(confidence_ratio * V) as in TPT's code, at least 1.
    """
    count = max(1, int(confidence_ratio * probabilities.shape[-2]))
    return entropy(probabilities).argsort(dim=-1, stable=True)[..., :count]


def select_views(values: Tensor, chosen: Tensor) -> Tensor:
    """Select from the values [..., V, X] of V views those of the views with indices `chosen` [..., K]: [..., K, X]."""
    return values.gather(-2, chosen[..., None].expand(*chosen.shape, values.shape[-1]))


def merge_views(probabilities: Tensor, confidence_ratio: float) -> Tensor:
    """Average the probabilities [..., V, C] over the most confident views; returns [..., C]."""
    if confidence_ratio == 1:
        return probabilities.mean(-2)
    return select_views(probabilities, confident_views(probabilities, confidence_ratio)).mean(-2)
