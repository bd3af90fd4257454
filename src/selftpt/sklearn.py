"""A scikit-learn estimator around the methods of `selftpt.METHODS` (extra `selftpt[sklearn]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selftpt.classifier import raise_error
from selftpt.config import ContrastConfig
from selftpt.data.cache import Cache
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError
from selftpt.methods.fitting import fit
from selftpt.methods.selection import find_method
from selftpt.models import Model, load_model

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise SelfTPTError("selftpt.sklearn needs scikit-learn: pip install 'selftpt[sklearn]'") from error


class SelfTPTClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Image classifier with the interface of scikit-learn.

    `X` is a list of images as in `Classifier.predict`: paths, PIL images, uint8 arrays [H, W, 3] or tensors. The
    estimator predicts the classes in `y`.

    Args:
        method: A method of `selftpt.METHODS`.
        model: The model; None loads the embedded one.
        names: The class name of each label in `y`; needed if the labels are not class names.
        settings: Settings of the method that differ from its defaults, such as `{"learn.epochs": 5}`.
        template: The template of the hand-crafted view and of zero-shot, with {} for the class name.
        cache: Where image features are cached; None uses the user's cache folder.

    Attributes:
        classes_: The distinct labels of `y`, sorted, [C].
        predictor_: The `selftpt.Predictor` for these classes.

    Example:
        >>> import numpy as np
        >>> from selftpt.sklearn import SelfTPTClassifier
        >>> night, snow = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
        >>> estimator = SelfTPTClassifier(method="clip").fit([night, snow], ["night sky", "snow"])
        >>> estimator.predict([night]).tolist()
        ['night sky']
    """

    def __init__(
        self,
        method: str = "self-tpt",
        *,
        model: Model | None = None,
        names: Mapping[Any, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        template: str = ContrastConfig.template,
        cache: Cache | None = None,
    ) -> None:
        self.method = method
        self.model = model
        self.names = names
        self.settings = settings
        self.template = template
        self.cache = cache

    def fit(self, X: Sequence[Any], y: Sequence[Any]) -> SelfTPTClassifier:  # noqa: N803
        """Fit the method on labelled images.

        Args:
            X: Images, [N].
            y: Class names, or labels whose class names are in `names`, [N].

        Returns:
            The estimator itself.

        Raises:
            SelfTPTError: A label is not a class name and is not in `names`, or the method cannot be fitted.
        """
        self.classes_, labels = np.unique(np.asarray(y), return_inverse=True)
        values = self.classes_.tolist()
        if self.names is not None and (missing := [value for value in values if value not in self.names]):
            raise SelfTPTError(f"names has no class name for the label {missing[0]!r}")
        names = values if self.names is None else [self.names[value] for value in values]
        if not all(isinstance(name, str) for name in names):
            raise SelfTPTError("y must be class names: for other labels, give their names with names={label: name}")
        source = Source.from_images(list(X), labels.tolist(), names)
        needs_labels = find_method(self.method).needs_labels
        self.fitted_ = fit(
            self.method,
            load_model() if self.model is None else self.model,
            source if needs_labels else None,
            settings=self.settings,
            cache=self.cache,
            template=self.template,
        )
        self.predictor_ = self.fitted_.for_classes(names, self.template)
        return self

    def predict_proba(self, X: Sequence[Any]) -> NDArray[np.float32]:  # noqa: N803
        """Compute the probabilities of `classes_`.

        Args:
            X: Images, [N].

        Returns:
            Probabilities, [N, C].

        Raises:
            SelfTPTError: An image cannot be used.
        """
        check_is_fitted(self)
        return self.predictor_.predict_proba(list(X), cache=self.cache or Cache(), on_error=raise_error)

    def predict(self, X: Sequence[Any]) -> NDArray[Any]:  # noqa: N803
        """Predict the most probable of `classes_`.

        Args:
            X: Images, [N].

        Returns:
            A label for each image, [N].

        Raises:
            SelfTPTError: An image cannot be used.
        """
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.no_validation = True
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True
        return tags
