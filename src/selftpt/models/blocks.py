"""The loop over the pre-norm blocks of an open_clip transformer, which both towers use.

The loop runs on packed rows [T, d]: the tokens of all sequences, concatenated. The towers differ only in their
attention, which is an argument. Prompts per layer, tuned LayerNorms and an observer are arguments as well. The frozen
modules are never modified, copied or hooked, so any number of threads can use them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from open_clip.transformer import (
    CustomResidualAttentionBlock,
    LayerNormFp32,
    QuickGELU,
    ResidualAttentionBlock,
)
from torch import Tensor, nn

from selftpt.errors import SelfTPTError
from selftpt.models.open_clip_api import CROSS_ATTENTION_NORM

QUICK_GELU_SCALE = 1.702  # QuickGELU(x) = x * sigmoid(1.702 x)

Norms = Mapping[str, Tensor]  # LayerNorm parameters by name, which replace the tower's own
Observer = Callable[[int, Tensor], object]  # gets the layer index and the block's input rows after prompt insertion
Insert = Callable[[int, Tensor], Tensor]  # maps the layer index and packed rows [T, d] to the block's input rows


@dataclass(frozen=True, eq=False)
class LayerPrompts:
    """Prompt vectors per layer of one tower.

    `vectors[0]` is part of the input of the first block. Before block i = 1, ..., J - 1 the prompt rows are replaced
    with `vectors[i]`; from block J on they are processed like all other rows.

    In the image tower the prompt rows are appended to the patch tokens, after the positional embedding is added and
    before `ln_pre`. In the text tower they replace the first n tokens after the start token, and the positional
    embedding is added to `vectors[0]`.

    Attributes:
        vectors: Prompt vectors [J, n, d]; J is at most the number of blocks of the tower.
        read_only: Whether the prompt rows attend to the tokens, but not to each other or themselves, and no token
            attends to them. Read-only rows are appended in both towers (in the text tower after the end-of-text
            token), have no positional embedding, and are the outputs: features are [N, n, D] instead of [N, D].
    """

    vectors: Tensor
    read_only: bool = False


def check_prompt_shape(vectors: Tensor, layers: int, width: int) -> None:
    """Check the shape of prompt vectors per layer.

    Args:
        vectors: Prompt vectors, which must be [J, n, width] with 1 <= J <= layers.
        layers: Maximum number of layers.
        width: Width of the tower.

    Raises:
        SelfTPTError: The shape does not fit.
    """
    if vectors.ndim != 3 or vectors.shape[-1] != width or not 1 <= len(vectors) <= layers:
        raise SelfTPTError(
            f"prompts of this tower must have the shape [J, n, {width}] with 1 <= J <= {layers}, "
            f"not {list(vectors.shape)}"
        )


class Attention(Protocol):
    """Attention of packed rows to each other.

    Attributes:
        selects: Whether only the rows of `select` are queries in the last block.
    """

    selects: bool

    def select(self, x: Tensor) -> Tensor:
        """Select the rows [N, ...] of packed rows [T, ...] that are read after the last block, if `selects`."""

    def __call__(self, layer: int, projected: Tensor, queries: Tensor | None, /) -> Tensor:
        """Compute the attention of one layer.

        Args:
            layer: Index of the block.
            projected: Queries, keys and values of all rows, [T, 3, H, E]; only keys and values, [T, 2, H, E], if
                `queries` is given.
            queries: Queries of the selected rows, [N, 1, H, E].

        Returns:
            Outputs of all rows, [T, H, E], or of the selected rows, [N, H, E], if `queries` is given.
        """


def is_supported(block: nn.Module) -> bool:
    """Return whether `Block` computes the same function as this module."""
    if isinstance(block, ResidualAttentionBlock):
        return not hasattr(block, CROSS_ATTENTION_NORM)
    return isinstance(block, CustomResidualAttentionBlock) and block.attn.logit_scale is None


class Block:
    """One transformer block as separate operations on packed rows, without the attention itself.

    Args:
        block: A module for which `is_supported` is true.
        name: Name of the module in the tower, which is part of the names of its LayerNorm parameters.
    """

    def __init__(self, block: Any, name: str) -> None:
        self._block = block
        self._name = name
        self.heads: int = block.attn.num_heads
        self._custom = isinstance(block, CustomResidualAttentionBlock)
        activation = block.mlp.gelu
        self._quick_gelu = isinstance(activation, QuickGELU) and not self._custom
        self._gelu = isinstance(activation, nn.GELU) and not self._custom

    def norms(self) -> dict[str, Tensor]:
        """Return the parameters of the block's two LayerNorms by name."""
        return {
            f"{self._name}.{norm}.{part}": tensor
            for norm in ("ln_1", "ln_2")
            for part, tensor in getattr(self._block, norm).named_parameters()
        }

    def _norm(self, which: str, x: Tensor, norms: Norms | None) -> Tensor:
        module = getattr(self._block, which)
        if norms is None:
            return module(x)  # type: ignore[no-any-return]
        dtype = torch.float32 if isinstance(module, LayerNormFp32) else x.dtype
        weight, bias = (
            norms.get(f"{self._name}.{which}.{part}", getattr(module, part)).to(dtype) for part in ("weight", "bias")
        )
        return F.layer_norm(x.to(dtype), module.normalized_shape, weight, bias, module.eps).to(x.dtype)

    def normalize(self, x: Tensor, norms: Norms | None) -> Tensor:
        """Apply the LayerNorm before attention to rows [T, d]."""
        return self._norm("ln_1", x, norms)

    def project(self, h: Tensor, parts: slice) -> Tensor:
        """Project normalised rows [T, d] to queries, keys and values.

        Args:
            h: Normalised rows [T, d].
            parts: Which of (query, key, value) to compute: `slice(0, 3)` for all P = 3 of them.

        Returns:
            The parts, [T, P, H, E], where E = d / H is the width of a head.
        """
        d, attention = h.shape[-1], self._block.attn
        rows = slice(parts.start * d, parts.stop * d)
        bias = None if attention.in_proj_bias is None else attention.in_proj_bias[rows]
        out = F.linear(h, attention.in_proj_weight[rows], bias)
        out = out.unflatten(-1, (parts.stop - parts.start, self.heads, d // self.heads))
        if self._custom:
            norms: list[nn.Module] = [attention.ln_q, attention.ln_k, nn.Identity()][parts]
            out = torch.stack([norm(piece) for norm, piece in zip(norms, out.unbind(1), strict=True)], 1)
        return out

    def finish(self, x: Tensor, attended: Tensor, norms: Norms | None) -> Tensor:
        """Compute the rest of the block after attention.

        Without an autograd graph it works in place where possible, because allocating memory would take as long as the
        arithmetic.

        Args:
            x: Input rows of the block [T, d], for the residual connection.
            attended: Output of attention [T, H, E].
            norms: LayerNorm parameters by name, which replace the block's own.

        Returns:
            Output rows of the block [T, d].
        """
        block, graph = self._block, torch.is_grad_enabled()
        if self._custom:
            if block.attn.head_scale is not None:
                attended = attended * block.attn.head_scale[:, 0]
            out = block.ln_attn(block.attn.out_proj(block.attn.ln_inner(attended.flatten(1))))
        else:
            out = block.attn.out_proj(attended.flatten(1))
        x = x + block.ls_1(out) if graph else block.ls_1(out).add_(x)
        h = self._norm("ln_2", x, norms)
        if self._quick_gelu:  # x σ(kx) = silu(kx) / k; both factors are folded into the matrix products
            up, down = block.mlp.c_fc, block.mlp.c_proj
            h = F.silu(
                torch.addmm(up.bias, h, up.weight.t(), beta=QUICK_GELU_SCALE, alpha=QUICK_GELU_SCALE), inplace=not graph
            )
            h = torch.addmm(down.bias, h, down.weight.t(), alpha=1 / QUICK_GELU_SCALE)
        elif self._gelu and not graph:
            h = block.mlp.c_fc(h)
            h = block.mlp.c_proj(torch.ops.aten.gelu_(h, approximate=block.mlp.gelu.approximate))
        else:
            h = block.mlp(h)
        return x + block.ls_2(h) if graph else block.ls_2(h).add_(x)  # type: ignore[no-any-return]


def run_blocks(
    blocks: Sequence[Block],
    x: Tensor,
    attention: Attention,
    *,
    insert: Insert | None = None,
    norms: Norms | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """Run packed rows through all blocks.

    In the last block only the rows that `attention` selects are queries, because no other output is read.

    Args:
        blocks: The blocks of the tower.
        x: Input rows of the first block [T, d].
        attention: Attention of the rows to each other.
        insert: Called with the index and the rows of each block; returns the rows with the layer's prompts inserted.
        norms: LayerNorm parameters by name, which replace the tower's own.
        observer: Called with the index and the input rows of each block.

    Returns:
        Output rows [T, d], or [N, d] if `attention` selects N rows.
    """
    for layer, block in enumerate(blocks):
        if insert is not None:
            x = insert(layer, x)
        if observer is not None:
            observer(layer, x)
        last = attention.selects and layer == len(blocks) - 1
        h = block.normalize(x, norms)
        projected, queries = block.project(h, slice(int(last), 3)), None
        if last:
            x, queries = attention.select(x), block.project(attention.select(h), slice(0, 1))
        x = block.finish(x, attention(layer, projected, queries), norms)
    return x
