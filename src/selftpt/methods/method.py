"""The interface of methods: `Method`, `FitContext`, `FittedMethod` and `Predictor`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import operator
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
from selftpt.config import ContrastConfig, TrainConfig, change, kind_of, restore, without_places
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

PredictFunction = Callable[[Tensor], Tensor]  # views [N, V, D] or pixels [N, V, 3, S, S] -> probabilities [N, C]
StreamPredictFunction = Callable[[Iterable[Tensor]], Tensor]  # for a transductive method: blocks of views -> [N, C]
TrainFunction = Callable[["FitContext", Any], Training]


@dataclass
class FitContext:
    """The model, the training images and the storage that a method is fitted with.

    Attributes:
        model: The frozen model.
        train_set: Labelled images or features, for a method that needs labels.
        folder: The folder of learned parameters and checkpoints; None means the cache.
        cache: The cache of image features; by default nothing is cached.
        initial: Initial values of learned parameters, by name.
        on_error: Called for every image that cannot be used.
        template: The template of the dataset, with {} for the class name. Most methods ignore it.
        unreadable: The number of training images that could not be used; set by `learned`.
    """

    model: Model
    train_set: Source | None = None
    folder: Path | None = None
    cache: Cache = NO_CACHE
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    on_error: Callable[[ImageError], None] = warn_of
    template: str = ContrastConfig.template
    unreadable: int = 0

    @property
    def source(self) -> Source:
        """The training images.

        Raises:
            SelfTPTError: There are none.
        """
        if self.train_set is None:
            raise SelfTPTError("the method learns from labelled images: pass a source")
        return self.train_set

    def features(self, config: TrainConfig) -> tuple[Tensor, Tensor]:
        """Compute the features of random crops of the training images.

        Args:
            config: The number of shots and crops, and the seed.

        Returns:
            L2-normalised features [N, crops, D] and labels [N] of the images that can be used.
        """
        return source_features(self.model, self._few(config), config, self.cache, self.on_error)

    def crops(self, config: TrainConfig) -> tuple[Crops, Tensor]:
        """Return the random crops of the training images, whose pixels are computed on demand, and the labels [N]."""
        return source_crops(self.model, self._few(config), config, self.on_error)

    def _few(self, config: TrainConfig) -> Source:
        return self.source.few(config.shots, config.seed)

    @property
    def files(self) -> LearnedFiles:
        """The storage of learned parameters."""
        return LearnedFiles(self.folder, self.cache)

    def learned(
        self, train: TrainFunction, config: Any, dimensions: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """Read the learned parameters of an earlier run, or learn them now.

        Args:
            train: Function that prepares the training run.
            config: All settings that the result depends on: a `TrainConfig`, or a configuration whose field `learn` is
                one.
            dimensions: The dimensions of the parameters, as in `files.Schema`.

        Returns:
            The learned parameters, by name.
        """
        learn: TrainConfig = config if isinstance(config, TrainConfig) else config.learn
        schema = Schema(LEARNED.header, dimensions, LEARNED.oldest)
        count = len(self._few(learn))

        def read(file: Path) -> dict[str, Tensor]:
            header, tensors = read_tensors(file, "learned", schema)
            self.unreadable = count - header["images"]
            if self.unreadable:
                message = f"{self.unreadable} of {count} training images could not be used when {file} was learned"
                warnings.warn(message, SelfTPTWarning, stacklevel=7)
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
        """Return the file name of the parameters that `learned` stores.

        It contains a digest of everything that determines them.
        """
        source = self._few(config if isinstance(config, TrainConfig) else config.learn)
        images = [_image_key(image) for image in source.images]
        features = None if source.features is None else content_digest(source.features)
        model = self.model.id.digest, self.model.precision, self.model.device.type
        initial = [(name, content_digest(value)) for name, value in self.initial.items()]
        data = source.names, images, features, source.labels
        own = train.__module__, train.__qualname__, type(config).__name__, dataclasses.asdict(config)
        code = code_digest()
        if not train.__module__.startswith("selftpt."):
            with contextlib.suppress(OSError):  # a function that was defined interactively has no source code
                code += inspect.getsource(train)
        name = train.__module__.rpartition(".")[2].replace("_", "-")
        return f"{name}-{digest(code, own, model, data, initial)}.safetensors"


def _image_key(image: ImageInput) -> object:
    if isinstance(image, str | os.PathLike):
        return fingerprint(image)
    try:
        return content_digest(image)
    except Exception:  # a decoder or a dataset may raise anything; `on_error` gets the error when the image is used
        return "unusable"


def own_config(_context: FitContext, config: Any) -> Any:
    """Return the whole configuration: the default of `Method.train_config`."""
    return config


def no_data(_config: Any) -> dict[str, Any]:
    """Return no data: the default of `Method.data`."""
    return {}


def image_alone(_config: Any) -> list[ViewSpec]:
    """Return one view, the image itself: the default of `Method.views`."""
    return [ViewSpec()]


def no_extra_cost(_config: Any) -> str:
    """Return no further cost: the default of `Method.extra_cost`."""
    return ""


def never(_config: Any) -> bool:
    """Return False: the default of `Method.uses_protocol_epochs`."""
    return False


def always(_config: Any) -> bool:
    """Return True, for `Method.uses_protocol_epochs`."""
    return True


@dataclass(frozen=True, repr=False)
class Method:
    """A method: its configuration and its functions. Its summary and reference are in `METHODS.info[name]`.

    All functions must be module-level functions, so that a method can be pickled.

    Attributes:
        name: The name on the command line.
        config: The frozen configuration, with the authors' defaults. A method that needs labels has a field `learn`,
            which is a `TrainConfig`.
        predictor: Takes the fitted method, the class names [C] and the dataset's template. Returns a `Classifier`, or a
            function from views to probabilities.
        train: Takes the context and the result of `train_config`, and returns a training run. None for a method that
            needs no labels.
        train_config: Takes the context and the configuration, and returns the part of the configuration that the
            learned parameters depend on.
        data: Returns JSON values that the predictions depend on, such as descriptors read from files. It is called
            before training, and raises a `SelfTPTError` if a required setting is missing.
        views: Returns the views of an image that the method uses.
        inputs: The input for each image: `"features"` of one view, features of several `"views"`, or `"pixels"`.
        choose_inputs: Replaces `inputs` for a method whose inputs depend on its configuration and the model.
        tensors: The dimensions of the learned tensors, as in `files.Schema`. `M` is the length of a context, `d` the
            width of the text tower, `D` the dimension of the features.
        transductive: Whether the method adapts to all test images at once.
        requires: The kind of image tower that the method needs.
        uses_seed: Whether the predictions depend on the field `seed` of the configuration.
        uses_protocol_epochs: Whether the method is trained for as many epochs as Self-TPT in the paper's protocols.
        extra_cost: Returns the computation for each image besides encoding the views, in words.
    """

    name: str
    config: Any
    predictor: Callable[[FittedMethod, Sequence[str], str], Classifier | PredictFunction | StreamPredictFunction]
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
    extra_cost: Callable[[Any], str] = no_extra_cost

    def __repr__(self) -> str:
        return f"Method({self.name})"

    @property
    def needs_labels(self) -> bool:
        """Whether the method learns from labelled images."""
        return self.train is not None

    @property
    def stochastic(self) -> bool:
        """Whether the result depends on a seed."""
        return self.needs_labels or self.uses_seed

    def cost(self, config: Any) -> str:
        """Describe the computation for each image, in words."""
        views = sum(spec.views for spec in self.views(config))
        return ", ".join(filter(None, (f"{views} view{'s' if views > 1 else ''}", self.extra_cost(config))))

    def seeded(self, seed: int | None, **learn: Any) -> Any:
        """Return the default configuration with another seed.

        Args:
            seed: The seed; ignored if the method uses none.
            learn: Other values for fields of `learn`, for a method that needs labels.
        """
        if self.needs_labels:
            changed = dataclasses.replace(self.config.learn, seed=seed, **learn)
            return dataclasses.replace(self.config, learn=changed)
        return dataclasses.replace(self.config, seed=seed) if self.uses_seed else self.config

    @with_gradients
    def training(self, context: FitContext, config: Any = None) -> Training:
        """Prepare the training run of a method that needs labels without starting it, for example to run single steps.

        Args:
            context: The model and the training images.
            config: The configuration; by default that of the method.

        Returns:
            The training run.

        Raises:
            SelfTPTError: The method does not learn from labelled images, or there are none.
        """
        if self.train is None:
            raise SelfTPTError(f"{self.name} does not learn from labelled images and has no training run: use fit")
        run = self.train(context, self.train_config(context, self.config if config is None else config))
        run.start_from(context.initial)
        return run

    @with_gradients
    def fit(self, context: FitContext, config: Any = None) -> FittedMethod:
        """Fit the method to labelled images. A method that needs no labels is only prepared.

        Args:
            context: The model and, for a method that needs labels, the training images.
            config: The configuration; by default that of the method.

        Returns:
            The fitted method.

        Raises:
            SelfTPTError: The method needs training images, another model or a setting that is missing; or there are
                initial values, but the method learns no parameters.
        """
        config = self.config if config is None else config
        if self.needs_labels and context.train_set is None:
            raise SelfTPTError(f"{self.name} learns from labelled images: pass a source")
        if context.initial and not self.needs_labels:
            raise SelfTPTError(f"{self.name} learns no parameters from images: remove `initial`")
        if self.requires == "transformer image tower" and not context.model.image.runs_blocks:
            raise SelfTPTError(
                f"{self.name} needs an open_clip ViT as image tower, and {context.model.id} has none: use another model"
            )
        data, tensors = dict(self.data(config)), dict[str, Tensor]()
        if self.train is not None:
            tensors = context.learned(self.train, self.train_config(context, config), self.tensors or None)
            data["classes"] = list(context.source.names)
        fitted = FittedMethod(self, config, context.model.id, tensors, data, context.files)
        return fitted.with_model(context.model)


@dataclass(frozen=True, eq=False, repr=False)
class FittedMethod:
    """A fitted method. It can be saved, loaded and pickled; the model is not included.

    Attributes:
        method: The method.
        config: The configuration.
        model_id: The identity of the model that the method was fitted with.
        tensors: Learned parameters by name, on the CPU.
        data: The JSON values of `Method.data` and, if the method needs labels, the training classes.
        files: The storage of parameters that are learned per class list.
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
        """The model. It is loaded when it is first needed."""
        if self._model is None:
            model = load_recorded_model(self.model_id, f"the fitted method {self.method.name}")
            object.__setattr__(self, "_model", self.with_model(model)._model)
        assert self._model is not None
        return self._model

    @property
    def inputs(self) -> Inputs:
        """The kind of input that the method uses for each image."""
        choose = self.method.choose_inputs
        return self.method.inputs if choose is None else choose(self.config, self.model)

    def with_model(self, model: Model) -> FittedMethod:
        """Return a copy that uses a model that is already loaded, for example after unpickling.

        Args:
            model: The model that the method was fitted with.

        Raises:
            SelfTPTError: The method was fitted with another model, or its tensors do not match the model.
        """
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
                        f"the fitted {self.method.name} does not match {model.id}: {name} has shape {list(shape)}, "
                        f"but {letter} must be {sizes[letter]}"
                    )
        return dataclasses.replace(self, _model=model)

    @with_gradients
    def for_classes(self, names: Sequence[str], template: str = ContrastConfig.template) -> Predictor:
        """Make a predictor for a list of class names.

        Args:
            names: Class names, [C].
            template: The template of the dataset, with {} for the class name. Most methods with a prompt ignore it.

        Returns:
            The predictor.

        Raises:
            SelfTPTError: The class names are not valid, or the method cannot use them.
        """
        names = check_names(names)
        return Predictor(self, names, self.method.predictor(self, names, template))

    def on_device(self) -> dict[str, Tensor]:
        """Return the learned parameters on the model's device."""
        return {name: tensor.to(self.model.device) for name, tensor in self.tensors.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted method to a safetensors file. The file does not include the model.

        Args:
            path: The file.

        Raises:
            SelfTPTError: The file cannot be written.
        """
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
            model: The model. By default, the model that the file names is loaded when it is first needed.
            changes: Settings to change, such as `{"generated": "folder"}`. Settings that name files, folders or
                repositories are never taken from the file.

        Returns:
            The fitted method.

        Raises:
            SelfTPTError: The file is not a valid fitted method, it does not match the model, or a change is not valid.
        """
        header, tensors = read_tensors(Path(path), "fitted-method", FITTED)
        if header["method"] not in METHODS:
            raise SelfTPTError(f"{path} contains an unknown method, {header['method'][:60]!r}: update selftpt")
        method = METHODS[header["method"]]
        try:
            Schema(FITTED.header, method.tensors).check(header)
            config = change(restore(method.config, header["config"]), without_places(method.config))
            if method.needs_labels:
                check_names(header["data"].get("classes"))
        except (SelfTPTError, ValueError) as error:
            raise SelfTPTError(f"{path} is not a valid fitted method: {error}") from error
        for key in changes or {}:
            if kind_of(config, key.split(".")) is None:
                raise SelfTPTError(f"{method.name} has no setting {key!r}: see `selftpt methods {method.name}`")
        config = change(config, changes or {})
        fitted = cls(method, config, ModelId(**header["model"]), tensors, header["data"])
        return fitted if model is None else fitted.with_model(model)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A fitted method for a list of class names; `FittedMethod.for_classes` makes one.

    Attributes:
        fitted: The fitted method.
        names: Class names, [C].
        function: A `Classifier`, or another function from views to probabilities.
    """

    fitted: FittedMethod
    names: tuple[str, ...]
    function: Any

    def __repr__(self) -> str:
        return f"Predictor({self.fitted.method.name}, {len(self.names)} classes, {self.fitted.model_id})"

    @property
    def classifier(self) -> Classifier | None:
        """The classifier, if the method produces one, else None."""
        return self.function if isinstance(self.function, Classifier) else None

    @with_gradients
    def __call__(self, views: Tensor) -> Tensor:
        """Compute probabilities [N, C] from features of views [N, V, D] or pixels [N, V, 3, S, S].

        A transductive method needs all test images in one call.
        """
        return self.function([views] if self.fitted.method.transductive else views)  # type: ignore[no-any-return]

    def stream(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, Tensor]]:
        """Yield blocks of images with their probabilities [n, C].

        A transductive method reads all blocks before it yields the first one. The yielded blocks then have no views.
        """
        if not self.fitted.method.transductive:
            for block in blocks:
                yield block, self(block.views)
            return
        seen: list[Block] = []

        def views() -> Iterator[Tensor]:
            for block in blocks:
                # a slice instead of `new_empty` would keep the memory of all views
                seen.append(dataclasses.replace(block, views=block.views.new_empty(0)))
                yield block.views

        probabilities = self._stream_probabilities(views())
        yield from zip(seen, probabilities.split([len(block.indices) for block in seen]), strict=True)

    @with_gradients
    def _stream_probabilities(self, views: Iterator[Tensor]) -> Tensor:
        first = next(views, None)
        if first is None:
            return torch.empty(0, len(self.names))
        return self.function(itertools.chain([first], views))  # type: ignore[no-any-return]

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
            top: Maximum number of classes in each prediction.
            cache: The cache of image features; by default nothing is cached.
            on_error: Called for every image of a list that cannot be used; the image is then left out.

        Returns:
            A `Prediction` for a single image, or a list of predictions in the order of the input.

        Raises:
            SelfTPTError: An argument is invalid, or a single image cannot be used.
        """
        return predict_all(self._stream(cache), images, self.names, _check_top(top), on_error)

    def iter_predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        top: int = 5,
        *,
        cache: Cache = NO_CACHE,
        on_error: OnError = warn_of,
    ) -> Iterator[Prediction]:
        """Classify images lazily. The arguments are those of `predict` and are validated at the call.

        A transductive method yields its first prediction after it has read all images.
        """
        return predict_each(self._stream(cache), as_list(images), self.names, _check_top(top), on_error)

    def predict_proba(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        cache: Cache = NO_CACHE,
        on_error: OnError = warn_of,
    ) -> NDArray[np.float32]:
        """Compute the probabilities of all classes. The arguments are those of `predict`.

        Returns:
            Probabilities, [N, C], in the order of the input. The row of an image that cannot be used is NaN.
        """
        return probability_matrix(self._stream(cache), images, len(self.names), on_error)

    def _stream(self, cache: Cache) -> Stream:
        fitted = self.fitted

        def stream(images: Iterable[ImageInput], on_error: OnError) -> Iterator[tuple[Block, Tensor]]:
            provider = FeatureProvider(fitted.model, fitted.method.views(fitted.config), cache, on_error=on_error)
            return self.stream(provider.blocks(images, pixels=fitted.inputs == "pixels"))

        return stream


def _check_top(top: int) -> int:
    try:
        if isinstance(top, bool) or operator.index(top) < 1:
            raise TypeError
    except TypeError:
        raise SelfTPTError(f"top must be an integer above 0, not {top!r}") from None
    return operator.index(top)
