"""Stage 2: adapting a prompt to class names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from selftpt import AdaptConfig, Prompt, SelfTPTError, SelfTPTWarning, adapt
from selftpt.config import VIEWS, ContrastConfig
from selftpt.files import read_file, write_tensors
from selftpt.prompt import initial_head
from tests.helpers.models import model, random_prompt, small
from tests.oracle import reference

NAMES = ("red fox", "blue_whale", "kite", "old man of the sea", "kite (bird of prey)")


def prompt(kind: str = "vit", contrast: ContrastConfig | None = None, length: int = 4) -> Prompt:
    head = initial_head(model(kind).dimension, 24, 12, torch.Generator().manual_seed(3))
    context = random_prompt(small(kind), length)
    return Prompt(context, head, contrast or ContrastConfig(), model(kind).id)


@pytest.mark.parametrize("kind", ["vit", "mobileclip"])
def test_adapt_equals_sgd_on_the_reference_loss(kind: str) -> None:
    learned = prompt(kind)
    found = adapt(model(kind), learned, NAMES, AdaptConfig(steps=3, lr=0.5))
    exact = small(kind, torch.float64)
    clean = [name.replace("_", " ") for name in NAMES]
    context, head = learned.context.double(), [t.double() for t in learned.head]
    for _ in range(3):
        p = context.clone().requires_grad_()
        loss = reference.contrast_loss(exact, clean, p, head, reference.Settings())
        context = context - 0.5 * torch.autograd.grad(loss, p)[0]
    expected = F.normalize(reference.encode(exact, "end", clean, context), dim=-1)
    assert (found.weights - expected).norm() <= 1e-4 * expected.norm()
    assert not torch.allclose(
        found.weights, adapt(model(kind), learned, NAMES, AdaptConfig(steps=0)).weights, atol=1e-4
    )
    assert found.names == tuple(clean)
    assert found.scale == model(kind).scale


def test_mean_of_the_learned_views_can_be_the_class_vectors() -> None:
    learned = prompt()
    found = adapt(model(), learned, NAMES, AdaptConfig(steps=0, vectors="mean")).weights
    clean = [name.replace("_", " ") for name in NAMES]
    views = [F.normalize(reference.encode(small("vit"), view, clean, learned.context), dim=-1) for view in VIEWS]
    assert torch.allclose(found, F.normalize(sum(views), dim=-1), atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("views", [("end", "hand_crafted"), ("front", "middle"), ("end", "front", "middle")])
def test_adapt_uses_the_views_of_the_prompt(views: tuple[str, ...]) -> None:
    some = adapt(model(), prompt(contrast=ContrastConfig(views=views)), NAMES)  # type: ignore[arg-type]
    assert not torch.allclose(some.weights, adapt(model(), prompt(), NAMES).weights, atol=1e-6)


@pytest.mark.parametrize("kind", ["vit", "mobileclip"])
def test_chunked_class_list_gives_the_same_classifier(kind: str) -> None:
    unchunked = adapt(model(kind), prompt(kind), NAMES, AdaptConfig(chunk=None))
    assert torch.allclose(
        adapt(model(kind), prompt(kind), NAMES, AdaptConfig(chunk=2)).weights, unchunked.weights, atol=1e-5
    )


def test_adapt_changes_neither_model_nor_prompt() -> None:
    learned, clip = prompt(), small("vit").clip
    before = {name: tensor.clone() for name, tensor in clip.state_dict().items()}
    kept = learned.digest
    first = adapt(model(), learned, NAMES)
    assert learned.digest == kept
    assert all(torch.equal(tensor, before[name]) for name, tensor in clip.state_dict().items())
    assert torch.equal(adapt(model(), learned, NAMES).weights, first.weights)


def test_invalid_names_are_refused_and_duplicate_names_give_a_warning() -> None:
    with pytest.raises(SelfTPTError, match="no class names"):
        adapt(model(), prompt(), [])
    with pytest.raises(SelfTPTError, match="not the string 'cat'"):
        adapt(model(), prompt(), "cat")
    with pytest.raises(SelfTPTError, match="only one class name, 'cat'"):
        adapt(model(), prompt(), ["cat"])
    with pytest.raises(SelfTPTError, match="too long: it has 100 tokens"):
        adapt(model(), prompt(), ["cat", "dog " * 100])
    with pytest.raises(SelfTPTError, match="leaves no room"):
        adapt(model(), prompt(length=76), ["cat", "dog"])
    with pytest.warns(SelfTPTWarning, match="equal class names: cat"):
        assert adapt(model(), prompt(), ["cat", "dog", "Cat"]).weights.isfinite().all()


def test_name_may_fill_the_context_length() -> None:
    assert len(adapt(model(), prompt(), ["cat", "dog " * 70]).names) == 2
    with pytest.raises(SelfTPTError, match="accepts 70"):
        adapt(model(), prompt(), ["cat", "dog " * 71])


def test_prompt_of_another_model_is_refused_with_both_names() -> None:
    with pytest.raises(SelfTPTError, match=r"made with vit \(random\).*not with resnet \(random\)"):
        adapt(model("resnet"), prompt("vit"), NAMES)


def test_diverging_loss_is_an_error() -> None:
    wild = dataclasses.replace(prompt(), contrast=ContrastConfig(normalize=False))
    with pytest.raises(SelfTPTError, match="not finite: lower its learning rate"):
        adapt(model(), wild, NAMES, AdaptConfig(lr=1e38, steps=5))


def test_template_option_replaces_the_template_of_the_prompt() -> None:
    """The result is that of a prompt with this template; the prompt itself does not change."""
    template = "a centered satellite photo of {}."
    found = adapt(model(), prompt(), NAMES, AdaptConfig(template=template))
    expected = adapt(model(), prompt(contrast=ContrastConfig(template=template)), NAMES)
    assert torch.equal(found.weights, expected.weights)
    assert not torch.allclose(found.weights, adapt(model(), prompt(), NAMES).weights, atol=1e-6)
    with pytest.raises(SelfTPTError, match=r"must have one \{\} where the class name goes"):
        AdaptConfig(template="a photo")


def test_prompt_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its header has the former names `hand`, `equal_apart` and `meaningless`."""
    file = tmp_path / "p.safetensors"
    learned = prompt(contrast=ContrastConfig(duplicates_as_negatives=True))
    learned.save(file)
    header, tensors = read_file(file)
    contrast = header["contrast"]
    contrast["views"] = ["end", "front", "middle", "hand"]
    contrast["equal_apart"] = contrast.pop("duplicates_as_negatives")
    header["meaningless"] = header.pop("random_init")
    write_tensors(file, "prompt", tensors, header)
    assert Prompt.load(file).contrast == learned.contrast


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"lr": 0.0}, {"vectors": "front"}, {"chunk": 0}, {"momentum": -1}])
def test_invalid_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SelfTPTError):
        AdaptConfig(**wrong)  # type: ignore[arg-type]


