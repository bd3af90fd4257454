"""The finished model as an open_clip folder that is small: half precision, and a byte a number in the token table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.embedded_model.ingredients import PREPROCESS, TRUNK

CONFIG: dict[str, Any] = {
    "embed_dim": 192,
    "vision_cfg": {
        "timm_model_name": TRUNK,
        "timm_model_pretrained": False,
        "timm_pool": "avg",
        "timm_proj": "linear",
        "timm_proj_bias": True,
        "image_size": 224,
    },
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 192, "heads": 4, "layers": 4},
}
DIMENSIONS = CONFIG["embed_dim"] - 1  # of the pictures' space: one more is the texts' cone


def rescaled(state: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """The same text tower with all that runs through it, from the token vectors on, times a factor.

    Layer normalisation undoes the scale, so features stay (but for its epsilon). What changes is how far a prompt moves
    at a given learning rate, in parts of its own length: by the inverse square of the factor.
    """
    added = ("token_embedding.weight", "positional_embedding")
    of_blocks = ("attn.out_proj.weight", "attn.out_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias")

    def scaled(name: str) -> bool:
        return name in added or (name.startswith("transformer.resblocks.") and name.endswith(of_blocks))

    return {name: factor * tensor if scaled(name) else tensor for name, tensor in state.items()}


def small(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict in fewer bytes, which open_clip loads as it is: torch widens as it copies."""

    def narrow(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "token_embedding.weight":
            return tensor.to(torch.float8_e4m3fn)
        return tensor.half() if tensor.ndim > 1 else tensor

    return {name: narrow(name, tensor).contiguous() for name, tensor in state.items()}


def write_model(clip: torch.nn.Module, folder: Path) -> None:
    """Write open_clip_config.json and open_clip_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_cfg": CONFIG, "preprocess_cfg": {**PREPROCESS, "size": [224, 224]}}
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(small(clip.state_dict()), folder / "open_clip_model.safetensors")
