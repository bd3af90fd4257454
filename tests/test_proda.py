"""ProDA against the same written out, and that it learns once, by its seed."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt import SelfTPTError
from selftpt.classifier import Classifier
from selftpt.config import TrainConfig
from selftpt.data.sources import read_folder
from selftpt.methods import METHODS, Job
from selftpt.methods.proda import PRODA, Settings, Task, bound, descent, learn, likeness, mean_embedding, places
from selftpt.models.tokenizer import tokenize
from selftpt.objective import Batch
from selftpt.training import RunFiles, learning_rate, loop
from tests.folders import make_photos
from tests.oracle import proda as oracle
from tests.small import Small, model, names_of, relative, small

NAMES = ["cat", "red kite", "blue bird in the rain", "dog", "boat on the lake"]
SHORT = Settings(TrainConfig(length=3, words="", epochs=2, batch=2), prompts=4, prompts_per_step=2)
SCALE = 20.0


def contexts_of(tiny: Small, prompts: int = 6, length: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = 0.5 * torch.randn(prompts, length, tiny.embedding.shape[1], generator=generator)
    return drawn.to(tiny.embedding.dtype)


def batch_of(tiny: Small, classes: int, count: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, tiny.spec.dimension, generator=generator).to(tiny.embedding.dtype)
    return Batch(F.normalize(images, dim=-1), torch.randint(classes, (count,), generator=generator), SCALE)


def task_of(tiny: Small, names: list[str], chunk: int | None, length: int = 3) -> Task:
    return Task.of(tiny.model, tokenize(names, tiny.model.text.tokenizer, tiny.context), length, chunk)


def job(folder: Path) -> Job:
    photos = folder / "photos"
    return Job(
        model(), read_folder(photos if photos.is_dir() else make_photos(photos)), folder / "learned", lambda _: None
    )


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", ["vit", "layerscale", "worldwide", "siglip", "coca"])
def test_a_step_equals_the_plain_walk(kind: str, chunk: int | None) -> None:
    tiny = small(kind, torch.float64)
    contexts, batch = contexts_of(tiny), batch_of(tiny, len(NAMES))
    chosen = [5, 0, 4]  # in front, at the end, in the middle
    found, gradient = descent(task_of(tiny, NAMES, chunk), contexts, chosen, batch, 0.7)
    surrogate, alike, wanted = oracle.step(tiny, NAMES, contexts, chosen, *batch, 0.7)
    assert found == {"bound": pytest.approx(surrogate.item()), "likeness": pytest.approx(alike.item())}
    assert relative(gradient, wanted) < 1e-9
    assert gradient[1].norm() > 0  # a prompt that is not chosen is still held apart
    assert not contexts.requires_grad


def test_without_orthogonality_only_the_chosen_prompts_move() -> None:
    tiny = small("vit", torch.float64)
    losses, gradient = descent(task_of(tiny, NAMES, None), contexts_of(tiny), [1, 4], batch_of(tiny, 5), 0.0)
    assert set(losses) == {"bound"}
    assert gradient.flatten(1).norm(dim=1).nonzero().flatten().tolist() == [1, 4]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(2, 6), st.integers(1, 7), st.integers(1, 4), st.integers(0, 1000))
def test_the_bound_is_its_formula_and_above_the_mean(
    prompts: int, classes: int, dimension: int, pictures: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(prompts, classes, dimension, generator=generator, dtype=torch.float64)
    images = F.normalize(torch.randn(pictures, dimension, generator=generator, dtype=torch.float64), dim=-1)
    labels = torch.randint(classes, (pictures,), generator=generator)
    found = bound(Batch(images, labels, 3.0), features)
    unit = [[oracle.unit(w) for w in prompt] for prompt in features]
    assert found.item() == pytest.approx(oracle.bound(images, labels, unit, 3.0).item())
    mean = F.normalize(features, dim=-1).mean(0)
    assert found >= F.cross_entropy(3.0 * images @ mean.t(), labels) - 1e-12


def test_the_bound_is_above_what_it_bounds() -> None:
    """The expected cross-entropy of class embeddings drawn from the Gaussian, each coordinate for itself."""
    generator = torch.Generator().manual_seed(0)
    features = F.normalize(torch.randn(4, 3, 5, generator=generator, dtype=torch.float64), dim=-1)
    images = F.normalize(torch.randn(2, 5, generator=generator, dtype=torch.float64), dim=-1)
    labels = torch.tensor([2, 0])
    off = (features - features.mean(0)) / 5**0.5  # divided by n + 1
    draws = torch.randn(20000, 4, 5, generator=generator, dtype=torch.float64)
    drawn = features.mean(0) + torch.einsum("snd,ncd->scd", draws, off)
    logits = 4.0 * torch.einsum("bd,scd->sbc", images, drawn)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.repeat(20000))
    plain = F.cross_entropy(4.0 * images @ features.mean(0).t(), labels)
    assert plain < expected < bound(Batch(images, labels, 4.0), features)


def test_likeness_is_of_different_prompts() -> None:
    own = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
    assert likeness(own).item() == pytest.approx(1 / 3)
    assert likeness(own).item() == pytest.approx(oracle.likeness(own).item())


@pytest.mark.parametrize("prompts", [2, 4, 6, 32])
def test_places(prompts: int) -> None:
    assert places(prompts) == [oracle.where(k, prompts) for k in range(prompts)]
    assert places(32).count("end") == 16
    assert places(32).count("front") == places(32).count("middle") == 8


def test_learning_equals_a_loop_of_plain_steps() -> None:
    """SGD written out, with the oracle's gradients; in two steps each of the four prompts has its turn."""
    tiny, config = small("vit", torch.float64), dataclasses.replace(SHORT.learn, lr=0.05, warmup_lr=0.1, seed=3)
    generator = torch.Generator().manual_seed(5)
    features = F.normalize(torch.randn(4, 2, tiny.spec.dimension, generator=generator), dim=-1)
    labels = torch.tensor([0, 1, 2, 3])
    files = RunFiles(None, "", True)
    found = learn(model(), NAMES, features, labels, files, dataclasses.replace(SHORT, learn=config)).double()

    drawn = torch.Generator().manual_seed(3)
    contexts = torch.stack([torch.empty(3, 32).normal_(0, 0.02, generator=drawn) for _ in range(4)]).double()
    start, momentum, seen = contexts.clone(), torch.zeros_like(contexts), []
    for epoch in range(2):
        order = torch.randperm(4, generator=torch.Generator().manual_seed(3 * 100_003 + epoch))
        turn = training_order(epoch)
        for number in range(2):
            pictures, chosen = order[2 * number : 2 * number + 2], turn[2 * number : 2 * number + 2]
            seen += chosen
            *_, gradient = oracle.step(
                tiny, NAMES, contexts, chosen, features[pictures, epoch].double(), labels[pictures],
                tiny.model.scale, SHORT.orthogonality,
            )  # fmt: skip
            momentum = 0.9 * momentum + gradient + 5e-4 * contexts
            contexts = contexts - learning_rate(epoch, config) * momentum
    assert sorted(seen[:4]) == sorted(seen[4:]) == [0, 1, 2, 3]
    assert relative(found, contexts) < 1e-4
    assert relative(found, start) > 0.1