# Files


@pytest.mark.parametrize(
    ("header", "tensors", "words"),
    [
        ({"contrast": {"views": ["end", "front"], "more": 1}}, {}, "unexpected keyword argument 'more'"),
        ({"contrast": {"views": "end"}}, {}, "ContrastConfig.views must be a list"),
        ({"contrast": {"temperature": 0}}, {}, "ContrastConfig.temperature must be a number above 0"),
        ({"contrast": []}, {}, "contrast must be an object"),
        ({"random_init": 1}, {}, "random_init must be"),
        ({"origin": None}, {}, "origin must be an object"),
        ({"model": None}, {}, "model must be an object"),
        ({"more": 1}, {}, "unknown entry, 'more'"),
        ({}, {"w3": torch.zeros(1)}, "its tensors must be context, w1, b1, w2, b2"),
        ({}, {"context": torch.zeros(4)}, "the shape of context must be M d, not [4]"),
        ({}, {"context": torch.zeros(0, 32)}, "the shape of context must be M d"),
        ({}, {"b1": torch.zeros(23)}, "the shape of b1 must be E with E = 24"),
        ({}, {"w2": torch.zeros(12, 23)}, "the shape of w2 must be F E with F = 12, E = 24"),
        ({}, {"b2": torch.zeros(12, 1)}, "the shape of b2 must be F"),
        ({}, {"b2": torch.zeros(12).int()}, "float32, not of int32"),
        ({}, {"b2": torch.full((12,), float("inf"))}, "not finite"),
    ],
)
def test_signed_prompt_with_invalid_content_is_refused_in_one_line(
    tmp_path: Path, header: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    file = tmp_path / "p.safetensors"
    prompt().save(file)
    found, kept = read_file(file)
    write_tensors(file, "prompt", {**kept, **tensors}, {**found, **header})
    with pytest.raises(SelfTPTError) as caught:
        Prompt.load(file)
    assert str(caught.value).startswith(f"{file} is not a valid prompt file: ")
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def test_damaged_prompt_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    prompt().save(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(SelfTPTError, match=r"p\.safetensors is damaged \(its tensor 'w2' does not match its digest\)"):
        Prompt.load(file)


def test_prompt_with_other_dimensions_than_its_model_is_refused() -> None:
    learned = prompt()
    wide = dataclasses.replace(learned, context=torch.zeros(4, 33))
    head = dataclasses.replace(learned, head=initial_head(25, 24, 12, torch.Generator()))
    for wrong in (wide, head):
        with pytest.raises(SelfTPTError, match="learn a prompt for this model"):
            adapt(model(), wrong, NAMES)


def test_embedded_prompt_is_saved_and_loaded_unchanged(tmp_path: Path) -> None:
    learned = Prompt.embedded()
    learned.save(tmp_path / "p")
    assert read_file(tmp_path / "p")[0]["format"] == 2
    assert Prompt.load(tmp_path / "p").digest == learned.digest
    assert Prompt.load(tmp_path / "p").origin == learned.origin


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_adapt_works_in_any_gradient_mode(mode: type) -> None:
    names = ["cat", "dog", "red kite"]
    expected = adapt(model(), prompt(), names, AdaptConfig(steps=2))
    with mode():
        found = adapt(model(), prompt(), names, AdaptConfig(steps=2))
    assert torch.equal(found.weights, expected.weights)
