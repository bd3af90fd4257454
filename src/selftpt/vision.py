"""The image tower, without the rows that nobody reads: in a ViT's last block only the class token asks.

Towers with batch normalisation, which are those that convolve throughout, have the channels last in memory on a CPU,
where that was measured to be faster (`benchmarks/embedded.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from open_clip.transformer import VisionTransformer
from torch import Tensor

from selftpt.blocks import Block, is_known


class ImageTower:
    """The image half of an open_clip model: preprocessed pictures [B, 3, S, S] to features [B, D]."""

    def __init__(self, clip: Any) -> None:
        self.clip = clip
        visual = clip.visual
        self.layout = torch.contiguous_format
        on_cpu = next(visual.parameters()).device.type == "cpu"
        if on_cpu and any(isinstance(module, torch.nn.BatchNorm2d) for module in visual.modules()):
            self.layout = torch.channels_last
            visual.to(memory_format=self.layout)
        self.short = (
            isinstance(visual, VisionTransformer)
            and visual.pool_type == "tok"
            and visual.attn_pool is None
            and all(is_known(block) for block in visual.transformer.resblocks)
        )
        self.blocks = [Block(block) for block in visual.transformer.resblocks] if self.short else []

    def __call__(self, pixels: Tensor) -> Tensor:
        if not self.short:
            features: Tensor = self.clip.encode_image(pixels.contiguous(memory_format=self.layout))
            return features
        visual = self.clip.visual
        x = visual._embeds(pixels)
        batch, length, _ = x.shape
        x = x.flatten(0, 1)
        for layer, block in enumerate(self.blocks):
            last = layer == len(self.blocks) - 1
            h = block.norm(x)
            if last:
                first = slice(None, None, length)
                q = block.project(h[first], slice(0, 1)).unflatten(0, (batch, 1))
                k, v = block.project(h, slice(1, 3)).unflatten(0, (batch, length)).unbind(2)
                q, x = q[:, :, 0], x[first]
            else:
                q, k, v = block.project(h, slice(0, 3)).unflatten(0, (batch, length)).unbind(2)
            out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
            x = block.finish(x, out.transpose(1, 2).flatten(0, 1))
        pooled: Tensor = visual._pool(x[:, None])[0]
        return pooled if visual.proj is None else pooled @ visual.proj
