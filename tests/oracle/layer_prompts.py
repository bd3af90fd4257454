"""Reference implementation of prompts per layer.

open_clip's own blocks process every position, and `torch.cat` replaces rows between them. Read-only prompts are
expressed as attention masks: a column of minus infinity for every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.helpers.models import Small
from tests.oracle.reference import math_attention

HIDDEN = float("-inf")


def image_features(
    small: Small,
    pixels: Tensor,
    vectors: Tensor,
    read_only: bool = False,
    mask: Tensor | None = None,
    hidden_states: list[Tensor] | None = None,
) -> Tensor:
    """Return features of pixels [B, 3, S, S] with prompts [J, n, d] at the end of the sequence.

    Args:
        hidden_states: List to which the input of each block is appended.
    """
    visual = small.clip.visual
    count = vectors.shape[1]
    patches = visual.conv1(pixels).flatten(2).transpose(1, 2)
    x = torch.cat([visual.class_embedding.expand(len(pixels), 1, -1), patches], 1) + visual.positional_embedding
    length = x.shape[1]
    x = visual.ln_pre(torch.cat([x, vectors[0].expand(len(pixels), -1, -1)], 1))
    if mask is None:
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    if read_only:
        mask = torch.cat([mask[:, :length], torch.full((len(mask), count), HIDDEN, dtype=x.dtype)], 1)
    for layer, block in enumerate(visual.transformer.resblocks):
        if 0 < layer < len(vectors):
            x = torch.cat([x[:, :length], vectors[layer].expand(len(pixels), -1, -1)], 1)
        if hidden_states is not None:
            hidden_states.append(x)
        x = block(x, attn_mask=mask)
    if read_only:
        pooled = torch.stack([visual.ln_post(x[:, length + k]) for k in range(count)], 1)
    else:
        pooled = visual._pool(x[:, :length])[0]
    return pooled if visual.proj is None else pooled @ visual.proj


def text_features(
    small: Small, sentences: Sequence[str], vectors: Tensor, first: int = 0, read_only: bool = False
) -> Tensor:
    """Return features of sentences in which prompts [J, n, d] replace n tokens after the start token.

    Args:
        first: Number of tokens between the start token and the prompts.
        read_only: Whether the prompts instead replace the padding after the end-of-text token.
    """
    text, count = small.text, vectors.shape[1]
    ids = small.tokenizer(list(sentences), context_length=small.context)
    ends = [row.index(small.spec.frame.end) for row in ids.tolist()]
    embedded = text.token_embedding(ids)
    x = embedded + text.positional_embedding
    start = [len(small.spec.frame.start) + first for _ in ends]
    if read_only:
        start = [end + 1 for end in ends]

    def put(x: Tensor, values: Tensor) -> Tensor:
        rows = [torch.cat([row[:at], values, row[at + count :]]) for row, at in zip(x, start, strict=True)]
        return torch.stack(rows)

    if read_only:
        x = put(x, vectors[0])
    else:
        x = put(embedded, vectors[0]) + text.positional_embedding
    mask = torch.zeros(len(ids), x.shape[1], x.shape[1], dtype=x.dtype)
    if small.spec.causal:
        mask = mask + torch.full(mask.shape[1:], HIDDEN, dtype=x.dtype).triu(1)
    if read_only:
        for row, end in zip(mask, ends, strict=True):
            row[:, end + 1 :] = HIDDEN
    mask = mask.repeat_interleave(text.transformer.resblocks[0].attn.num_heads, 0)
    with math_attention():
        for layer, block in enumerate(text.transformer.resblocks):
            if 0 < layer < len(vectors):
                x = put(x, vectors[layer])
            x = block(x, attn_mask=mask)
    x = text.ln_final(x)
    if read_only:
        pooled = torch.stack([row[end + 1 : end + 1 + count] for row, end in zip(x, ends, strict=True)])
    elif small.spec.pool == "end":
        pooled = torch.stack([row[end] for row, end in zip(x, ends, strict=True)])
    else:
        pooled = x[:, -1]
    if isinstance(text.text_projection, nn.Module):
        return text.text_projection(pooled)
    return pooled if text.text_projection is None else pooled @ text.text_projection
