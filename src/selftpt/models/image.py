"""The image tower, without what nobody reads: in a ViT's last block only the class token asks.

Towers with batch normalisation, which are those that convolve throughout, have it folded into their convolutions and
their channels last in memory on a CPU, where both were measured to be faster (`benchmarks/embedded.py`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from selftpt.models.blocks import Block, is_known


class ImageTower:
    """The image half of an open_clip model: preprocessed pictures [B, 3, S, S] to features [B, D]."""

    def __init__(self, clip: Any) -> None:
        self.clip = clip
        visual = clip.visual
        self.encode, self.layout = clip.encode_image, torch.contiguous_format
        on_cpu = next(visual.parameters()).device.type == "cpu"
        if on_cpu and any(isinstance(module, nn.BatchNorm2d) for module in visual.modules()):
            self.encode, self.layout = fold(visual).to(memory_format=torch.channels_last), torch.channels_last
        self.short = (
            isinstance(visual, VisionTransformer)
            and visual.pool_type == "tok"
            and visual.attn_pool is None
            and all(is_known(block) for block in visual.transformer.resblocks)
        )
        self.blocks = [Block(block) for block in visual.transformer.resblocks] if self.short else []

    def __call__(self, pixels: Tensor) -> Tensor:
        if not self.short:
            features: Tensor = self.encode(pixels.contiguous(memory_format=self.layout))
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


def fold(visual: Any) -> Any:
    """A copy of a frozen tower of which the convolutions do the work of the batch normalisation behind them.

    Which is behind which is seen as a picture passes. The tower is left as it is if the copy does not see the same.
    """
    precision = next(visual.parameters()).dtype
    folded = copy.deepcopy(visual).float()  # in which the two are compared, whatever the tower's precision
    parents = {module: (parent, name) for parent in folded.modules() for name, module in parent.named_children()}
    made: dict[nn.Module, Tensor] = {}
    pairs: list[tuple[Any, Any]] = []

    def convolved(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        made[module] = output

    def normed(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        pairs.extend((before, module) for before, output in made.items() if output is inputs[0])

    hooks = [m.register_forward_hook(convolved) for m in folded.modules() if isinstance(m, nn.Conv2d)]
    hooks += [m.register_forward_pre_hook(normed) for m in folded.modules() if isinstance(m, nn.BatchNorm2d)]
    size = visual.image_size if isinstance(visual.image_size, tuple) else (visual.image_size, visual.image_size)
    picture = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = folded(picture)
        for hook in hooks:
            hook.remove()
        for convolution, norm in pairs:
            setattr(*parents[convolution], fuse_conv_bn_eval(convolution, norm))
            setattr(*parents[norm], nn.Sequential(*norm.children()))  # timm has the activation in there
        same = torch.allclose(folded(picture), wanted, rtol=0, atol=1e-4 * wanted.abs().max())
    return folded.to(precision) if same else visual
