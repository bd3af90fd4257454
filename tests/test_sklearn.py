"""The scikit-learn estimator."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'selftpt[sklearn]'")

from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

from selftpt import Cache, SelfTPTError
from selftpt.data.sources import Source
from selftpt.sklearn import SelfTPTClassifier
from tests.helpers.folders import make_photos
from tests.helpers.models import model

NO_CACHE = Cache("off")
FAST = {"learn.epochs": 1, "learn.shots": 1}

# Checks of scikit-learn that do not need numeric arrays as input.
CHECKS = [
    estimator_checks.check_no_attributes_set_in_init,
    estimator_checks.check_parameters_default_constructible,
    estimator_checks.check_do_not_raise_errors_in_init_or_set_params,
    estimator_checks.check_estimators_unfitted,
    estimator_checks.check_get_params_invariance,
    estimator_checks.check_set_params,
    estimator_checks.check_mixin_order,
    estimator_checks.check_estimator_repr,
    estimator_checks.check_estimator_cloneable,
    estimator_checks.check_estimator_tags_renamed,
    estimator_checks.check_valid_tag_types,
]


def estimator(method: str = "clip", **parameters: Any) -> SelfTPTClassifier:
    return SelfTPTClassifier(method, model=model(), cache=NO_CACHE, **parameters)


@pytest.fixture
def photos(tmp_path: Path) -> tuple[list[Path], list[str]]:
    source = Source.read(make_photos(tmp_path / "photos", ("cat", "dog"), per_class=4))
    return list(source.paths), [source.names[label] for label in source.labels]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_estimator_passes_the_checks_of_scikit_learn(check: Any) -> None:
    check("SelfTPTClassifier", SelfTPTClassifier())


@pytest.mark.parametrize(("method", "settings"), [("clip", None), ("self-tpt", FAST)])
def test_predictions_equal_those_of_the_library(
    photos: tuple[list[Path], list[str]], method: str, settings: dict[str, Any] | None
) -> None:
    X, y = photos
    fitted = estimator(method, settings=settings).fit(X, y)
    assert fitted.classes_.tolist() == ["cat", "dog"]
    expected = fitted.fitted_.for_classes(["cat", "dog"]).predict_proba(X)
    assert np.array_equal(fitted.predict_proba(X), expected)
    predictions = fitted.predict(X)
    assert predictions.tolist() == [["cat", "dog"][i] for i in expected.argmax(1)]
    assert fitted.score(X, y) == np.mean(predictions == np.array(y))


def test_numeric_labels_need_class_names(photos: tuple[list[Path], list[str]]) -> None:
    X, y = photos
    labels = [7 if name == "cat" else 3 for name in y]
    fitted = estimator(names={3: "dog", 7: "cat"}).fit(X, labels)
    assert fitted.classes_.tolist() == [3, 7]
    assert set(fitted.predict(X)) <= {3, 7}
    by_name = estimator().fit(X, y).predict_proba(X)
    assert np.allclose(fitted.predict_proba(X), by_name[:, ::-1], atol=1e-6)
    with pytest.raises(SelfTPTError, match=r"give their names with names="):
        estimator().fit(X, labels)
    with pytest.raises(SelfTPTError, match="no class name for the label 7"):
        estimator(names={3: "dog"}).fit(X, labels)


def test_estimator_works_with_clone_grid_search_cross_validation_and_pipelines(
    photos: tuple[list[Path], list[str]],
) -> None:
    X, y = photos
    assert clone(estimator(template="a sketch of {}.")).template == "a sketch of {}."
    search = GridSearchCV(estimator(), {"template": ["a photo of a {}.", "a sketch of {}."]}, cv=2).fit(X, y)
    assert search.best_params_["template"] in ("a photo of a {}.", "a sketch of {}.")
    assert len(cross_val_score(estimator(), X, y, cv=2, error_score="raise")) == 2
    pipeline = make_pipeline(FunctionTransformer(), estimator()).fit(X, y)
    assert pipeline.predict(X).shape == (len(X),)


def test_invalid_input_is_refused(photos: tuple[list[Path], list[str]], tmp_path: Path) -> None:
    X, y = photos
    with pytest.raises(NotFittedError):
        estimator().predict(X)
    with pytest.raises(SelfTPTError, match="no method is called 'none'"):
        estimator("none").fit(X, y)
    with pytest.raises(SelfTPTError, match=r"none\.jpg: no such file"):
        estimator().fit(X, y).predict([tmp_path / "none.jpg"])


def test_fitted_estimator_is_pickled_without_the_model(photos: tuple[list[Path], list[str]]) -> None:
    fitted = estimator().set_params(model=None).fit(*photos)
    data = pickle.dumps(fitted)
    assert len(data) < 100_000
    assert np.allclose(pickle.loads(data).predict_proba(photos[0]), fitted.predict_proba(photos[0]), atol=1e-6)
