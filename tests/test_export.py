"""torch.export accepts the image tower, with and without a classifier."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftpt.models.image import ImageTower
from tests.helpers.models import BLOCKS, KINDS, SPECS, relative, small


class LogitHead(nn.Module):
    """Maps images to scaled cosines with class vectors [C, D]."""

    def __init__(self, tower: ImageTower, weights: Tensor, scale: float) -> None:
        super().__init__()
        self.tower, self.scale = tower, scale
        self.register_buffer("weights", weights)

    def forward(self, pixels: Tensor) -> Tensor:
        features = F.normalize(self.tower(pixels).float(), dim=-1)
        return self.scale * features @ self.weights.t()


def check_export(module: nn.Module, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=64)
    with torch.no_grad():
        example = torch.randn(2, 3, size, size, generator=generator)
        program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
        for count in (1, 2, 5):
            pixels = torch.randn(count, 3, size, size, generator=generator)
            assert relative(program.module()(pixels), module(pixels)) < 1e-5


@pytest.mark.parametrize("kind", BLOCKS)
def test_image_tower_is_exported(kind: str) -> None:
    check_export(small(kind).model.image, SPECS[kind].vision["image_size"])


@pytest.mark.parametrize("kind", ["vit", "vit-quickgelu", "resnet", "custom-text"])
def test_tower_with_classifier_is_exported(kind: str) -> None:
    model = small(kind).model
    weights = F.normalize(torch.randn(7, model.dimension, generator=torch.Generator().manual_seed(1)), dim=-1)
    check_export(LogitHead(model.image, weights, model.scale).eval(), SPECS[kind].vision["image_size"])


@pytest.mark.parametrize("kind", KINDS)
def test_text_tower_has_all_text_parameters_and_shares_none_with_image_tower(kind: str) -> None:
    model = small(kind).model
    text, image = ({id(p) for p in tower.parameters()} for tower in (model.text, model.image))
    assert not text & image
    not_visual = {id(p) for name, p in model.clip.named_parameters() if not name.startswith("visual.")}
    other = {id(p) for name, p in model.clip.named_parameters() if name.startswith(("logit", "text_decoder."))}
    assert text == not_visual - other
