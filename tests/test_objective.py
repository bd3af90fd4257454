"""Losses and gradients of both stages equal double backward through the reference text encoder, with any chunk size."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from selftpt import losses, objective
from selftpt.config import VIEWS, ContrastConfig, LearnConfig
from selftpt.losses import Head, cpt
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import tokenize
from selftpt.objective import Batch, Step, Task, contrast_step, joint_step
from tests.helpers.models import KINDS, WORDS, Small, name_of, random_prompt, relative, small
from tests.oracle import reference
from tests.oracle.reference import Settings

NAMES = ["cat", "red kite", "blue bird in the rain", "dog", "boat on the lake"]
EQUAL = ["cat", "red kite", "Cat", "dog", "Red  Kite"]
SCALE = 20.0


def contrast_of(s: Settings) -> ContrastConfig:
    return ContrastConfig(s.views, s.template, s.temperature, s.reduction, s.normalize, s.duplicates_as_negatives)


def config_of(s: Settings) -> LearnConfig:
    weights = {"ce": s.ce, "cpt": s.cpt, "gm": s.gm}
    guard = {"guard": s.guard, "guard_ratio": s.guard_ratio}
    return LearnConfig(**weights, **guard, matching=s.matching, decay=s.decay, contrast=contrast_of(s))


def task_of(model: Small, names: list[str], length: int, s: Settings, chunk: int | None, stage: int = 1) -> Task:
    contrast, text = contrast_of(s), model.model.text
    tokens = tokenize(names, text.tokenizer, model.context)
    hand_crafted = encode_template(text, tokens, s.template, chunk) if "hand_crafted" in s.views else None
    views = [view for view in VIEWS if view in s.views or (stage == 1 and view == "end")]
    return Task(TextEncoder(text, tokens, length, views, chunk=chunk), hand_crafted, tokens.name_ids, contrast)


def head_of(model: Small, seed: int = 0) -> Head:
    """Return a head with pre-activations far from 0 and biases that affect the result."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(8, model.spec.dimension), (8,), (6, 8), (6,)]
    return Head(*((0.5 * torch.randn(s, generator=generator)).to(model.embedding.dtype) for s in shapes))


