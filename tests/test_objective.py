"""What the stages descend equals double backward through the plain walk, whole and in chunks."""

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
    return LearnConfig(ce=s.ce, cpt=s.cpt, gm=s.gm, matching=s.matching, decay=s.decay, contrast=contrast_of(s))


def task_of(model: Small, names: list[str], length: int, s: Settings, chunk: int | None, stage: int = 1) -> Task:
    contrast, text = contrast_of(s), model.model.text
    tokens = tokenize(names, text.tokenizer, model.context)
    hand = encode_template(text, tokens, s.template, chunk) if "hand_crafted" in s.views else None
    views = [view for view in VIEWS if view in s.views or (stage == 1 and view == "end")]
    return Task(TextEncoder(text, tokens, length, views, chunk=chunk), hand, tokens.same, contrast)


def head_of(model: Small, seed: int = 0) -> Head:
    """A head with wide margins at the ReLU, and biases that matter."""
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
    """Some steps of stage 1, each from another prompt and with other images."""
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
        average = found.average
        yield found


def run_reference(
    model: Small, names: list[str], s: Settings, length: int = 4, steps: int = 1
) -> Iterator[reference.Joint]:
    """The same by the plain walk, with the model's own precision."""
    past: list[Tensor] = []
    for step in range(steps):
        images, labels, scale = batch_of(model, len(names), seed=step)
        prompt, head = random_prompt(model, length, seed=step), list(head_of(model, seed=step))
        wanted = reference.joint(model, names, prompt, head, images, labels, 1 / scale, past, s)
        past.append(wanted.by_ce)
        yield wanted


def errors_of(found: Step | reference.Joint, wanted: reference.Joint) -> dict[str, float]:
    """The relative error of every loss and every gradient; of the cosine, which may be near 0, the plain one."""
    errors = {
        name: abs(float(value) - wanted.losses[name].item()) / (1.0 if name == "cosine" else wanted.losses[name].item())
        for name, value in found.losses.items()
    }
    errors["by prompt"] = relative(found.prompt, wanted.prompt)
    errors["average"] = relative(found.average, wanted.average)
    for name, one, other in zip(Head._fields, found.head, wanted.head, strict=True):
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
    """Hold every loss and gradient to `bound` of the plain walk in float64.

    A gradient that is a small difference of large numbers is beyond float32 in any order of its sums: where the plain
    walk in the model's own precision misses `bound` / 5 itself, five times its error is allowed.
    """
    exact = list(run_reference(small(model.kind, torch.float64), names, s, length, steps))
    plainly = exact if model.embedding.dtype == torch.float64 else run_reference(model, names, s, length, steps)
    allowed = [
        {what: max(bound, 5 * error) for what, error in errors_of(found, wanted).items()}
        for found, wanted in zip(plainly, exact, strict=True)
    ]
    for chunk in chunks:
        for step, found in enumerate(run(model, names, s, length, steps, chunk)):
            assert set(found.losses) == ({"ce", "cpt", "gm", "cosine"} if s.cpt or s.gm else {"ce"})
            bad = {what: e for what, e in errors_of(found, exact[step]).items() if not e < allowed[step][what]}
            assert not bad, f"step {step}, chunk {chunk}"
            assert not any(t.requires_grad for t in (found.prompt, found.average, *found.head))


@pytest.mark.parametrize("kind", KINDS)
def test_joint_step_of_every_kind(kind: str) -> None:
    check(small(kind, torch.float64), NAMES, Settings(), 1e-9, length=3)


@pytest.mark.parametrize("length", range(1, 9))
def test_joint_step_of_every_length(length: int) -> None:
    """Prompts of one to eight vectors, and a name of 60 tokens among short ones."""
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
    "no hand": Settings(views=("end", "front", "middle")),
    "no middle": Settings(views=("end", "front", "hand_crafted")),
    "no front": Settings(views=("end", "middle", "hand_crafted")),
    "no end": Settings(views=("front", "middle", "hand_crafted")),
    "end, front": Settings(views=("end", "front")),
    "end, middle": Settings(views=("end", "middle")),
    "end, hand": Settings(views=("end", "hand_crafted")),
    "front, middle": Settings(views=("front", "middle")),
    "hand, front": Settings(views=("hand_crafted", "front")),
    "middle, hand": Settings(views=("middle", "hand_crafted")),
}


@pytest.mark.parametrize("which", SETTINGS)
def test_joint_step_with_settings(which: str) -> None:
    check(small("vit", torch.float64), NAMES, SETTINGS[which], 1e-9)


@pytest.mark.parametrize("which", ["mse", "ce, cpt", "no hand"])
@pytest.mark.parametrize("kind", ["mobileclip", "layerscale"])
def test_joint_step_of_other_kinds_with_settings(kind: str, which: str) -> None:
    check(small(kind, torch.float64), NAMES, SETTINGS[which], 1e-9, length=2)


@pytest.mark.parametrize("apart", [False, True])
def test_equal_names(apart: bool) -> None:
    model = small("vit", torch.float64)
    check(model, EQUAL, Settings(duplicates_as_negatives=apart), 1e-9)
    losses = [
        next(run(model, EQUAL, Settings(duplicates_as_negatives=each))).losses["cpt"] for each in (apart, not apart)
    ]
    assert abs(losses[0] - losses[1]) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind: str) -> None:
    check(small(kind), NAMES, Settings(gm=0), 1e-5)
    check(small(kind), NAMES, Settings(), 1e-5)


def test_average_over_many_steps() -> None:
    """Eq. 11 by its sum, over steps that each have another gradient."""
    model, s = small("one-layer", torch.float64), Settings(cpt=0, gm=0, decay=0.7)
    check(model, NAMES[:3], s, 1e-9, steps=6)


