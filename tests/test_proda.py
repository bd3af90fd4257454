"""ProDA equals a slow reference, and is learned once per seed."""

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
from selftpt.data.sources import Source
from selftpt.methods import METHODS, FitContext
from selftpt.methods.proda import PRODA, ProdaConfig, Task, bound, likeness, mean_embedding, places, step
from selftpt.models.tokenizer import tokenize
from selftpt.objective import Batch
from selftpt.training import RunFiles, learning_rate, loop
from tests.helpers.methods import check_method, make_context
from tests.helpers.models import Small, names_of, relative, small
from tests.oracle import proda as oracle

NAMES = ["cat", "red kite", "blue bird in the rain", "dog", "boat etc."]  # CLIP joins both full stops of the last name
SHORT = ProdaConfig(TrainConfig(length=3, words="", epochs=2, batch=2), prompts=4, prompts_per_step=2)
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


def learn(tiny: Small, features: Tensor, labels: Tensor, names: list[str], config: ProdaConfig) -> Tensor:
    """Return the contexts [K, M, d] learned from features [N, crops, D] in memory."""
    context = FitContext(tiny.model, Source.from_features(features, labels.tolist(), names))
    return PRODA.fit(context, config).tensors["contexts"]


def classifier(context: FitContext, config: ProdaConfig = SHORT) -> Classifier:
    found = PRODA.fit(context, config).for_classes(["cat", "dog"], "").classifier
    assert found is not None
    return found


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", ["vit", "layerscale", "worldwide", "siglip", "coca"])
def test_step_equals_the_reference(kind: str, chunk: int | None) -> None:
    tiny = small(kind, torch.float64)
    contexts, batch = contexts_of(tiny), batch_of(tiny, len(NAMES))
    chosen = [5, 0, 4]  # prompts with the name in front, at the end, in the middle
    found, gradient = step(task_of(tiny, NAMES, chunk), contexts, chosen, batch, 0.7)
    surrogate, alike, expected = oracle.step(tiny, NAMES, contexts, chosen, *batch, 0.7)
    assert found == {"bound": pytest.approx(surrogate.item()), "likeness": pytest.approx(alike.item())}
    assert relative(gradient, expected) < 1e-9
    assert gradient[1].norm() > 0  # the orthogonality loss also moves prompts that are not chosen
    assert not contexts.requires_grad


def test_without_orthogonality_only_the_chosen_prompts_move() -> None:
    tiny = small("vit", torch.float64)
    losses, gradient = step(task_of(tiny, NAMES, None), contexts_of(tiny), [1, 4], batch_of(tiny, 5), 0.0)
    assert set(losses) == {"bound"}
    assert gradient.flatten(1).norm(dim=1).nonzero().flatten().tolist() == [1, 4]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(2, 6), st.integers(1, 7), st.integers(1, 4), st.integers(0, 1000))
def test_bound_equals_its_formula_and_exceeds_the_loss_of_the_mean(
    prompts: int, classes: int, dimension: int, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(prompts, classes, dimension, generator=generator, dtype=torch.float64)
    images = F.normalize(torch.randn(count, dimension, generator=generator, dtype=torch.float64), dim=-1)
    labels = torch.randint(classes, (count,), generator=generator)
    found = bound(Batch(images, labels, 3.0), features)
    unit = [[oracle.unit(w) for w in prompt] for prompt in features]
    assert found.item() == pytest.approx(oracle.bound(images, labels, unit, 3.0).item())
    mean = F.normalize(features, dim=-1).mean(0)
    assert found >= F.cross_entropy(3.0 * images @ mean.t(), labels) - 1e-12


def test_bound_exceeds_the_expected_cross_entropy() -> None:
    """Class embeddings are drawn from the Gaussian, each coordinate independently."""
    generator = torch.Generator().manual_seed(0)
    features = F.normalize(torch.randn(4, 3, 5, generator=generator, dtype=torch.float64), dim=-1)
    images = F.normalize(torch.randn(2, 5, generator=generator, dtype=torch.float64), dim=-1)
    labels = torch.tensor([2, 0])
    off = (features - features.mean(0)) / 5**0.5  # the variance is divided by n + 1
    draws = torch.randn(20000, 4, 5, generator=generator, dtype=torch.float64)
    drawn = features.mean(0) + torch.einsum("snd,ncd->scd", draws, off)
    logits = 4.0 * torch.einsum("bd,scd->sbc", images, drawn)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.repeat(20000))
    plain = F.cross_entropy(4.0 * images @ features.mean(0).t(), labels)
    assert plain < expected < bound(Batch(images, labels, 4.0), features)


def test_likeness_is_the_mean_over_different_prompts() -> None:
    own = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
    assert likeness(own).item() == pytest.approx(1 / 3)
    assert likeness(own).item() == pytest.approx(oracle.likeness(own).item())


@pytest.mark.parametrize("prompts", [2, 4, 6, 32])
def test_half_of_the_prompts_have_the_name_at_the_end(prompts: int) -> None:
    assert places(prompts) == [oracle.name_position(k, prompts) for k in range(prompts)]
    assert places(32).count("end") == 16
    assert places(32).count("front") == places(32).count("middle") == 8


