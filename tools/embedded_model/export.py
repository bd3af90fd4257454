"""Export of the model as a small open_clip folder: half precision, and 8 bits per token-embedding value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.embedded_model.image_features import BACKBONE, PREPROCESS

CONFIG: dict[str, Any] = {
    "embed_dim": 192,
    "vision_cfg": {
        "timm_model_name": BACKBONE,
        "timm_model_pretrained": False,
        "timm_pool": "avg",
        "timm_proj": "linear",
        "timm_proj_bias": True,
        "image_size": 224,
    },
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 192, "heads": 4, "layers": 4},
}
DIMENSIONS = CONFIG["embed_dim"] - 1  # of image features; the last dimension is the component that all texts share


def scale_residual_stream(state: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """Multiply the residual stream of the text tower, from the token embeddings on, by a factor.

    Layer normalisation removes the scale, so the features stay the same (up to its epsilon). What changes is how far a
    prompt moves at a given learning rate, relative to its norm: by the inverse square of the factor.
    """
    embeddings = ("token_embedding.weight", "positional_embedding")
    outputs = ("attn.out_proj.weight", "attn.out_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias")

    def scaled(name: str) -> bool:
        return name in embeddings or (name.startswith("transformer.resblocks.") and name.endswith(outputs))

    return {name: factor * tensor if scaled(name) else tensor for name, tensor in state.items()}


def quantize(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert a state dict to float16 matrices and float8 token embeddings; `load_state_dict` converts them back."""

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "token_embedding.weight":
            return tensor.to(torch.float8_e4m3fn)
        return tensor.half() if tensor.ndim > 1 else tensor

    return {name: convert(name, tensor).contiguous() for name, tensor in state.items()}


def write_model(clip: torch.nn.Module, folder: Path) -> None:
    """Write open_clip_config.json and open_clip_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_cfg": CONFIG, "preprocess_cfg": {**PREPROCESS, "size": [224, 224]}}
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(quantize(clip.state_dict()), folder / "open_clip_model.safetensors")
