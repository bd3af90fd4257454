"""TPT and C-TPT equal a slow reference, and do a known amount of work per image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from selftpt.classifier import confident_views, merge_views
from selftpt.config import LearnConfig
from selftpt.data.sources import Source
from selftpt.data.views import ViewSpec, image_and_crops
from selftpt.errors import SelfTPTError
from selftpt.methods import METHODS, FitContext
from selftpt.methods.c_tpt import C_TPT, CTptConfig, text_feature_dispersion
from selftpt.methods.coop import CoopTrainConfig
from selftpt.methods.tda import CONFIDENT, merge
from selftpt.methods.tpt import TPT, CoopTptConfig, TptConfig, Tuner, marginal_entropy, most_confident
from tests.helpers.folders import make_photos
from tests.helpers.methods import raise_error
from tests.helpers.models import Small, model, relative, small
from tests.oracle import tpt as oracle

NAMES = ["cat", "red kite", "blue bird in the rain", "dog", "boat etc."]  # CLIP joins both full stops of the last name
WORDS = "a photo of a"


def views_of(small: Small, count: int = 1, views: int = 12, seed: int = 0) -> Tensor:
    """Return L2-normalised features [N, V, D] that are similar like views of one image each."""
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(count, 1, small.spec.dimension, generator=generator)
    shown = middle + torch.randn(count, views, small.spec.dimension, generator=generator)
    return F.normalize(shown.to(small.embedding.dtype), dim=-1)


def tuner_of(small: Small, names: list[str] = NAMES, spread: float | None = None, **more: Any) -> Tuner:
    """Return TPT's predictor, or C-TPT's if a weight of the dispersion is given."""
    context, more = FitContext(small.model), {"confidence_ratio": 0.3} | more
    if spread is None:
        fitted = TPT.fit(context, TptConfig(**more))
    else:
        fitted = C_TPT.fit(context, CTptConfig(dispersion=spread, **more))
    tuner = fitted.for_classes(names).function
    assert isinstance(tuner, Tuner)
    return tuner


def check(small: Small, names: list[str] = NAMES, spread: float | None = None, **more: Any) -> None:
    """Check loss, first gradient, prompt and probabilities against the oracle, with and without chunks."""
    (views,) = views_of(small)
    begin = small.embedding[torch.tensor(small.encode(WORDS))]
    tau = 1 / small.model.scale
    expected = oracle.tune(small, names, begin, views, tau, 0.3, dispersion_weight=spread or 0.0, **more)
    for chunk in (None, 2):
        tuner = tuner_of(small, names, spread, chunk=chunk, **more)
        loss = tuner.view_loss(views)
        assert loss(tuner.class_features).item() == pytest.approx(expected.loss, rel=1e-9)
        assert relative(tuner.first_gradient(loss), expected.gradient) < 1e-9
        assert relative(tuner.tune(views), expected.prompt) < 1e-6
        assert relative(tuner(views[None])[0], expected.probabilities) < 1e-6
    assert relative(begin, expected.prompt) > 1e-3


@pytest.mark.parametrize("kind", ["vit", "vit-quickgelu", "custom-text", "qk-norm", "worldwide", "siglip"])
@pytest.mark.parametrize("spread", [None, 50.0])
def test_one_step_equals_the_reference(kind: str, spread: float | None) -> None:
    check(small(kind, torch.float64), spread=spread)


@pytest.mark.parametrize("spread", [None, 2.0])
def test_several_steps_equal_the_reference(spread: float | None) -> None:
    check(small("vit", torch.float64), spread=spread, steps=3)


def test_two_classes_equal_the_reference() -> None:
    check(small("vit", torch.float64), names=NAMES[1:3])


def test_float32_is_close_to_float64() -> None:
    """The first step of Adam has the sign of the gradient, which may differ where the gradient is near 0."""
    exact, found = small("vit", torch.float64), small("vit")
    views = views_of(exact, count=3)
    torch.testing.assert_close(tuner_of(found)(views.float()).double(), tuner_of(exact)(views), rtol=0, atol=1e-4)


@given(st.integers(1, 9), st.integers(2, 6), st.floats(0.05, 1), st.integers(0, 10**6))
def test_selection_and_loss_equal_the_reference(views: int, classes: int, ratio: float, seed: int) -> None:
    logits = 3 * torch.randn(views, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert most_confident(logits, ratio).tolist() == oracle.lowest_entropy(oracle.softmax(logits), ratio)
    expected = oracle.marginal_entropy(oracle.softmax(logits)).item()
    assert marginal_entropy(logits).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("ratio", "views", "kept"), [(0.1, 64, 6), (0.3, 12, 3), (0.3, 9, 2), (0.1, 9, 1), (0.29, 100, 28), (1.0, 5, 5)]
)
def test_every_method_rounds_the_number_of_confident_views_down(ratio: float, views: int, kept: int) -> None:
    """At least one view is kept, as in TPT's code."""
    logits = torch.randn(views, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probabilities = logits.softmax(-1)
    chosen = oracle.lowest_entropy(probabilities, ratio)
    assert len(chosen) == kept
    assert confident_views(probabilities, ratio).tolist() == chosen
    assert most_confident(logits, ratio).tolist() == chosen
    torch.testing.assert_close(merge_views(probabilities, ratio), probabilities[chosen].mean(0))
    if ratio == CONFIDENT:  # with one-hot class vectors, the logits are the features
        torch.testing.assert_close(merge(logits[None], torch.eye(5).double(), 1.0).logits[0], logits[chosen].mean(0))


def test_default_keeps_six_of_64_views() -> None:
    logits = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    assert len(most_confident(logits, TptConfig().confidence_ratio)) == 6


def test_loss_of_certain_views_is_finite() -> None:
    """Probabilities that are 0 in float32 contribute nothing."""
    logits = torch.tensor([[1e4, 0.0, -1e4], [1e4, 0.0, -1e4]], requires_grad=True)
    loss = marginal_entropy(logits)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_dispersion_equals_the_reference(classes: int, width: int, seed: int) -> None:
    vectors = torch.randn(classes, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = text_feature_dispersion(F.normalize(vectors, dim=-1))
    assert found.item() == pytest.approx(oracle.dispersion(vectors).item(), rel=1e-9, abs=1e-12)


def test_c_tpt_moves_class_vectors_apart() -> None:
    tiny = small("vit")
    (views,) = views_of(tiny)
    apart = []
    for spread in (0.0, 50.0):
        tuner = tuner_of(tiny, spread=spread)
        apart.append(text_feature_dispersion(F.normalize(tuner.encoder(tuner.tune(views))[0], dim=-1)).item())
    assert apart[1] > apart[0]
    assert torch.equal(tuner_of(tiny, spread=0.0)(views[None]), tuner_of(tiny)(views[None]))


@pytest.mark.filterwarnings("ignore:equal class names")
def test_equal_classes_stay_equal() -> None:
    tiny = small("vit")
    answer = tuner_of(tiny, ["cat", "Cat"], spread=50.0)(views_of(tiny))
    torch.testing.assert_close(answer, torch.full((1, 2), 0.5))


@pytest.mark.parametrize(("chunk", "forwards"), [(None, 1), (2, 1 + 3)])
def test_text_forward_passes_per_image(chunk: int | None, forwards: int) -> None:
    """The prediction needs one pass. The first step needs its own only if no graph is kept, here in three chunks."""
    tiny = small("vit")
    tuner, done = tuner_of(tiny, chunk=chunk), []
    tuner.encoder.on_forward = lambda: done.append(1)
    tuner(views_of(tiny, count=4))
    assert len(done) == 4 * forwards


def test_coop_tpt_starts_from_the_prompt_of_coop(tmp_path: Path) -> None:
    """The prompt is learned once for both methods, in one file."""
    source = Source.from_folder(make_photos(tmp_path / "photos", per_class=2))
    context = FitContext(model(), source, tmp_path / "learned", on_error=raise_error)
    image = views_of(small("vit"), count=3)[:, :1]
    coop, coop_tpt = METHODS["coop"], METHODS["coop+tpt"]
    expected = coop.fit(context, type(coop.config)(CoopTrainConfig(epochs=2))).for_classes(NAMES)(image)
    start = CoopTptConfig(steps=0, learn=LearnConfig(epochs=2, cpt=0, gm=0))
    torch.testing.assert_close(coop_tpt.fit(context, start).for_classes(NAMES)(image), expected, rtol=0, atol=1e-6)
    assert len(list((tmp_path / "learned").glob("*.safetensors"))) == 1
    assert coop.train_config(context, coop.config) == coop_tpt.train_config(context, coop_tpt.config)


def test_methods_with_64_views_share_them() -> None:
    specs = {tuple(METHODS[name].views(METHODS[name].config)) for name in ("tpt", "coop+tpt", "c-tpt", "self-tpt-v")}
    assert specs == {tuple(image_and_crops(64))} == {(ViewSpec(), ViewSpec(63, 0))}
    assert TPT.views(TptConfig(views=1)) == [ViewSpec()]
    assert TPT.views(TptConfig(views=8, augmix=True)) == [ViewSpec(), ViewSpec(7, 0, augmix=True)]


@pytest.mark.parametrize(("method", "kind"), [("tpt", TptConfig), ("c-tpt", CTptConfig), ("coop+tpt", CoopTptConfig)])
def test_cost_follows_from_the_configuration(method: str, kind: type) -> None:
    assert METHODS[method].cost(METHODS[method].config) == "64 views, 1 step"
    assert METHODS[method].cost(kind(views=8, steps=2)) == "8 views, 2 steps"
    assert METHODS[method].cost(kind(views=1, steps=0)) == "1 view, 0 steps"


@pytest.mark.parametrize(
    "wrong",
    [
        {"views": 0},
        {"views": 8.5},
        {"views": True},
        {"augmix": 1},
        {"confidence_ratio": 0.0},
        {"confidence_ratio": 1.5},
        {"confidence_ratio": "0.1"},
        {"steps": -1},
        {"lr": 0.0},
        {"weight_decay": -1.0},
        {"chunk": 0},
        {"words": 4},
        {"dispersion": -1.0},
        {"dispersion": float("nan")},
    ],
)
def test_invalid_configuration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match=f"CTptConfig.{next(iter(wrong))} must be"):
        CTptConfig(**wrong)


def test_prompt_without_words_is_refused() -> None:
    with pytest.raises(SelfTPTError, match="words is empty"):
        CTptConfig(words=" ")