def test_training_equals_plain_steps() -> None:
    """The reference is SGD with the oracle's gradients. In two steps, each of the four prompts is used once."""
    tiny, config = small("vit", torch.float64), dataclasses.replace(SHORT.learn, lr=0.05, warmup_lr=0.1, seed=3)
    generator = torch.Generator().manual_seed(5)
    features = F.normalize(torch.randn(5, 2, tiny.spec.dimension, generator=generator), dim=-1)
    labels = torch.tensor([0, 1, 2, 3, 4])
    found = learn(small("vit"), features, labels, NAMES, dataclasses.replace(SHORT, learn=config)).double()

    drawn = torch.Generator().manual_seed(3)
    contexts = torch.stack([torch.empty(3, 32).normal_(0, 0.02, generator=drawn) for _ in range(4)]).double()
    start, momentum, used = contexts.clone(), torch.zeros_like(contexts), []
    for epoch in range(2):
        order = torch.randperm(5, generator=torch.Generator().manual_seed(3 * 100_003 + epoch))
        turn = random.Random(f"prompts 3 {epoch}").sample(range(4), 4)
        for number in range(2):
            batch, chosen = order[2 * number : 2 * number + 2], turn[2 * number : 2 * number + 2]
            used += chosen
            *_, gradient = oracle.step(
                tiny, NAMES, contexts, chosen, features[batch, epoch].double(), labels[batch],
                tiny.model.scale, SHORT.orthogonality,
            )  # fmt: skip
            momentum = 0.9 * momentum + gradient + 5e-4 * contexts
            contexts = contexts - learning_rate(epoch, config) * momentum
    assert sorted(used[:4]) == sorted(used[4:]) == [0, 1, 2, 3]
    assert relative(found, contexts) < 1e-4
    assert relative(found, start) > 0.1


@pytest.mark.parametrize("kind", ["vit", "clipa"])
def test_classifier_is_the_mean_embedding(kind: str) -> None:
    """With and without chunks, for five and for two classes."""
    tiny = small(kind)
    contexts = contexts_of(tiny, 5)
    for names in (NAMES, NAMES[:2]):
        exact = small(kind, torch.float64)
        expected = oracle.mean_embedding(exact, names, contexts.double())
        for chunk in (None, 2):
            found = mean_embedding(tiny.model, contexts, names, ProdaConfig(TrainConfig(chunk=chunk)))
            assert relative(found.weights, expected) < 1e-5
            assert found.names == tuple(names)
    assert (found.weights.norm(dim=-1) < 0.999).all()


def test_chunked_training_equals_unchunked() -> None:
    names = names_of([1, 2, 1, 3, 2, 4, 1, 2, 3])
    features = F.normalize(torch.randn(9, 1, 24, generator=torch.Generator().manual_seed(0)), dim=-1)
    learned = []
    for chunk in (None, 8, 2):
        config = dataclasses.replace(SHORT.learn, chunk=chunk, warmup_lr=0.1, epochs=1)
        changed = dataclasses.replace(SHORT, learn=config)
        learned.append(learn(small("one-layer"), features, torch.arange(9), names, changed))
    assert all(relative(one, learned[0]) < 1e-4 for one in learned)


def test_determinism_resuming_reuse_chunking_and_single_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_method(PRODA, SHORT, tmp_path, monkeypatch)


def test_prompts_are_learned_once_per_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = classifier(make_context(tmp_path))
    first.save(tmp_path / "c")
    assert torch.equal(Classifier.load(tmp_path / "c").weights, first.weights)
    second = dataclasses.replace(SHORT, learn=dataclasses.replace(SHORT.learn, seed=2))
    assert not torch.equal(classifier(make_context(tmp_path), second).weights, first.weights)
    monkeypatch.setattr(FitContext, "features", None)  # training would call it
    again = classifier(make_context(tmp_path))
    assert torch.equal(again.weights, first.weights)
    probabilities = again(F.normalize(torch.ones(3, 1, 24), dim=-1))
    assert probabilities.shape == (3, 2)
    assert torch.allclose(probabilities.sum(-1), torch.ones(3))


def test_interrupted_training_resumes_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = classifier(make_context(tmp_path))
    (learned,) = (tmp_path / "out").glob("*.safetensors")
    log = [json.loads(line) for line in Path(f"{learned}.log.jsonl").read_text().splitlines()]
    assert all({"bound", "likeness"} <= line.keys() for line in log)
    learned.unlink()
    keep = RunFiles.keep

    def stop(self: RunFiles, *rest: Any) -> None:
        keep(self, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFiles, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        PRODA.fit(make_context(tmp_path), SHORT)
    monkeypatch.setattr(RunFiles, "keep", keep)
    epochs = []
    batches = loop.batches
    monkeypatch.setattr(loop, "batches", lambda *a: epochs.append(a[2]) or batches(*a))
    resumed = classifier(make_context(tmp_path))
    assert epochs == [0, 1], "the first epoch is done"  # 0: how many steps there are
    assert torch.equal(resumed.weights, whole.weights)


@pytest.mark.parametrize(
    "wrong",
    [{"prompts": 1}, {"prompts": 4.5}, {"orthogonality": -1.0}, {"orthogonality": float("nan")},
     {"orthogonality": "much"}, {"prompts_per_step": 0}],
)  # fmt: skip
def test_invalid_configuration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match=f"ProdaConfig.{next(iter(wrong))} must be"):
        ProdaConfig(**wrong)


def test_prompts_per_step_must_divide_the_number_of_prompts() -> None:
    with pytest.raises(SelfTPTError, match="prompts_per_step must be a divisor of prompts, 32, but is 5"):
        ProdaConfig(prompts_per_step=5)


def test_prompt_that_is_too_long_for_the_names_is_refused() -> None:
    tiny = small("layerscale")  # context length 32
    with pytest.raises(SelfTPTError, match=r"too long: it has 14 tokens, .* accepts 13"):
        mean_embedding(tiny.model, contexts_of(tiny, 4, 16), [*NAMES, names_of([14])[0]], ProdaConfig())


def test_method_is_registered() -> None:
    assert METHODS["proda"] is PRODA
    assert PRODA.needs_labels
    assert PRODA.seeded(7).learn.seed == 7
    assert PRODA.cost(PRODA.config) == "1 view"
