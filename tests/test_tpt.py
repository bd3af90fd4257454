"""TPT and C-TPT are what their papers say, and do per picture no more than they must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from selftpt.config import LearnConfig
from selftpt.data.sources import read_folder
from selftpt.errors import SelfTPTError
from selftpt.methods import METHODS, Job, c_tpt, tpt
from selftpt.methods.c_tpt import dispersion
from selftpt.methods.tpt import Tuner, mean_entropy, most_confident
from tests.folders import make_photos
from tests.oracle import tpt as oracle
from tests.small import Small, model, relative, small

NAMES = ["cat", "red kite", "blue bird in the rain", "dog", "boat on the lake"]
WORDS = "a photo of a"


def views_of(small: Small, pictures: int = 1, views: int = 12, seed: int = 0) -> Tensor:
    """Unit features [N, V, D]: a picture, and others near it."""
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(pictures, 1, small.spec.dimension, generator=generator)
    shown = middle + torch.randn(pictures, views, small.spec.dimension, generator=generator)
    return F.normalize(shown.to(small.embedding.dtype), dim=-1)


def tuner_of(small: Small, names: list[str] = NAMES, spread: float | None = None, **more: Any) -> Tuner:
    """TPT's predictor, or C-TPT's if there is a weight of dispersion."""
    job = Job(small.model, None, Path("unused"), print)
    if spread is None:
        fitted = tpt.fit(job, tpt.Settings(**{"confident": 0.3} | more))
    else:
        fitted = c_tpt.fit(job, c_tpt.Settings(**{"confident": 0.3, "dispersion": spread} | more))
    predictor = fitted(names, "unused {}")
    assert isinstance(predictor, Tuner)
    return predictor


def check(small: Small, names: list[str] = NAMES, spread: float | None = None, **more: Any) -> None:
    """Loss, first gradient, prompt and probabilities against the oracle's, whole and in chunks."""
    (views,) = views_of(small)
    begin = small.embedding[torch.tensor(small.encode(WORDS))]
    tau = 1 / small.model.scale
    wanted = oracle.tune(small, names, begin, views, tau, 0.3, spread=spread or 0.0, **more)
    for chunk in (None, 2):
        tuner = tuner_of(small, names, spread, chunk=chunk, **more)
        objective = tuner.objective(views)
        assert objective(tuner.features).item() == pytest.approx(wanted.loss, rel=1e-9)
        assert relative(tuner.first_gradient(objective), wanted.gradient) < 1e-9
        assert relative(tuner.tune(views), wanted.prompt) < 1e-6
        assert relative(tuner(views[None])[0], wanted.probabilities) < 1e-6
    assert relative(begin, wanted.prompt) > 1e-3


@pytest.mark.parametrize("kind", ["vit", "vit-quickgelu", "custom-text", "qk-norm", "worldwide", "siglip"])
@pytest.mark.parametrize("spread", [None, 50.0])
def test_one_step(kind: str, spread: float | None) -> None:
    check(small(kind, torch.float64), spread=spread)


@pytest.mark.parametrize("spread", [None, 2.0])
def test_several_steps(spread: float | None) -> None:
    check(small("vit", torch.float64), spread=spread, steps=3)


def test_two_classes() -> None:
    check(small("vit", torch.float64), names=NAMES[1:3])


def test_float32() -> None:
    """The first step of Adam is the sign of the gradient, whatever its size: where that is near 0, signs may differ."""
    exact, found = small("vit", torch.float64), small("vit")
    shown = views_of(exact, pictures=3)
    torch.testing.assert_close(tuner_of(found)(shown.float()).double(), tuner_of(exact)(shown), rtol=0, atol=1e-4)


