"""The installed release of open_clip has every attribute that selftpt reads."""

from __future__ import annotations

import functools

import open_clip
import pytest
from open_clip import transformer
from open_clip.hf_model import HFTextEncoder
from torch import nn

from selftpt.models.open_clip_api import CROSS_ATTENTION_NORM, USED
from tests.helpers.models import KINDS, small

CLASSES = {
    "open_clip.CLIP": open_clip.CLIP,
    "open_clip.CustomTextCLIP": open_clip.CustomTextCLIP,
    "open_clip.CoCa": open_clip.CoCa,
    "open_clip.hf_model.HFTextEncoder": HFTextEncoder,
    **{
        f"open_clip.transformer.{name}": getattr(transformer, name)
        for name in (
            "TextTransformer",
            "Transformer",
            "ResidualAttentionBlock",
            "CustomResidualAttentionBlock",
            "VisionTransformer",
        )
    },
}


def instances(kind: type) -> list[nn.Module]:
    """Return all modules of exactly this class in all small models."""
    return [module for name in KINDS for module in small(name).clip.modules() if type(module) is kind]


def test_every_used_class_is_checked() -> None:
    assert set(CLASSES) == set(USED)


@pytest.mark.parametrize("name", USED)
def test_used_attributes_exist(name: str) -> None:
    found = instances(CLASSES[name])
    assert found
    missing = {attribute for module in found for attribute in USED[name] if not _has(module, attribute)}
    assert not missing


def _has(module: object, attribute: str) -> bool:
    try:
        functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        return False
    return True


def test_cross_attention_blocks_have_their_own_norm() -> None:
    assert hasattr(transformer.ResidualAttentionBlock(8, 2, is_cross_attention=True), CROSS_ATTENTION_NORM)
    assert not hasattr(transformer.ResidualAttentionBlock(8, 2), CROSS_ATTENTION_NORM)
