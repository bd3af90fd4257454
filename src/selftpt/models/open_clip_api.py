"""The attributes of open_clip's modules that selftpt relies on, in one table.

open_clip documents none of them. A test builds an instance of each class and fails if the installed release of
open_clip lacks an attribute.
"""

from __future__ import annotations

from typing import Any

import open_clip
from torch import Tensor, nn

_TEXT = ("token_embedding", "positional_embedding", "transformer", "ln_final", "attn_mask", "text_projection")
_MODEL = ("visual", "visual.preprocess_cfg", "logit_scale")
_BLOCK = ("ln_1", "attn", "ls_1", "ln_2", "mlp", "ls_2")

# The attributes that selftpt reads, calls or tests for, by class. A name with a dot is an attribute of a submodule.
USED: dict[str, tuple[str, ...]] = {
    "open_clip.CLIP": (*_MODEL, *_TEXT, "text_pool_type", "text_eos_id"),
    "open_clip.CustomTextCLIP": (*_MODEL, "text"),
    "open_clip.CoCa": (*_MODEL, "text"),
    "open_clip.transformer.TextTransformer": (*_TEXT, "cls_emb", "pool_type", "eos_id", "_embeds"),
    "open_clip.hf_model.HFTextEncoder": ("transformer", "pooler", "proj", "config.pad_token_id"),
    "open_clip.transformer.Transformer": ("resblocks",),
    "open_clip.transformer.ResidualAttentionBlock": (
        *_BLOCK,
        "attn.num_heads",
        "attn.in_proj_weight",
        "attn.in_proj_bias",
        "attn.out_proj",
        "mlp.c_fc",
        "mlp.gelu",
        "mlp.c_proj",
    ),
    "open_clip.transformer.CustomResidualAttentionBlock": (
        *_BLOCK,
        "ln_attn",
        "attn.num_heads",
        "attn.in_proj_weight",
        "attn.in_proj_bias",
        "attn.out_proj",
        "attn.ln_q",
        "attn.ln_k",
        "attn.ln_inner",
        "attn.head_scale",
        "attn.logit_scale",
    ),
    "open_clip.transformer.VisionTransformer": (
        "_embeds",
        "_pool",
        "attn_pool",
        "image_size",
        "ln_post",
        "ln_pre",
        "pool_type",
        "proj",
        "transformer",
    ),
}
# An attribute that only blocks with cross-attention have; the block loop does not support them.
CROSS_ATTENTION_NORM = "ln_1_kv"


class ClipText(nn.Module):
    """The text modules of an `open_clip.CLIP`, which has no `text` module, under the names of `TextTransformer`.

    Args:
        clip: The open_clip model.
    """

    cls_emb = None
    attn_mask: Tensor | None

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.token_embedding, self.positional_embedding = clip.token_embedding, clip.positional_embedding
        self.transformer, self.ln_final, self.text_projection = clip.transformer, clip.ln_final, clip.text_projection
        self.register_buffer("attn_mask", clip.attn_mask, persistent=False)
        self.pool_type, self.eos_id = clip.text_pool_type, clip.text_eos_id

    def _embeds(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.token_embedding(ids) + self.positional_embedding, self.attn_mask


def text_module(clip: Any) -> Any:
    """Return the text tower of an open_clip model: a `TextTransformer`, a `ClipText`, or an `HFTextEncoder`."""
    return ClipText(clip) if isinstance(clip, open_clip.CLIP) else clip.text
