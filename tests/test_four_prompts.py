"""The four-prompt control: three CoOp prompts with different name positions, and a hand-crafted template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from selftpt.classifier import Classifier
from selftpt.config import TrainConfig
from selftpt.errors import SelfTPTError
from selftpt.methods import METHODS
from selftpt.methods.four_prompts import FOUR_PROMPTS, FourPromptsConfig
from tests.helpers.methods import OTHERS, changed, check_method, learned, make_context, train_data, words
from tests.helpers.models import relative, small
from tests.oracle import four_prompts
from tests.oracle.four_prompts import PLACES
from tests.oracle.reference_sgd import minimise

TEMPLATE = "a centered photo of {}, in the rain."


def test_defaults_are_the_settings_of_the_paper() -> None:
    assert FourPromptsConfig() == FourPromptsConfig(TrainConfig(), "a photo of a {}.")
    assert FOUR_PROMPTS.uses_protocol_epochs(FOUR_PROMPTS.config)


@pytest.mark.parametrize("kind", ["vit", "worldwide", "siglip"])
def test_training_equals_plain_sgd_steps(kind: str, tmp_path: Path) -> None:
    """All three prompts are compared, then the class vectors of other names."""
    settings = changed(FourPromptsConfig(template=TEMPLATE), epochs=2, batch=4, lr=0.02, warmup_lr=0.01)
    context, exact = make_context(tmp_path, kind), small(kind, torch.float64)
    names = [name.replace("_", " ") for name in context.source.names]

    def gradients(parameters: Any, images: Tensor, labels: Tensor) -> list[Tensor]:
        contexts = {place: p.detach().clone().requires_grad_() for place, p in zip(PLACES, parameters, strict=True)}
        found = four_prompts.losses(exact, names, contexts, images, labels, 1 / context.model.scale)
        return [torch.autograd.grad(found[place], contexts[place])[0] for place in PLACES]

    start = words(exact, "a photo of a")
    expected = minimise(
        [start] * 3, gradients, *train_data(context, settings.learn), epochs=2, batch=4, lr=0.02, warmup=0.01
    )
    found = learned(FOUR_PROMPTS, settings, context)
    assert set(found) == set(PLACES)
    for place, vectors in zip(PLACES, expected, strict=True):
        assert (found[place] - vectors).norm() < 2e-4 * vectors.norm(), place
        assert (vectors - start).norm() > 1e-2
    classifier = FOUR_PROMPTS.fit(context, settings).for_classes(OTHERS, "{} texture.").classifier
    assert isinstance(classifier, Classifier)
    contexts = {place: vectors.double() for place, vectors in found.items()}
    assert relative(classifier.weights, four_prompts.vectors(exact, OTHERS, contexts, TEMPLATE)) < 1e-4


def test_end_prompt_equals_the_prompt_of_coop_bitwise(tmp_path: Path) -> None:
    """Also its random vectors; those of the other prompts differ."""
    settings = changed(FourPromptsConfig(), epochs=2, length=6)
    found = learned(FOUR_PROMPTS, settings, make_context(tmp_path))
    coop = METHODS["coop"]
    by_coop = coop.fit(make_context(tmp_path), changed(coop.config, epochs=2, length=6))
    assert torch.equal(by_coop.tensors["context"], found["end"])
    assert not torch.allclose(found["end"][:2], found["front"][:2], atol=1e-3)


def test_determinism_resuming_reuse_chunking_and_single_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_method(FOUR_PROMPTS, changed(FourPromptsConfig(), epochs=2, length=5, lr=0.1), tmp_path, monkeypatch)


def test_invalid_template_is_refused() -> None:
    with pytest.raises(SelfTPTError, match="template"):
        FourPromptsConfig(template="no place for a name")
