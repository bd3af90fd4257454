"""Stage 2: class names in, a classifier out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from selftpt import AdaptConfig, Prompt, SelfTPTError, SelfTPTWarning, adapt
from selftpt.config import VIEWS, ContrastConfig
from selftpt.prompt import initial_head
from tests.oracle import plain
from tests.small import model, random_prompt, small

NAMES = ("red fox", "blue_whale", "kite", "old man of the sea", "kite (bird of prey)")


def prompt(kind: str = "vit", contrast: ContrastConfig | None = None, length: int = 4) -> Prompt:
    head = initial_head(model(kind).dimension, 24, 12, torch.Generator().manual_seed(3))
    context = random_prompt(small(kind), length)
    return Prompt(context, head, contrast or ContrastConfig(), model(kind).id)


@pytest.mark.parametrize("kind", ["vit", "mobileclip"])
def test_adapting_equals_a_loop_of_plain_steps(kind: str) -> None:
    learned = prompt(kind)
    found = adapt(model(kind), learned, NAMES, AdaptConfig(steps=3, lr=0.5))
    exact = small(kind, torch.float64)
    clean = [name.replace("_", " ") for name in NAMES]
    context, head = learned.context.double(), [t.double() for t in learned.head]
    for _ in range(3):
        p = context.clone().requires_grad_()
        loss = plain.contrast_loss(exact, clean, p, head, plain.Settings())
        context = context - 0.5 * torch.autograd.grad(loss, p)[0]
    wanted = F.normalize(plain.encode(exact, "end", clean, context), dim=-1)
    assert (found.weights - wanted).norm() <= 1e-4 * wanted.norm()
    assert not torch.allclose(
        found.weights, adapt(model(kind), learned, NAMES, AdaptConfig(steps=0)).weights, atol=1e-4
    )
    assert found.names == tuple(clean)
    assert found.scale == model(kind).scale


def test_the_mean_of_the_learned_views_can_be_the_class_vectors() -> None:
    learned = prompt()
    found = adapt(model(), learned, NAMES, AdaptConfig(steps=0, vectors="mean")).weights
    clean = [name.replace("_", " ") for name in NAMES]
    views = [F.normalize(plain.encode(small("vit"), view, clean, learned.context), dim=-1) for view in VIEWS]
    assert torch.allclose(found, F.normalize(sum(views), dim=-1), atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("views", [("end", "hand"), ("front", "middle"), ("end", "front", "middle")])
def test_adapting_follows_the_views_of_the_prompt(views: tuple[str, ...]) -> None:
    some = adapt(model(), prompt(contrast=ContrastConfig(views=views)), NAMES)  # type: ignore[arg-type]
    assert not torch.allclose(some.weights, adapt(model(), prompt(), NAMES).weights, atol=1e-6)


@pytest.mark.parametrize("kind", ["vit", "mobileclip"])
def test_a_chunked_list_gives_the_same_classifier(kind: str) -> None:
    whole = adapt(model(kind), prompt(kind), NAMES, AdaptConfig(chunk=None))
    assert torch.allclose(
        adapt(model(kind), prompt(kind), NAMES, AdaptConfig(chunk=2)).weights, whole.weights, atol=1e-5
    )


def test_neither_model_nor_prompt_changes() -> None:
    learned, clip = prompt(), small("vit").clip
    before = {name: tensor.clone() for name, tensor in clip.state_dict().items()}
    kept = learned.digest
    first = adapt(model(), learned, NAMES)
    assert learned.digest == kept
    assert all(torch.equal(tensor, before[name]) for name, tensor in clip.state_dict().items())
    assert torch.equal(adapt(model(), learned, NAMES).weights, first.weights)


def test_too_few_names_are_refused_and_equal_ones_told_of() -> None:
    with pytest.raises(SelfTPTError, match="no class names"):
        adapt(model(), prompt(), [])
    with pytest.raises(SelfTPTError, match="not the string 'cat'"):
        adapt(model(), prompt(), "cat")
    with pytest.raises(SelfTPTError, match="only one class name, 'cat'"):
        adapt(model(), prompt(), ["cat"])
    with pytest.raises(SelfTPTError, match="too long: 100 tokens"):
        adapt(model(), prompt(), ["cat", "dog " * 100])
    with pytest.raises(SelfTPTError, match="leaves no room"):
        adapt(model(), prompt(length=76), ["cat", "dog"])
    with pytest.warns(SelfTPTWarning, match="equal class names: cat"):
        assert adapt(model(), prompt(), ["cat", "dog", "Cat"]).weights.isfinite().all()


def test_the_longest_name_that_fits_is_taken() -> None:
    assert len(adapt(model(), prompt(), ["cat", "dog " * 70]).names) == 2
    with pytest.raises(SelfTPTError, match="has room for 70"):
        adapt(model(), prompt(), ["cat", "dog " * 71])


def test_a_prompt_of_another_model_is_refused_with_both_names() -> None:
    with pytest.raises(SelfTPTError, match=r"made with vit \(random\).*not with resnet \(random\)"):
        adapt(model("resnet"), prompt("vit"), NAMES)


def test_a_rate_that_leads_nowhere_is_said() -> None:
    wild = dataclasses.replace(prompt(), contrast=ContrastConfig(normalize=False))
    with pytest.raises(SelfTPTError, match="lower the learning rate"):
        adapt(model(), wild, NAMES, AdaptConfig(lr=1e38, steps=5))


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"lr": 0.0}, {"vectors": "front"}, {"chunk": 0}, {"momentum": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SelfTPTError):
        AdaptConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_adapt_in_a_callers_grad_mode(mode: type) -> None:
    names = ["cat", "dog", "red kite"]
    wanted = adapt(model(), prompt(), names, AdaptConfig(steps=2))
    with mode():
        found = adapt(model(), prompt(), names, AdaptConfig(steps=2))
    assert torch.equal(found.weights, wanted.weights)