def training_order(turn: int) -> list[int]:
    """The prompts of a turn, in order."""
    return random.Random(f"prompts 3 {turn}").sample(range(4), 4)


@pytest.mark.parametrize("kind", ["vit", "clipa"])
def test_the_classifier_is_the_mean_embedding(kind: str) -> None:
    """Whole and in chunks, of five classes and of two."""
    tiny = small(kind)
    contexts = contexts_of(tiny, 5)
    for names in (NAMES, NAMES[:2]):
        exact = small(kind, torch.float64)
        wanted = oracle.mean_embedding(exact, names, contexts.double())
        for chunk in (None, 2):
            found = mean_embedding(tiny.model, contexts, names, Settings(TrainConfig(chunk=chunk)))
            assert relative(found.weights, wanted) < 1e-5
            assert found.names == tuple(names)
    assert (found.weights.norm(dim=-1) < 0.999).all()


def test_a_long_list_is_learned_in_chunks_as_at_once() -> None:
    tiny = small("one-layer")
    names = names_of([1, 2, 1, 3, 2, 4, 1, 2, 3])
    features = F.normalize(torch.randn(9, 1, 24, generator=torch.Generator().manual_seed(0)), dim=-1)
    learned = []
    for chunk in (None, 8, 2):
        config = dataclasses.replace(SHORT.learn, chunk=chunk, warmup_lr=0.1, epochs=1)
        files = RunFiles(None, "", True)
        changed = dataclasses.replace(SHORT, learn=config)
        learned.append(learn(tiny.model, names, features, torch.arange(9), files, changed))
    assert all(relative(one, learned[0]) < 1e-4 for one in learned)


