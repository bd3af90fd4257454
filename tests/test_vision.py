"""The image tower and its preprocessing equal those of open_clip."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import QuickGELU, VisionTransformer
from PIL import Image
from torch import Tensor, nn

from selftpt.data.transforms import Preprocess
from selftpt.models import Model
from selftpt.models.image import ImageTower, fold_batch_norm
from tests.helpers.models import KINDS, SPECS, perturb, relative, small


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of coarse blobs and noise, on which resizing methods differ."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    fine = rng.integers(-20, 20, (height, width, 3))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BILINEAR)).astype(int)
    return Image.fromarray((smooth + fine).clip(0, 255).astype(np.uint8))


def pixels_of(kind: str, count: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    size = SPECS[kind].vision["image_size"]
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_tower_of_every_architecture_equals_open_clip(kind: str) -> None:
    model = small(kind)
    tower, pixels = model.model.image, pixels_of(kind)
    assert tower.runs_blocks is SPECS[kind].blocks
    with torch.no_grad():
        found, expected = tower(pixels), model.clip.encode_image(pixels, normalize=False)
    assert relative(found, expected) < 1e-5
    assert relative(found[0], found[1]) > 1e-4  # features depend on the pixels
    assert relative(tower(pixels[:1]), expected[:1]) < 1e-5


VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (True, {}),
    "quick": (True, {"act_layer": QuickGELU}),
    "layer scale": (True, {"ls_init_value": 0.3}),
    "no first norm": (True, {"no_ln_pre": True}),
    "norm after pooling": (True, {"final_ln_after_pool": True}),
    "fixed positions": (True, {"pos_embed_type": "sin_cos_2d"}),
    "wide": (True, {"image_size": (16, 40)}),
    "tokens too": (True, {"output_tokens": True}),
    "dropped patches": (True, {"patch_dropout": 0.5}),
    "qk norm": (True, {"qk_norm": True}),
    "scaled": (True, {"scale_heads": True, "scale_attn_inner": True, "scale_attn": True, "scale_fc": True}),
    "one layer": (True, {"layers": 1}),
    "mean": (True, {"pool_type": "avg"}),
    "mean, norm after": (True, {"pool_type": "avg", "final_ln_after_pool": True}),
    "attention pool": (True, {"attentional_pool": True, "attn_pooler_heads": 4, "attn_pooler_queries": 5}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tower_of_every_vit_variant_equals_open_clip(variant: str, dtype: torch.dtype) -> None:
    runs_blocks, arguments = VARIANTS[variant]
    settings = {
        "image_size": 32,
        "patch_size": 8,
        "width": 32,
        "layers": 3,
        "heads": 4,
        "mlp_ratio": 2.0,
        "output_dim": 24,
        **arguments,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        visual = VisionTransformer(**settings).eval().requires_grad_(False)
    perturb(visual, torch.Generator().manual_seed(1))
    visual.to(dtype)

    def encode_image(pixels: Tensor) -> Tensor:
        out = visual(pixels)
        return out[0] if visual.output_tokens else out

    tower = ImageTower(visual)
    assert tower.runs_blocks is runs_blocks
    size = settings["image_size"]
    pixels = torch.randn(3, 3, *(size if isinstance(size, tuple) else (size, size)), dtype=dtype)
    assert relative(tower(pixels), encode_image(pixels)) < (1e-5 if dtype == torch.float32 else 1e-9)


class ConvTower(nn.Module):
    """A convolutional tower; with `skip`, the output of the second convolution is also used without its norm."""

    image_size = 16

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.skip = skip

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.second(self.first_norm(self.first(pixels)).relu())
        y = self.second_norm(x)
        return (y + x if self.skip else y).mean((2, 3))


@pytest.mark.parametrize("skip", [False, True])
def test_batch_norm_is_folded_if_nothing_else_uses_the_convolution(skip: bool) -> None:
    """The given tower does not change."""
    visual = ConvTower(skip).eval().requires_grad_(False)
    perturb(visual, torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in visual.state_dict().items()}
    pixels = torch.randn(2, 3, 16, 16)
    folded = fold_batch_norm(visual)
    assert (folded is visual) is skip
    assert norms(folded) == (2 if skip else 0)
    assert relative(folded(pixels), visual(pixels)) < 1e-5
    assert all(torch.equal(before[name], value) for name, value in visual.state_dict().items())


def norms(tower: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in tower.modules())


def test_batch_norm_is_folded_in_half_precision() -> None:
    visual = ConvTower(False).eval().requires_grad_(False)
    perturb(visual, torch.Generator().manual_seed(0))
    folded = fold_batch_norm(copy.deepcopy(visual).half())
    assert norms(folded) == 0
    assert {p.dtype for p in folded.parameters()} == {torch.float16}
    pixels = torch.randn(2, 3, 16, 16)
    assert relative(folded.float()(pixels), visual(pixels)) < 1e-2


@pytest.mark.parametrize(("kind", "remaining"), [("resnet", 0), ("mobileclip", 24)])
def test_batch_norms_of_real_towers_are_folded(kind: str, remaining: int) -> None:
    """The remaining norms of MobileCLIP are in branches without a convolution."""
    model = small(kind)
    assert norms(model.clip.visual) > remaining
    assert norms(model.model.image.visual) == remaining


@pytest.mark.parametrize("kind", KINDS)
def test_encode_images_of_bytes_and_floats_equals_open_clip(kind: str) -> None:
    """The result is L2-normalised."""
    model = small(kind)
    transform = image_transform_v2(PreprocessCfg(**model.clip.visual.preprocess_cfg), is_train=False)
    images = [image(90, 70), image(70, 200, seed=1)]
    floats = torch.stack([transform(p) for p in images])
    bytes_ = torch.stack([model.model.preprocess(p) for p in images])
    assert bytes_.dtype == torch.uint8
    with torch.no_grad():
        expected = F.normalize(model.clip.encode_image(floats), dim=-1)
    for pixels in (floats, bytes_):
        found = model.model.encode_images(pixels)
        assert found.shape == (2, model.spec.dimension)
        assert found.dtype == torch.float32
        assert torch.allclose(found.norm(dim=-1), torch.ones(2), atol=1e-6)
        assert not found.is_inference()
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("kind", ["vit", "vit-quickgelu", "resnet"])
def test_fp16_features_are_close_to_fp32(kind: str) -> None:
    """They are returned as L2-normalised float32 tensors."""
    exact = small(kind).model
    fresh = small.__wrapped__(kind)  # a separate copy, because its image tower is cast
    model = Model(fresh.clip, fresh.tokenizer, exact.id, exact.dimension, "cpu", "fp16")
    pixels = pixels_of(kind)
    found = model.encode_images(pixels)
    assert found.dtype == torch.float32
    assert torch.allclose(found.norm(dim=-1), torch.ones(len(pixels)), atol=1e-6)
    expected = exact.encode_images(pixels)
    assert (found * expected).sum(-1).min() > 0.99
    assert not torch.equal(found, expected)
    assert next(model.clip.transformer.parameters()).dtype == torch.float32


CONFIGS = [
    PreprocessCfg(size=size, resize_mode=mode, interpolation=interpolation, fill_color=fill)
    for size in (32, (32, 32), (24, 40))
    for mode in ("shortest", "longest", "squash")
    for interpolation in ("bicubic", "bilinear")
    for fill in (0, 128)
    if fill == 0 or mode == "longest"
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.size}-{c.resize_mode}-{c.interpolation}-{c.fill_color}")
def test_preprocessing_equals_open_clip(config: PreprocessCfg) -> None:
    expected = image_transform_v2(config, is_train=False)
    preprocess = Preprocess.from_config(asdict(config))
    height, width = config.size if isinstance(config.size, tuple) else (config.size, config.size)
    assert preprocess.size == (height, width)
    for shape in [(100, 60), (60, 100), (32, 32), (7, 5), (33, 200), (4, 50)]:
        pixels = preprocess(image(*shape))
        assert pixels.dtype == torch.uint8
        assert pixels.shape == (3, height, width)
        found = preprocess.normalize(pixels[None])[0]
        assert torch.allclose(found, expected(image(*shape)), rtol=1e-6, atol=1e-6)


def test_preprocessing_with_other_mean_and_std_equals_open_clip() -> None:
    config = PreprocessCfg(size=16, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    preprocess = Preprocess.from_config(asdict(config))
    found = preprocess.normalize(preprocess(image(40, 30))[None])[0]
    assert torch.allclose(found, image_transform_v2(config, is_train=False)(image(40, 30)), atol=1e-6)
    white = preprocess.normalize(torch.full((1, 3, 16, 16), 255, dtype=torch.uint8))[0, :, 0, 0]
    assert white.tolist() == pytest.approx([0.9 / 0.4, 0.8 / 0.5, 0.7 / 0.6], rel=1e-6)


def test_float_pixels_are_not_normalised_again() -> None:
    preprocess = Preprocess.from_config(asdict(PreprocessCfg(size=16)))
    floats = torch.randn(2, 3, 16, 16)
    assert torch.equal(preprocess.normalize(floats), floats)