def batch_of(model: Small, classes: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(3, model.spec.dimension, generator=generator).to(model.embedding.dtype)
    labels = torch.randint(classes, (3,), generator=generator)
    return Batch(torch.nn.functional.normalize(images, dim=-1), labels, SCALE)


def run(
    model: Small, names: list[str], s: Settings, length: int = 4, steps: int = 1, chunk: int | None = None
) -> Iterator[Step]:
    """Yield steps of stage 1, each with another prompt and other images."""
    task, average = task_of(model, names, length, s, chunk), None
    for step in range(steps):
        found = joint_step(
            task,
            random_prompt(model, length, seed=step),
            head_of(model, seed=step),
            batch_of(model, len(names), seed=step),
            average,
            config_of(s),
        )
        average = found.average_gradient
        yield found


def run_reference(
    model: Small, names: list[str], s: Settings, length: int = 4, steps: int = 1
) -> Iterator[reference.Joint]:
    """Yield the same steps of the reference implementation, in the model's own precision."""
    past: list[Tensor] = []
    for step in range(steps):
        images, labels, scale = batch_of(model, len(names), seed=step)
        prompt, head = random_prompt(model, length, seed=step), list(head_of(model, seed=step))
        expected = reference.joint(model, names, prompt, head, images, labels, 1 / scale, past, s)
        past.append(expected.by_ce)
        yield expected


def errors_of(found: Step | reference.Joint, expected: reference.Joint) -> dict[str, float]:
    """Return the relative error of every loss and gradient; of the cosine, which may be near 0, the absolute error."""
    errors = {
        name: abs(float(value) - expected.losses[name].item())
        / (1.0 if name == "cosine" else expected.losses[name].item() or 1.0)
        for name, value in found.losses.items()
    }
    errors["by prompt"] = relative(found.prompt_gradient, expected.prompt_gradient)
    errors["average"] = relative(found.average_gradient, expected.average_gradient)
    for name, one, other in zip(Head._fields, found.head_gradients, expected.head_gradients, strict=True):
        errors[f"by {name}"] = relative(one, other)
    return errors


def check(
    model: Small,
    names: list[str],
    s: Settings,
    bound: float,
    chunks: tuple[int | None, ...] = (None, 2),
    length: int = 4,
    steps: int = 2,
) -> None:
    """Check that every loss and gradient is within `bound` of the reference in float64.

    Float32 cannot represent a gradient that is a small difference of large numbers. Where the error of the reference in
    the model's own precision exceeds `bound` / 5, five times that error is allowed.
    """
    exact = list(run_reference(small(model.kind, torch.float64), names, s, length, steps))
    same_precision = exact if model.embedding.dtype == torch.float64 else run_reference(model, names, s, length, steps)
    allowed = [
        {what: max(bound, 5 * error) for what, error in errors_of(found, expected).items()}
        for found, expected in zip(same_precision, exact, strict=True)
    ]
    for chunk in chunks:
        for step, found in enumerate(run(model, names, s, length, steps, chunk)):
            names_of_norms = {"grad_ce", "grad_cpt"} | ({"grad_gm"} if s.gm else set())
            logged = {"ce", "cpt", "gm", "cosine"} | names_of_norms if s.cpt or s.gm else {"ce", "grad_ce"}
            assert set(found.losses) == logged
            bad = {what: e for what, e in errors_of(found, exact[step]).items() if not e < allowed[step][what]}
            assert not bad, f"step {step}, chunk {chunk}"
            assert not any(
                t.requires_grad for t in (found.prompt_gradient, found.average_gradient, *found.head_gradients)
            )


@pytest.mark.parametrize("kind", KINDS)
def test_joint_step_of_every_architecture_equals_reference(kind: str) -> None:
    check(small(kind, torch.float64), NAMES, Settings(), 1e-9, length=3)


@pytest.mark.parametrize("length", range(1, 9))
def test_joint_step_of_every_prompt_length_equals_reference(length: int) -> None:
    """Prompts have one to eight vectors, and one of the names has 60 tokens."""
    check(small("vit", torch.float64), [*NAMES, name_of(60)], Settings(), 1e-9, length=length)


SETTINGS = {
    "paper": Settings(),
    "no average": Settings(decay=0.0),
    "mse": Settings(matching="mse"),
    "mse, no average": Settings(matching="mse", decay=0.0),
    "sum": Settings(reduction="sum"),
    "mse, sum": Settings(matching="mse", reduction="sum"),
    "ce": Settings(cpt=0, gm=0),
    "ce, cpt": Settings(gm=0),
    "ce, gm": Settings(cpt=0),
    "cpt": Settings(ce=0, gm=0),
    "gm": Settings(ce=0, cpt=0),
    "weighted": Settings(ce=0.5, cpt=2.0, gm=3.0, decay=0.5),
    "weighted, mse": Settings(ce=0.5, cpt=2.0, gm=30.0, matching="mse"),
    "warm": Settings(temperature=0.5),
    "not normalized": Settings(normalize=False, temperature=1.0),
    "other template": Settings(template="{} in the snow"),
    "no hand_crafted": Settings(views=("end", "front", "middle")),
    "no middle": Settings(views=("end", "front", "hand_crafted")),
    "no front": Settings(views=("end", "middle", "hand_crafted")),
    "no end": Settings(views=("front", "middle", "hand_crafted")),
    "end, front": Settings(views=("end", "front")),
    "end, middle": Settings(views=("end", "middle")),
    "end, hand_crafted": Settings(views=("end", "hand_crafted")),
    "front, middle": Settings(views=("front", "middle")),
    "hand_crafted, front": Settings(views=("hand_crafted", "front")),
    "middle, hand_crafted": Settings(views=("middle", "hand_crafted")),
    "floor, active": Settings(guard="floor", guard_ratio=1e3),
    "floor, not active": Settings(guard="floor", guard_ratio=1e-9),
    "limit, active": Settings(guard="limit", guard_ratio=0.01, cpt=2.0),
    "limit, not active": Settings(guard="limit", guard_ratio=1e9),
    "limit, mse": Settings(guard="limit", guard_ratio=1e-6, matching="mse"),
    "normalize": Settings(guard="normalize", cpt=0.5, gm=2.0),
    "normalize, no gm": Settings(guard="normalize", gm=0.0),
    "gate, closed": Settings(guard="gate", guard_ratio=1e3),
    "gate, open": Settings(guard="gate", guard_ratio=1e-9),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_joint_step_with_all_settings_equals_reference(setting: str) -> None:
    check(small("vit", torch.float64), NAMES, SETTINGS[setting], 1e-9)


@pytest.mark.parametrize("setting", ["mse", "ce, cpt", "no hand_crafted"])
@pytest.mark.parametrize("kind", ["mobileclip", "layerscale"])
def test_joint_step_of_other_architectures_with_settings_equals_reference(kind: str, setting: str) -> None:
    check(small(kind, torch.float64), NAMES, SETTINGS[setting], 1e-9, length=2)


@pytest.mark.parametrize("duplicates_as_negatives", [False, True])
def test_joint_step_with_duplicate_names_equals_reference(duplicates_as_negatives: bool) -> None:
    model = small("vit", torch.float64)
    check(model, EQUAL, Settings(duplicates_as_negatives=duplicates_as_negatives), 1e-9)
    losses = [
        next(run(model, EQUAL, Settings(duplicates_as_negatives=each))).losses["cpt"]
        for each in (duplicates_as_negatives, not duplicates_as_negatives)
    ]
    assert abs(losses[0] - losses[1]) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_joint_step_in_float32_equals_reference(kind: str) -> None:
    check(small(kind), NAMES, Settings(gm=0), 1e-5)
    check(small(kind), NAMES, Settings(), 1e-5)


def test_moving_average_over_many_steps_equals_the_explicit_sum() -> None:
    """Every step has another gradient; the reference computes Eq. 11 as a sum."""
    model, s = small("one-layer", torch.float64), Settings(cpt=0, gm=0, decay=0.7)
    check(model, NAMES[:3], s, 1e-9, steps=6)


@pytest.mark.parametrize("chunk", [1, 3, 4])
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_joint_step_with_any_chunk_size_equals_reference(kind: str, chunk: int) -> None:
    check(small(kind, torch.float64), EQUAL, Settings(matching="mse"), 1e-9, chunks=(chunk,), steps=1)


@pytest.mark.parametrize("kind", KINDS)
def test_contrast_step_equals_reference(kind: str) -> None:
    model = small(kind, torch.float64)
    head = head_of(model)
    for s in (Settings(), Settings(views=("front", "hand_crafted"), reduction="sum")):
        p = random_prompt(model, 3).requires_grad_()
        expected = reference.contrast_loss(model, EQUAL, p, head, s)
        (by_prompt,) = torch.autograd.grad(expected, p)
        for chunk in (None, 2):
            loss, found = contrast_step(task_of(model, EQUAL, 3, s, chunk, stage=2), p.detach(), head)
            assert loss == pytest.approx(expected.item(), rel=1e-9)
            assert relative(found, by_prompt) < 1e-9


@pytest.mark.parametrize("kind", ["vit", "siglip"])
def test_contrast_step_in_float32_is_close_to_float64(kind: str) -> None:
    model, exact = small(kind), small(kind, torch.float64)
    head, s = head_of(model), Settings()
    p = random_prompt(model, 4).double().requires_grad_()
    expected = reference.contrast_loss(exact, NAMES, p, [t.double() for t in head], s)
    (by_prompt,) = torch.autograd.grad(expected, p)
    for chunk in (None, 2):
        loss, found = contrast_step(task_of(model, NAMES, 4, s, chunk, stage=2), p.detach().float(), head)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert relative(found, by_prompt) < 1e-5


@pytest.mark.parametrize("chunk", [None, 6])
def test_steps_with_similarities_in_blocks_equal_one_block(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPT computes the similarities of long class lists in blocks; steps of both stages do not change."""
    model = small("one-layer", torch.float64)
    names = [*WORDS[:20], "Cat"]
    task = task_of(model, names, 4, Settings(), chunk)
    prompt, head = random_prompt(model, 4), head_of(model)
    loss, by_prompt = contrast_step(task, prompt, head)
    (step,) = run(model, names, Settings(), chunk=chunk)

    blocks: list[int] = []
    softmax = losses._softmax
    monkeypatch.setattr(objective, "cpt", functools.partial(cpt, max_similarities=1))
    monkeypatch.setattr(losses, "_softmax", lambda block, t: (blocks.append(len(block)), softmax(block, t))[1])
    again, gradient = contrast_step(task, prompt, head)
    (other,) = run(model, names, Settings(), chunk=chunk)
    assert len(blocks) >= 8
    assert set(blocks) == {64, 20}
    assert again == pytest.approx(loss, rel=1e-9)
    assert relative(gradient, by_prompt) < 1e-9
    assert relative(other.prompt_gradient, step.prompt_gradient) < 1e-9
    for one, expected in zip(other.head_gradients, step.head_gradients, strict=True):
        assert relative(one, expected) < 1e-9


@pytest.mark.parametrize("matching", ["cosine", "mse"])
@pytest.mark.parametrize(("kind", "chunk"), [("vit", None), ("vit", 2), ("vit-quickgelu", None), ("mobileclip", 2)])
def test_gradient_equals_finite_differences_of_the_losses(kind: str, chunk: int | None, matching: str) -> None:
    """The decay is so close to 1 that the step does not change the average, so the losses are ordinary functions."""
    model = small(kind, torch.float64)
    s = Settings(matching=matching, reduction="sum", decay=1 - 1e-12, gm=20.0)
    task, config, batch = task_of(model, NAMES, 4, s, chunk), config_of(s), batch_of(model, len(NAMES))
    average = random_prompt(model, 4, seed=7)
    prompt, head = random_prompt(model, 4), head_of(model)
    generator = torch.Generator().manual_seed(5)
    direction = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (prompt, *head)]

    def at(move: float) -> tuple[Step, Tensor]:
        p, *h = (t + move * d for t, d in zip((prompt, *head), direction, strict=True))
        step = joint_step(task, p, Head(*h), batch, average, config)
        return step, (task.encoder(p) @ h[0].t() + h[1]) > 0

    step, pattern = at(0.0)
    (after, one), (before, other) = at(1e-5), at(-1e-5)
    assert torch.equal(one, pattern)  # no ReLU changes sign in between, so the losses are smooth
    assert torch.equal(other, pattern)
    weights = {"ce": s.ce, "cpt": s.cpt, "gm": s.gm}
    slope = sum(w * (after.losses[name] - before.losses[name]) for name, w in weights.items()) / 2e-5
    expected = sum(
        (g * d).sum().item() for g, d in zip((step.prompt_gradient, *step.head_gradients), direction, strict=True)
    )
    assert slope == pytest.approx(expected, rel=1e-6)
    without = joint_step(task, prompt, head, batch, average, config_of(replace(s, gm=0.0)))
    assert relative(without.prompt_gradient, step.prompt_gradient) > 1e-2  # gradient matching contributes


@pytest.mark.parametrize("chunk", [None, 2])
def test_steps_do_not_change_their_inputs(chunk: int | None) -> None:
    model = small("vit", torch.float64)
    task = task_of(model, NAMES, 4, Settings(), chunk)
    prompt, head, average = random_prompt(model, 4), head_of(model), random_prompt(model, 4, seed=1)
    kept = [t.clone() for t in (prompt, average, *head)]
    joint_step(task, prompt, head, batch_of(model, len(NAMES)), average, config_of(Settings()))
    contrast_step(task, prompt, head)
    for tensor, before in zip((prompt, average, *head), kept, strict=True):
        assert torch.equal(tensor, before)
        assert tensor.grad is None
        assert not tensor.requires_grad