@given(st.integers(1, 9), st.integers(2, 6), st.floats(0.05, 1), st.integers(0, 10**6))
def test_views_and_loss(views: int, classes: int, share: float, seed: int) -> None:
    logits = 3 * torch.randn(views, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert most_confident(logits, share).tolist() == oracle.confident(oracle.softmax(logits), share)
    assert mean_entropy(logits).item() == pytest.approx(oracle.mean_entropy(oracle.softmax(logits)).item(), rel=1e-9)


def test_a_tenth_of_64_views_is_six() -> None:
    logits = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    assert len(most_confident(logits, tpt.Settings().confident)) == 6


def test_surest_of_all_is_finite() -> None:
    """Probabilities that are 0 in float32 count nothing."""
    logits = torch.tensor([[1e4, 0.0, -1e4], [1e4, 0.0, -1e4]], requires_grad=True)
    loss = mean_entropy(logits)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_dispersion(classes: int, width: int, seed: int) -> None:
    vectors = torch.randn(classes, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = dispersion(F.normalize(vectors, dim=-1))
    assert found.item() == pytest.approx(oracle.dispersion(vectors).item(), rel=1e-9, abs=1e-12)


def test_c_tpt_moves_class_vectors_apart() -> None:
    tiny = small("vit")
    (views,) = views_of(tiny)
    apart = []
    for spread in (0.0, 50.0):
        tuner = tuner_of(tiny, spread=spread)
        apart.append(dispersion(F.normalize(tuner.encoder(tuner.tune(views))[0], dim=-1)).item())
    assert apart[1] > apart[0]
    assert torch.equal(tuner_of(tiny, spread=0.0)(views[None]), tuner_of(tiny)(views[None]))


@pytest.mark.filterwarnings("ignore:equal class names")
def test_classes_that_are_one_have_no_direction_to_part() -> None:
    tiny = small("vit")
    answer = tuner_of(tiny, ["cat", "Cat"], spread=50.0)(views_of(tiny))
    torch.testing.assert_close(answer, torch.full((1, 2), 0.5))


@pytest.mark.parametrize(("chunk", "walks"), [(None, 1), (2, 1 + 3)])
def test_work_for_a_picture(chunk: int | None, walks: int) -> None:
    """A walk for the answer; the first step walks again only where no graph is kept, here in three chunks."""
    tiny = small("vit")
    tuner, done = tuner_of(tiny, chunk=chunk), []
    tuner.encoder.on_forward = lambda: done.append(1)
    tuner(views_of(tiny, pictures=4))
    assert len(done) == 4 * walks


def test_coop_and_tpt(tmp_path: Path) -> None:
    """TPT starts from the prompt that CoOp learned, of which there is one file."""
    source = read_folder(make_photos(tmp_path / "photos", each=2))
    shown = views_of(small("vit"), pictures=3)
    answers = {}
    for name in ("coop", "coop+tpt"):
        method = METHODS[name]
        job = Job(model(), source, tmp_path / "learned", print)
        more = {} if name == "coop" else {"steps": 0}
        settings = type(method.settings)(learn=LearnConfig(epochs=2, cpt=0, gm=0), **more)
        answers[name] = method.fit(job, settings)(NAMES, "unused {}")(shown[:, :1])
    torch.testing.assert_close(answers["coop"], answers["coop+tpt"], rtol=0, atol=1e-6)
    assert len(list((tmp_path / "learned").glob("*.safetensors"))) == 1
    assert METHODS["coop"].settings.learn == METHODS["coop+tpt"].settings.learn


def test_what_it_looks_at() -> None:
    looks = {tuple(METHODS[name].looks(METHODS[name].settings)) for name in ("tpt", "coop+tpt", "c-tpt", "self-tpt-v")}
    assert len(looks) == 1
    assert [look.views for look in tpt.looks(tpt.Settings(views=1))] == [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"views": 0}, "views"),
        ({"confident": 0.0}, "confident"),
        ({"confident": 1.5}, "confident"),
        ({"steps": -1}, "steps"),
        ({"lr": 0.0}, "lr"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"chunk": 0}, "chunk"),
        ({"words": " "}, "words"),
        ({"dispersion": -1.0}, "dispersion"),
        ({"dispersion": float("nan")}, "dispersion"),
    ],
)
def test_senseless_settings(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SelfTPTError, match=words):
        c_tpt.Settings(**change)
