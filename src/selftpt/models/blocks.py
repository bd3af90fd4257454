"""One pre-norm block of an open_clip transformer, taken apart so that the walks can use its pieces."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from open_clip.transformer import CustomResidualAttentionBlock, QuickGELU, ResidualAttentionBlock
from torch import Tensor, nn

QUICK = 1.702  # QuickGELU(x) = x * sigmoid(1.702 x)


def is_known(block: nn.Module) -> bool:
    """Whether `Block` computes what this module computes."""
    if isinstance(block, ResidualAttentionBlock):
        return not hasattr(block, "ln_1_kv")
    return isinstance(block, CustomResidualAttentionBlock) and block.attn.logit_scale is None


class Block:
    """The pieces of one block, on packed rows: attention is left to the caller."""

    def __init__(self, block: Any) -> None:
        self._block = block
        attention = block.attn
        self.heads: int = attention.num_heads
        self._weight, self._bias = attention.in_proj_weight, attention.in_proj_bias
        self._custom = isinstance(block, CustomResidualAttentionBlock)
        activation = block.mlp.gelu
        self._quick = isinstance(activation, QuickGELU) and not self._custom
        self._gelu = isinstance(activation, nn.GELU) and not self._custom

    def norm(self, x: Tensor) -> Tensor:
        """Rows [T, d] as attention sees them."""
        return self._block.ln_1(x)  # type: ignore[no-any-return]

    def project(self, h: Tensor, parts: slice) -> Tensor:
        """Normed rows [T, d] to the chosen ones of q, k and v: [T, parts, H, D]."""
        d = h.shape[-1]
        rows = slice(parts.start * d, parts.stop * d)
        bias = None if self._bias is None else self._bias[rows]
        out = F.linear(h, self._weight[rows], bias).view(len(h), parts.stop - parts.start, self.heads, d // self.heads)
        if self._custom:
            norms: list[nn.Module] = [self._block.attn.ln_q, self._block.attn.ln_k, nn.Identity()][parts]
            out = torch.stack([norm(piece) for norm, piece in zip(norms, out.unbind(1), strict=True)], 1)
        return out

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
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
        h = block.ln_2(x)
        if self._quick:  # x σ(kx) = silu(kx) / k, and both factors ride on the matrix products
            up, down = block.mlp.c_fc, block.mlp.c_proj
            h = F.silu(torch.addmm(up.bias, h, up.weight.t(), beta=QUICK, alpha=QUICK), inplace=not graph)
            h = torch.addmm(down.bias, h, down.weight.t(), alpha=1 / QUICK)
        elif self._gelu and not graph:
            h = block.mlp.c_fc(h)
            h = block.mlp.c_proj(torch.ops.aten.gelu_(h, approximate=block.mlp.gelu.approximate))
        else:
            h = block.mlp(h)
        return x + block.ls_2(h) if graph else block.ls_2(h).add_(x)  # type: ignore[no-any-return]