def test_it_is_learned_once_and_by_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = PRODA.fit(job(tmp_path), SHORT)(["cat", "dog"], "")
    assert isinstance(first, Classifier)
    first.save(tmp_path / "c")
    assert torch.equal(Classifier.load(tmp_path / "c").weights, first.weights)
    second = dataclasses.replace(SHORT, learn=dataclasses.replace(SHORT.learn, seed=2))
    other = PRODA.fit(job(tmp_path), second)
    assert not torch.equal(other(["cat", "dog"], "").weights, first.weights)  # type: ignore[attr-defined]
    monkeypatch.setattr("selftpt.methods.proda.train", None)
    again = PRODA.fit(job(tmp_path), SHORT)(["cat", "dog"], "")
    assert torch.equal(again.weights, first.weights)  # type: ignore[attr-defined]
    probabilities = again(F.normalize(torch.ones(3, 1, 24), dim=-1))
    assert probabilities.shape == (3, 2)
    assert torch.allclose(probabilities.sum(-1), torch.ones(3))


def test_killed_it_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PRODA.fit(job(tmp_path), SHORT)(["cat", "dog"], "")
    (learned,) = (tmp_path / "learned").glob("*.safetensors")
    log = [json.loads(line) for line in Path(f"{learned}.log.jsonl").read_text().splitlines()]
    assert all({"bound", "likeness"} <= line.keys() for line in log)
    learned.unlink()
    keep = RunFiles.keep

    def stop(self: RunFiles, *rest: Any) -> None:
        keep(self, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFiles, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        PRODA.fit(job(tmp_path), SHORT)
    monkeypatch.setattr(RunFiles, "keep", keep)
    asked = []
    batches = loop.batches
    monkeypatch.setattr(loop, "batches", lambda *a: asked.append(a[2]) or batches(*a))
    resumed = PRODA.fit(job(tmp_path), SHORT)(["cat", "dog"], "")
    assert asked == [0, 1], "the first epoch is done"  # 0: how many steps there are
    assert torch.equal(resumed.weights, whole.weights)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [{"prompts": 1}, {"prompts_per_step": 0}, {"prompts_per_step": 5}, {"orthogonality": -1.0},
     {"orthogonality": float("nan")}],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError):
        Settings(**wrong)


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    tiny = small("layerscale")  # 32 positions
    with pytest.raises(SelfTPTError, match=r"too long: 14 tokens, .* room for 13"):
        mean_embedding(tiny.model, contexts_of(tiny, 4, 16), [*NAMES, names_of([14])[0]], Settings())


def test_the_table_has_it() -> None:
    assert METHODS["proda"] is PRODA
    assert PRODA.learns
    assert PRODA.seeded(7).learn.seed == 7
