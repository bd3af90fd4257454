"""One loop over the pre-norm blocks of an open_clip transformer, for the text tower and the image tower alike.

The loop runs on packed rows [T, d]: all tokens of all sequences, one after the other. What differs between the towers
is attention, which the caller passes in. Prompts per layer, tuned LayerNorms and an observer are arguments, so the
frozen modules are never modified, copied or hooked, and any number of threads may use them at once.
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

QUICK = 1.702  # QuickGELU(x) = x * sigmoid(1.702 x)

Norms = Mapping[str, Tensor]  # LayerNorm parameters by name, in place of the tower's own
Observer = Callable[[int, Tensor], object]  # layer index, hidden states at the block's input after prompt insertion
Insert = Callable[[int, Tensor], Tensor]  # layer index and packed rows [T, d] to the rows that enter the block


@dataclass(frozen=True, eq=False)
class LayerPrompts:
    """Prompt vectors of one tower, by layer.

    `vectors[0]` enters with the tokens. Before block i = 1, ..., J - 1 the rows that the prompt occupies are replaced
    with `vectors[i]`; from block J on they pass through the blocks like any other row.

    In the image tower the rows are appended to the patch tokens, after the positional embedding and before `ln_pre`.
    In the text tower they take the place of the first n tokens after the start token, and `vectors[0]` gets their
    positional embedding.

    Attributes:
        vectors: [J, n, d], of at most as many layers J as the tower has blocks.
        read_only: Whether the rows only read: they attend to the tokens, but neither to each other nor to themselves,
            and no token attends to them. They are appended in both towers (in the text tower after the end-of-text
            token), without positional embedding, and the features are read at them: [N, n, D] instead of [N, D].
    """

    vectors: Tensor
    read_only: bool = False


def check_layers(vectors: Tensor, layers: int, width: int) -> None:
    """Refuse prompt vectors that are not [J, n, width] of at most `layers` layers."""
    if vectors.ndim != 3 or vectors.shape[-1] != width or not 1 <= len(vectors) <= layers:
        raise SelfTPTError(
            f"prompts of this tower must have the shape [J, n, {width}] with 1 <= J <= {layers}, "
            f"not {list(vectors.shape)}"
        )


class Attention(Protocol):
    """How packed rows attend to each other."""

    selects: bool

    def select(self, x: Tensor) -> Tensor:
        """The rows [N, ...] of packed rows [T, ...] that the caller reads after the last block, if `selects`."""

    def __call__(self, layer: int, projected: Tensor, queries: Tensor | None, /) -> Tensor:
        """Attention of one layer.

        Args:
            layer: Index of the block.
            projected: Queries, keys and values of all rows [T, 3, H, D]; keys and values alone if `queries` is given.
            queries: The selected rows' queries [N, 1, H, D].

        Returns:
            [T, H, D], or [N, H, D] if `queries` is given.
        """


def is_known(block: nn.Module) -> bool:
    """Whether `Block` computes what this module computes."""
    if isinstance(block, ResidualAttentionBlock):
        return not hasattr(block, CROSS_ATTENTION_NORM)
    return isinstance(block, CustomResidualAttentionBlock) and block.attn.logit_scale is None


class Block:
    """The pieces of one block, on packed rows: attention is left to the caller.

    Args:
        block: A module for which `is_known` holds.
        name: Its name in the tower, by which tuned LayerNorms are found.
    """

    def __init__(self, block: Any, name: str) -> None:
        self._block = block
        self._name = name
        self.heads: int = block.attn.num_heads
        self._custom = isinstance(block, CustomResidualAttentionBlock)
        activation = block.mlp.gelu
        self._quick = isinstance(activation, QuickGELU) and not self._custom
        self._gelu = isinstance(activation, nn.GELU) and not self._custom

    def norms(self) -> dict[str, Tensor]:
        """The parameters of the block's two LayerNorms, by name."""
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
        """Rows [T, d] as attention sees them."""
        return self._norm("ln_1", x, norms)

    def project(self, h: Tensor, parts: slice) -> Tensor:
        """Normalised rows [T, d] to the chosen ones of q, k and v: [T, parts, H, D]."""
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
        """Residual rows x [T, d] and attention's output [T, H, D] to the block's output [T, d].

        Without a graph, memory is written over where it can be: new memory costs as much as the arithmetic on it.
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
        if self._quick:  # x σ(kx) = silu(kx) / k, and both factors are absorbed by the matrix products
            up, down = block.mlp.c_fc, block.mlp.c_proj
            h = F.silu(torch.addmm(up.bias, h, up.weight.t(), beta=QUICK, alpha=QUICK), inplace=not graph)
            h = torch.addmm(down.bias, h, down.weight.t(), alpha=1 / QUICK)
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
    """Packed rows [T, d] through all blocks: [T, d], or the rows [N, d] that `attention` selects.

    In the last block only the selected rows are queries: the others' outputs would be thrown away.

    Args:
        blocks: The tower's blocks.
        x: The rows that enter the first block.
        attention: How the rows attend to each other.
        insert: Puts the prompts of each layer in place.
        norms: LayerNorm parameters by name, in place of the tower's own.
        observer: Is given the index and the input rows of each block.
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
