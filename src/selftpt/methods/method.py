"""The interface of methods: `Method`, `FitContext`, `FittedMethod` and `Predictor`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selftpt.classifier import (
    Classifier,
    OnError,
    Prediction,
    Stream,
    as_list,
    predict_all,
    predict_each,
    probability_matrix,
)
from selftpt.config import ContrastConfig, TrainConfig, change, restore, without_places
from selftpt.data.cache import NO_CACHE, Cache, LearnedFiles, code_digest, content_digest
from selftpt.data.decoding import ImageError, ImageInput, warn_of
from selftpt.data.features import Block, FeatureProvider
from selftpt.data.sources import Source
from selftpt.data.views import ViewSpec, fingerprint
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.files import Schema, digest, read_tensors, write_tensors
from selftpt.gradients import with_gradients
from selftpt.methods import METHODS, Inputs, Requirement
from selftpt.models import Model, ModelId, load_recorded_model
from selftpt.names import check_names
from selftpt.training import Crops, RunFiles, Training, source_crops, source_features
from selftpt.version import __version__

LEARNED = Schema(
    header={
        "model": get_type_hints(ModelId),
        "random_init": bool,
        "name": str,
        "config": dict,
        "classes": list,
        "images": int,
    },
    oldest=2,
)
FITTED = Schema(
    header={
        "model": get_type_hints(ModelId),
        "random_init": bool,
        "method": str,
        "config": dict,
        "data": dict,
        "selftpt": str,
    },
    oldest=2,
)

Probabilities = Callable[[Tensor], Tensor]  # views [N, V, D] or pixels [N, V, 3, S, S] to probabilities [N, C]
StreamProbabilities = Callable[[Iterable[Tensor]], Tensor]  # of a transductive method: blocks of views to [N, C]


TrainFunction = Callable[["FitContext", Any], Training]


@dataclass
class FitContext:
    """What a method is given to learn from.

    Attributes:
        model: The frozen model.
        train_set: Labelled images or features, for a method that needs labels.
        folder: Where learned parameters and checkpoints are kept and found again; None keeps them in the cache.
        cache: Where image features are cached; by default nowhere.
        initial: Initial values of parameters, by name.
        on_error: Called for every image that cannot be used.
        unreadable: After fitting, the number of training images that could not be used.
    """

    model: Model
    train_set: Source | None = None
    folder: Path | None = None
    cache: Cache = NO_CACHE
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    on_error: Callable[[ImageError], None] = warn_of
    unreadable: int = 0

    @property
    def source(self) -> Source:
        """The training images, which a method that needs labels is always given."""
        assert self.train_set is not None
        return self.train_set

    def features(self, config: TrainConfig) -> tuple[Tensor, Tensor]:
        """Features [N, crops, D] of random crops of the training images, and their labels [N]."""
        return source_features(self.model, self._few(config), config, self.cache, self.on_error)

    def crops(self, config: TrainConfig) -> tuple[Crops, Tensor]:
        """A maker of pixels of random crops of the training images, and their labels [N]."""
        return source_crops(self.model, self._few(config), config, self.on_error)

    def _few(self, config: TrainConfig) -> Source:
        return self.source.few(config.shots, config.seed)

    @property
    def files(self) -> LearnedFiles:
        """Where learned parameters are kept."""
        return LearnedFiles(self.folder, self.cache)

    def learned(
        self, train: TrainFunction, config: Any, dimensions: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """The learned parameters by name: read from an earlier run, or else learned now.

        Args:
            train: Makes the training run.
            config: All that determines the result besides the training images: a `TrainConfig`, or a configuration
                whose field `learn` is one.
            dimensions: The dimensions of the parameters, as in `files.Schema`.
        """
        learn: TrainConfig = config if isinstance(config, TrainConfig) else config.learn
        schema = Schema(LEARNED.header, dimensions, LEARNED.oldest)
        count = len(self._few(learn))

        def read(file: Path) -> dict[str, Tensor]:
            header, tensors = read_tensors(file, "learned", schema)
            self.unreadable = count - header["images"]
            if self.unreadable:
                text = f"{self.unreadable} images could not be read when {file} was learned"
                warnings.warn(text, SelfTPTWarning, stacklevel=7)
            return tensors

        def run(file: Path | None, optional: bool) -> dict[str, Tensor]:
            training = train(self, config)
            training.start_from(self.initial)
            self.unreadable = count - training.images
            model_id = self.model.id
            key = digest(file and file.stem, training.images)
            files = RunFiles(file, key, model_id.random_init, optional)
            tensors = training.run(files)
            header = {
                "model": dataclasses.asdict(model_id),
                "random_init": model_id.random_init,
                "name": train.__module__,
                "config": dataclasses.asdict(config),
                "classes": list(self.source.names),
                "images": training.images,
            }
            files.finish(lambda path: write_tensors(path, "learned", tensors, header, schema))
            return tensors

        return self.files.read_or_learn(self.learned_name(train, config), read, run)

    def learned_name(self, train: TrainFunction, config: Any) -> str:
        """The file name of the parameters that `learned` keeps: a digest of all that determines them."""
        source = self.source
        images = [fingerprint(i) if isinstance(i, str | os.PathLike) else content_digest(i) for i in source.images]
        features = None if source.features is None else content_digest(source.features)
        model = self.model.id.digest, self.model.precision, self.model.device.type
        initial = [(name, content_digest(value)) for name, value in self.initial.items()]
        data = source.names, images, features, source.labels
        own = train.__module__, train.__qualname__, type(config).__name__, dataclasses.asdict(config)
        code = code_digest()
        if not train.__module__.startswith("selftpt."):
            with contextlib.suppress(OSError):  # no source: it was typed in
                code += inspect.getsource(train)
        name = train.__module__.rpartition(".")[2].replace("_", "-")
        return f"{name}-{digest(code, own, model, data, initial)}.safetensors"


def own_config(_context: FitContext, config: Any) -> Any:
    """For a method whose whole configuration determines what is learned."""
    return config


def no_data(_config: Any) -> dict[str, Any]:
    """For a method that has no data of its own."""
    return {}


def image_alone(_config: Any) -> list[ViewSpec]:
    """For a method that uses one view: the image itself."""
    return [ViewSpec()]


def nothing_more(_config: Any) -> str:
    """For a method whose only cost per image is encoding the views."""
    return ""


def never(_config: Any) -> bool:
    return False


def always(_config: Any) -> bool:
    return True


@dataclass(frozen=True)
class Method:
    """A method. What it is called and who published it is in its row of the table, `METHODS.info`.

    Every function is a module-level function, so that a method can be pickled.

    Attributes:
        name: As on the command line.
        config: Its frozen configuration, with the defaults of its authors. A method that needs labels has a
            `TrainConfig` there, called `learn`.
        predictor: The fitted method, class names [C] and the dataset's template to a `Classifier`, or to a function
            from views to probabilities.
        train: For a method that needs labels: the context and `train_config` to its training run.
        train_config: The part of the configuration that determines what is learned.
        data: JSON values that the predictions depend on, such as descriptions read from files; it refuses a
            configuration that lacks something, before anything is learned.
        views: Which views of an image it uses.
        inputs: What it gets for an image: features of the image, features of several views, or pixels.
        choose_inputs: For a method whose inputs depend on its configuration and the model.
        tensors: The dimensions of its learned tensors, as in `files.Schema`; `M` is the length of a context, `d` the
            width of the text tower, `D` the dimension of the features.
        transductive: Whether it adapts to all test images at once.
        requires: The kind of image tower it needs.
        uses_seed: Whether its predictions depend on the field `seed` of its configuration.
        uses_protocol_epochs: Whether it is trained for as many epochs as Self-TPT in the paper's protocols.
        more_cost: What it computes for each image besides encoding the views, in words.
    """

    name: str
    config: Any
    predictor: Callable[[FittedMethod, Sequence[str], str], Classifier | Probabilities | StreamProbabilities]
    train: TrainFunction | None = None
    train_config: Callable[[FitContext, Any], Any] = own_config
    data: Callable[[Any], Mapping[str, Any]] = no_data
    views: Callable[[Any], Sequence[ViewSpec]] = image_alone
    inputs: Inputs = "features"
    choose_inputs: Callable[[Any, Model], Inputs] | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    transductive: bool = False
    requires: Requirement = "any"
    uses_seed: bool = False
    uses_protocol_epochs: Callable[[Any], bool] = never
    more_cost: Callable[[Any], str] = nothing_more

    @property
    def needs_labels(self) -> bool:
        """Whether it learns from labelled images."""
        return self.train is not None

    @property
    def stochastic(self) -> bool:
        """Whether its result depends on a seed."""
        return self.needs_labels or self.uses_seed

    def cost(self, config: Any) -> str:
        """The computation for each image, in words."""
        views = sum(spec.views for spec in self.views(config))
        return ", ".join(filter(None, (f"{views} view{'s' if views > 1 else ''}", self.more_cost(config))))

    def seeded(self, seed: int | None, **learn: Any) -> Any:
        """Its configuration with a seed, and with other values of `learn`."""
        if self.needs_labels:
            changed = dataclasses.replace(self.config.learn, seed=seed, **learn)
            return dataclasses.replace(self.config, learn=changed)
        return dataclasses.replace(self.config, seed=seed) if self.uses_seed else self.config

    @with_gradients
    def training(self, context: FitContext, config: Any = None) -> Training:
        """The training run of a method that needs labels, not yet started: for single steps from outside."""
        if self.train is None:
            raise SelfTPTError(f"{self.name} learns from no images: it has no training run")
        run = self.train(context, self.train_config(context, self.config if config is None else config))
        run.start_from(context.initial)
        return run

    @with_gradients
    def fit(self, context: FitContext, config: Any = None) -> FittedMethod:
        """Fit the method to labelled images, or prepare it if it needs none.

        Raises:
            SelfTPTError: The context lacks what the method needs.
        """
        config = self.config if config is None else config
        if self.needs_labels and context.train_set is None:
            raise SelfTPTError(f"{self.name} learns from labelled images: give it a source")
        if self.requires == "transformer image tower" and not context.model.image.runs_blocks:
            raise SelfTPTError(
                f"{self.name} needs a model whose image tower is a ViT of open_clip, not {context.model.id}"
            )
        data, tensors = dict(self.data(config)), dict[str, Tensor]()
        if self.train is not None:
            tensors = context.learned(self.train, self.train_config(context, config), self.tensors or None)
            data["classes"] = list(context.source.names)
        fitted = FittedMethod(self, config, context.model.id, tensors, data, context.files)
        return fitted.with_model(context.model)


@dataclass(frozen=True, eq=False, repr=False)
class FittedMethod:
    """A fitted method, which saves, loads and pickles without the model.

    Attributes:
        method: The method.
        config: Its configuration.
        model_id: The model it was fitted with.
        tensors: Learned parameters by name, on the CPU.
        data: JSON values.
        files: Where parameters that are learned for a class list are kept.
    """

    method: Method
    config: Any
    model_id: ModelId
    tensors: Mapping[str, Tensor]
    data: Mapping[str, Any]
    files: LearnedFiles = field(default_factory=LearnedFiles)
    _model: Model | None = None

    def __repr__(self) -> str:
        return f"FittedMethod({self.method.name}, {self.model_id})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "files": LearnedFiles(), "_model": None}

    @property
    def model(self) -> Model:
        """The model; loaded when it is first needed."""
        if self._model is None:
            model = load_recorded_model(self.model_id, f"the fitted method {self.method.name}")
            object.__setattr__(self, "_model", self.with_model(model)._model)
        assert self._model is not None
        return self._model

    @property
    def inputs(self) -> Inputs:
        """The kind of input that it gets for an image."""
        choose = self.method.choose_inputs
        return self.method.inputs if choose is None else choose(self.config, self.model)

    def with_model(self, model: Model) -> FittedMethod:
        """The fitted method with its model, for one that was unpickled or loaded elsewhere."""
        self.model_id.check(model, f"the fitted method {self.method.name}")
        sizes = {"d": model.text.width, "D": model.dimension}
        if self.method.needs_labels:
            sizes["M"] = self.config.learn.length
        for name, dimensions in self.method.tensors.items():
            if name == "*":
                continue
            shape = self.tensors[name].shape
            for letter, size in zip(dimensions.removeprefix("I64 ").split(), shape, strict=True):
                if sizes.get(letter, size) != size:
                    raise SelfTPTError(
                        f"the fitted {self.method.name} does not fit {model.id}: {name} has shape {list(shape)}, "
                        f"where {letter} must be {sizes[letter]}"
                    )
        return dataclasses.replace(self, _model=model)

    @with_gradients
    def for_classes(self, names: Sequence[str], template: str = ContrastConfig.template) -> Predictor:
        """Make a predictor for a list of class names.

        Args:
            names: Class names, [C].
            template: The template of the dataset, with {} for the class name.
        """
        names = check_names(names)
        return Predictor(self, names, self.method.predictor(self, names, template))

    def on_device(self) -> dict[str, Tensor]:
        """The learned parameters on the model's device."""
        return {name: tensor.to(self.model.device) for name, tensor in self.tensors.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted method to a file; the model itself is not in it."""
        header = {
            "model": dataclasses.asdict(self.model_id),
            "random_init": self.model_id.random_init,
            "method": self.method.name,
            "config": dataclasses.asdict(self.config),
            "data": dict(self.data),
            "selftpt": __version__,
        }
        write_tensors(Path(path), "fitted-method", self.tensors, header, FITTED)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: Model | None = None, changes: Mapping[str, Any] | None = None
    ) -> FittedMethod:
        """Read a fitted method from a file.

        Args:
            path: The file.
            model: Its model; by default the one that the file names is loaded when it is first needed.
            changes: Settings to change, such as "generated": "folder". Settings that name files, folders or
                repositories are not taken from the file.
        """
        header, tensors = read_tensors(Path(path), "fitted-method", FITTED)
        if header["method"] not in METHODS:
            raise SelfTPTError(f"{path} holds a method that this selftpt does not have: {header['method'][:60]!r}")
        method = METHODS[header["method"]]
        try:
            Schema(FITTED.header, method.tensors).check(header)
            config = change(
                restore(method.config, header["config"]), without_places(method.config) | dict(changes or {})
            )
            if method.needs_labels:
                check_names(header["data"].get("classes"))
        except (SelfTPTError, ValueError) as error:
            raise SelfTPTError(f"{path} is not a valid fitted method: {error}") from error
        fitted = cls(method, config, ModelId(**header["model"]), tensors, header["data"])
        return fitted if model is None else fitted.with_model(model)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A fitted method for a list of class names; `FittedMethod.for_classes` makes one.

    Attributes:
        fitted: The fitted method.
        names: Class names, [C].
        function: A `Classifier`, or the method's own function from views to probabilities.
    """

    fitted: FittedMethod
    names: tuple[str, ...]
    function: Any

    def __repr__(self) -> str:
        return f"Predictor({self.fitted.method.name}, {len(self.names)} classes, {self.fitted.model_id})"

    @property
    def classifier(self) -> Classifier | None:
        """The classifier, if the method consists of one."""
        return self.function if isinstance(self.function, Classifier) else None

    @with_gradients
    def __call__(self, views: Tensor) -> Tensor:
        """Probabilities [N, C] for features of views [N, V, D] or pixels [N, V, 3, S, S].

        A transductive method must be given all test images at once.
        """
        return self.function([views] if self.fitted.method.transductive else views)  # type: ignore[no-any-return]

    def stream(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, Tensor]]:
        """Blocks of images with their probabilities [n, C].

        A transductive method reads all blocks before it yields the first; it does not keep their views.
        """
        if not self.fitted.method.transductive:
            for block in blocks:
                yield block, self(block.views)
            return
        seen: list[Block] = []

        def views() -> Iterator[Tensor]:
            for block in blocks:
                seen.append(dataclasses.replace(block, views=block.views.new_empty(0)))  # a slice would keep them
                yield block.views

        probabilities = self._of_stream(views())
        yield from zip(seen, probabilities.split([len(block.indices) for block in seen]), strict=True)

    @with_gradients
    def _of_stream(self, views: Iterator[Tensor]) -> Tensor:
        first = next(views, None)
        if first is None:
            return torch.empty(0, len(self.names))

        def all_views() -> Iterator[Tensor]:
            yield first
            yield from views

        return self.function(all_views())  # type: ignore[no-any-return]

    @overload
    def predict(
        self, images: ImageInput, top: int = 5, *, cache: Cache = NO_CACHE, on_error: OnError = warn_of
    ) -> Any: ...

    @overload
    def predict(
        self, images: Iterable[ImageInput], top: int = 5, *, cache: Cache = NO_CACHE, on_error: OnError = warn_of
    ) -> list[Prediction]: ...

    def predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        top: int = 5,
        *,
        cache: Cache = NO_CACHE,
        on_error: OnError = warn_of,
    ) -> Any:
        """Classify images.

        Args:
            images: One image, or several images, folders or patterns, as in `Classifier.predict`.
            top: Number of classes in each prediction.
            cache: Where image features are cached; by default nowhere.
            on_error: Called for every image of a list that cannot be used; the image is then left out.

        Returns:
            A `Prediction` for one image; a list of them, in the order of the input, for several.

        Raises:
            SelfTPTError: An argument is invalid, or the one image cannot be used.
        """
        return predict_all(self._stream(cache), images, self.names, _above_zero(top), on_error)

    def iter_predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        top: int = 5,
        *,
        cache: Cache = NO_CACHE,
        on_error: OnError = warn_of,
    ) -> Iterator[Prediction]:
        """Classify images one after the other; the arguments are those of `predict`, checked at the call.

        A transductive method yields its first prediction after it has seen all images.
        """
        return predict_each(self._stream(cache), as_list(images), self.names, _above_zero(top), on_error)

    def predict_proba(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        cache: Cache = NO_CACHE,
        on_error: OnError = warn_of,
    ) -> NDArray[np.float32]:
        """Probabilities [N, C] of all classes, in the order of the input; NaN for an image that cannot be used."""
        return probability_matrix(self._stream(cache), images, len(self.names), on_error)

    def _stream(self, cache: Cache) -> Stream:
        fitted = self.fitted

        def stream(images: Iterable[ImageInput], on_error: OnError) -> Iterator[tuple[Block, Tensor]]:
            provider = FeatureProvider(fitted.model, fitted.method.views(fitted.config), cache, on_error=on_error)
            return self.stream(provider.blocks(images, pixels=fitted.inputs == "pixels"))

        return stream


def _above_zero(top: int) -> int:
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise SelfTPTError(f"top must be an integer above 0, not {top}")
    return top