@pytest.mark.parametrize("chunk", [1, 3, 4])
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_any_chunk(kind: str, chunk: int) -> None:
    check(small(kind, torch.float64), EQUAL, Settings(matching="mse"), 1e-9, chunks=(chunk,), steps=1)


@pytest.mark.parametrize("kind", KINDS)
def test_contrast_step(kind: str) -> None:
    model = small(kind, torch.float64)
    head = head_of(model)
    for s in (Settings(), Settings(views=("front", "hand_crafted"), reduction="sum")):
        p = random_prompt(model, 3).requires_grad_()
        wanted = reference.contrast_loss(model, EQUAL, p, head, s)
        (by_prompt,) = torch.autograd.grad(wanted, p)
        for chunk in (None, 2):
            loss, found = contrast_step(task_of(model, EQUAL, 3, s, chunk, stage=2), p.detach(), head)
            assert loss == pytest.approx(wanted.item(), rel=1e-9)
            assert relative(found, by_prompt) < 1e-9


@pytest.mark.parametrize("kind", ["vit", "siglip"])
def test_contrast_step_in_float32(kind: str) -> None:
    model, exact = small(kind), small(kind, torch.float64)
    head, s = head_of(model), Settings()
    p = random_prompt(model, 4).double().requires_grad_()
    wanted = reference.contrast_loss(exact, NAMES, p, [t.double() for t in head], s)
    (by_prompt,) = torch.autograd.grad(wanted, p)
    for chunk in (None, 2):
        loss, found = contrast_step(task_of(model, NAMES, 4, s, chunk, stage=2), p.detach().float(), head)
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
        assert relative(found, by_prompt) < 1e-5


@pytest.mark.parametrize("chunk", [None, 6])
def test_similarities_in_blocks_of_rows(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list so long that CPT takes its similarities in blocks has the same steps, second derivative and all."""
    model = small("one-layer", torch.float64)
    names = [*WORDS[:20], "Cat"]
    task = task_of(model, names, 4, Settings(), chunk)
    prompt, head = random_prompt(model, 4), head_of(model)
    loss, by_prompt = contrast_step(task, prompt, head)
    (step,) = run(model, names, Settings(), chunk=chunk)

    blocks: list[int] = []
    softmax = losses._softmax
    monkeypatch.setattr(objective, "cpt", functools.partial(cpt, held=1))
    monkeypatch.setattr(losses, "_softmax", lambda block, t: (blocks.append(len(block)), softmax(block, t))[1])
    again, gradient = contrast_step(task, prompt, head)
    (other,) = run(model, names, Settings(), chunk=chunk)
    assert len(blocks) >= 8
    assert set(blocks) == {64, 20}
    assert again == pytest.approx(loss, rel=1e-9)
    assert relative(gradient, by_prompt) < 1e-9
    assert relative(other.prompt, step.prompt) < 1e-9
    for one, wanted in zip(other.head, step.head, strict=True):
        assert relative(one, wanted) < 1e-9


@pytest.mark.parametrize("matching", ["cosine", "mse"])
@pytest.mark.parametrize(("kind", "chunk"), [("vit", None), ("vit", 2), ("vit-quickgelu", None), ("mobileclip", 2)])
def test_finite_differences(kind: str, chunk: int | None, matching: str) -> None:
    """With an average that a step does not move, the gradient is that of the sum of the losses reported."""
    model = small(kind, torch.float64)
    s = Settings(matching=matching, reduction="sum", decay=1 - 1e-12, gm=20.0)
    task, config, batch = task_of(model, NAMES, 4, s, chunk), config_of(s), batch_of(model, len(NAMES))
    average = random_prompt(model, 4, seed=7)
    prompt, head = random_prompt(model, 4), head_of(model)
    generator = torch.Generator().manual_seed(5)
    towards = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (prompt, *head)]

    def at(move: float) -> tuple[Step, Tensor]:
        p, *h = (t + move * d for t, d in zip((prompt, *head), towards, strict=True))
        step = joint_step(task, p, Head(*h), batch, average, config)
        return step, (task.encoder(p) @ h[0].t() + h[1]) > 0

    step, pattern = at(0.0)
    (after, one), (before, other) = at(1e-5), at(-1e-5)
    assert torch.equal(one, pattern)  # no ReLU turns in between, so the losses are smooth there
    assert torch.equal(other, pattern)
    weights = {"ce": s.ce, "cpt": s.cpt, "gm": s.gm}
    slope = sum(w * (after.losses[name] - before.losses[name]) for name, w in weights.items()) / 2e-5
    wanted = sum((g * d).sum().item() for g, d in zip((step.prompt, *step.head), towards, strict=True))
    assert slope == pytest.approx(wanted, rel=1e-6)
    without = joint_step(task, prompt, head, batch, average, config_of(replace(s, gm=0.0)))
    assert relative(without.prompt, step.prompt) > 1e-2  # gradient matching has its part in it


@pytest.mark.parametrize("chunk", [None, 2])
def test_inputs_are_left_as_they_were(chunk: int | None) -> None:
    model = small("vit", torch.float64)
    task = task_of(model, NAMES, 4, Settings(), chunk)
    prompt, head, average = random_prompt(model, 4), head_of(model), random_prompt(model, 4, seed=1)
    kept = [t.clone() for t in (prompt, average, *head)]
    joint_step(task, prompt, head, batch_of(model, len(NAMES)), average, config_of(Settings()))
    contrast_step(task, prompt, head)
    for tensor, was in zip((prompt, average, *head), kept, strict=True):
        assert torch.equal(tensor, was)
        assert tensor.grad is None
        assert not tensor.requires_grad
