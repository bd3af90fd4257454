"""The image tower: preprocessed images to features.

open_clip's ViTs run through the block loop of `selftpt.models.blocks`; if the CLS token is pooled, only the CLS
position is a query in the last block. Other towers run open_clip's own forward pass. On a CPU, convolutional towers
have their batch normalisation folded into the convolutions and use the channels-last memory format; both are faster
there (`benchmarks/embedded.py`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from selftpt.errors import SelfTPTError
from selftpt.models.blocks import Block, LayerPrompts, Norms, Observer, check_prompt_shape, is_supported, run_blocks


class FullAttention:
    """Attention of every row of a sequence to the first `keys` rows of the sequence.

    Args:
        length: Number of rows per sequence, L.
        keys: Number K of rows at the start of each sequence that are attended to.
        selected: The rows of each sequence that are read after the last block; None reads all rows.
        mask: Attention mask that broadcasts to [B, H, L, K]: boolean (True where a row attends) or additive.

    Attributes:
        selects: Whether only the selected rows are queries in the last block.
    """

    def __init__(self, length: int, keys: int, selected: slice | None, mask: Tensor | None) -> None:
        self.length, self.keys, self.mask = length, keys, mask
        self.selects = selected is not None
        self._rows = selected or slice(None)

    def select(self, x: Tensor) -> Tensor:
        """Select the rows [N, ...] of packed rows [B * L, ...] that are read after the last block."""
        selected: Tensor = x.unflatten(0, (-1, self.length))[:, self._rows]
        return selected.flatten(0, 1)

    def __call__(self, _layer: int, projected: Tensor, queries: Tensor | None) -> Tensor:
        """Compute the attention of one layer; see `selftpt.models.blocks.Attention`."""
        rows = projected.unflatten(0, (-1, self.length))  # [B, L, parts, H, E]
        k, v = (rows[:, :, i].transpose(1, 2) for i in (-2, -1))
        if self.keys < self.length:
            k, v = k[:, :, : self.keys], v[:, :, : self.keys]
        mask = self.mask
        if queries is None:
            q = rows[:, :, 0]
        else:
            q = queries[:, 0].unflatten(0, (rows.shape[0], -1))
            mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., self._rows, :]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(0, 1)


class ImageTower(nn.Module):
    """Image tower of an open_clip model.

    Args:
        visual: The `visual` module of an open_clip model.

    Attributes:
        runs_blocks: Whether the tower runs through the block loop, and therefore accepts prompts, tuned LayerNorms, an
            attention mask and an observer.
        layout: Memory format of the input of a tower that does not run through the block loop.
    """

    def __init__(self, visual: Any) -> None:
        super().__init__()
        self.visual: Any = visual
        self.layout = torch.contiguous_format
        self.runs_blocks = isinstance(visual, VisionTransformer) and all(
            map(is_supported, visual.transformer.resblocks)
        )
        self._blocks: list[Block] = []
        self._class_token_only = False
        if self.runs_blocks:
            blocks = enumerate(visual.transformer.resblocks)
            self._blocks = [Block(block, f"transformer.resblocks.{i}") for i, block in blocks]
            self._class_token_only = visual.pool_type == "tok" and visual.attn_pool is None
        on_cpu = next(visual.parameters()).device.type == "cpu"
        if on_cpu and any(isinstance(module, nn.BatchNorm2d) for module in visual.modules()):
            self.visual, self.layout = (
                fold_batch_norm(visual).to(memory_format=torch.channels_last),
                torch.channels_last,
            )

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        dtype: torch.dtype = next(self.visual.parameters()).dtype
        return dtype

    def norms(self) -> dict[str, Tensor]:
        """Return the LayerNorm parameters that `forward` can replace, by name: those of two LayerNorms per block."""
        return {name: tensor for block in self._blocks for name, tensor in block.norms().items()}

    def forward(
        self,
        pixels: Tensor,
        prompts: LayerPrompts | None = None,
        *,
        norms: Norms | None = None,
        mask: Tensor | None = None,
        observer: Observer | None = None,
    ) -> Tensor:
        """Encode preprocessed images.

        Args:
            pixels: Normalised pixels [B, 3, S, S] in the tower's precision.
            prompts: n prompt vectors per layer.
            norms: LayerNorm parameters under the names of `norms()`, which replace the tower's own.
            mask: Attention mask that broadcasts to [B, H, L + n, L + n] for L tokens: boolean (True where a row
                attends) or additive. It has no columns for read-only prompts.
            observer: Called with the index and the input [B, L + n, d] of each block.

        Returns:
            Features [B, D], not normalised; [B, n, D] if the prompts are read-only.

        Raises:
            SelfTPTError: The tower does not support an argument, or the prompts have the wrong shape.
        """
        if not self.runs_blocks:
            if not (prompts is None and norms is None and mask is None and observer is None):
                raise SelfTPTError(
                    "this image tower does not support prompts, tuned LayerNorms, a mask or an observer: choose a "
                    "model with an open_clip ViT"
                )
            features = self.visual(pixels.contiguous(memory_format=self.layout))
            pooled: Tensor = features[0] if isinstance(features, tuple) else features  # some towers also return tokens
            return pooled
        visual = self.visual
        x: Tensor = visual._embeds(pixels)
        keys = length = x.shape[1]
        count, insert, selected = 0, None, slice(0, 1) if self._class_token_only else None
        if prompts is not None:
            vectors = prompts.vectors.to(x.dtype)
            count = vectors.shape[1]
            check_prompt_shape(vectors, len(self._blocks), x.shape[-1])
            # _embeds has applied ln_pre to the patch tokens; ln_pre treats each row separately.
            x = torch.cat([x, visual.ln_pre(vectors[0]).expand(x.shape[0], -1, -1)], 1)
            keys = length if prompts.read_only else length + count
            if prompts.read_only:
                if visual.attn_pool is not None:
                    raise SelfTPTError(
                        "this image tower pools with attention and does not support read-only prompts: "
                        "choose a model without attentional pooling"
                    )
                selected = slice(length, length + count)

            def insert(layer: int, rows: Tensor) -> Tensor:
                if not 0 < layer < len(vectors):
                    return rows
                kept = rows.unflatten(0, (-1, length + count))[:, :length]
                return torch.cat([kept, vectors[layer].expand(kept.shape[0], -1, -1)], 1).flatten(0, 1)

        def observe(layer: int, rows: Tensor) -> None:
            assert observer is not None
            observer(layer, rows.unflatten(0, (-1, length + count)))

        rows = run_blocks(
            self._blocks,
            x.flatten(0, 1),
            FullAttention(length + count, keys, selected, mask),
            insert=insert,
            norms=norms,
            observer=None if observer is None else observe,
        )
        if prompts is not None and prompts.read_only:
            pooled = visual.ln_post(rows).unflatten(0, (-1, count))
        else:
            size = 1 if self._class_token_only else length + count
            pooled = visual._pool(rows.unflatten(0, (-1, size))[:, :length])[0]
        return pooled if visual.proj is None else pooled @ visual.proj


def fold_batch_norm(visual: Any) -> Any:
    """Fold batch normalisation into the convolutions before it.

    A forward pass of one random image finds the convolution before each normalisation.

    Args:
        visual: The `visual` module of an open_clip model, which is not changed.

    Returns:
        A copy with folded weights; `visual` itself if the copy does not compute the same features.
    """
    precision = next(visual.parameters()).dtype
    folded = copy.deepcopy(visual).float()  # the features are compared in fp32, independent of the tower's precision
    parents = {module: (parent, name) for parent in folded.modules() for name, module in parent.named_children()}
    outputs: dict[nn.Module, Tensor] = {}
    pairs: list[tuple[Any, Any]] = []

    def after_convolution(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[module] = output

    def before_norm(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        pairs.extend((before, module) for before, output in outputs.items() if output is inputs[0])

    hooks = [m.register_forward_hook(after_convolution) for m in folded.modules() if isinstance(m, nn.Conv2d)]
    hooks += [m.register_forward_pre_hook(before_norm) for m in folded.modules() if isinstance(m, nn.BatchNorm2d)]
    size = visual.image_size if isinstance(visual.image_size, tuple) else (visual.image_size, visual.image_size)
    image = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = folded(image)
        for hook in hooks:
            hook.remove()
        for convolution, norm in pairs:
            setattr(*parents[convolution], fuse_conv_bn_eval(convolution, norm))
            setattr(*parents[norm], nn.Sequential(*norm.children()))  # timm's norms contain the activation
        same = torch.allclose(folded(image), expected, rtol=0, atol=1e-4 * expected.abs().max())
    return folded.to(precision) if same else visual
