"""Prompt and class names to text features, exactly, with no wasted token: the hot path.

Attention in CLIP's text tower is causal and only the end-of-text row is pooled. So what stands after that row is
never computed, what stands before the class name is computed once for all classes, and what does not depend on
the prompt is computed once for all steps. The result equals the plain walk over every position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from selftpt.config import VIEWS, View
from selftpt.models.blocks import Block, is_known
from selftpt.models.tokenizer import ClassTokens, Tokenizer

WIDE = 64  # classes that a packed walk without a graph takes at once, at least: it needs little memory for each
KeyValue = tuple[Tensor, Tensor]  # of one layer, each [H, 1 or n, rows, D]


def before_name(view: View, length: int) -> int:
    """How many of `length` prompt vectors stand before the class name (Eq. 7; the middle of an odd M is M // 2)."""
    return {"end": length, "front": 0, "middle": length // 2}[view]


@dataclass(frozen=True)
class Segment:
    """`count` sequences of `size` rows in a packed tensor; a row attends to what is before it and to its own past.

    past: keys and values of constant rows that stand before, one pair a layer.
    prefix: how many rows of the first segment stand between `past` and these.
    """

    count: int
    size: int
    past: list[KeyValue]
    prefix: int = 0


class TextTower:
    """The text half of an open_clip model; `short` says whether the short way computes what it computes."""

    def __init__(self, clip: Any, tokenizer: Tokenizer) -> None:
        self.clip = clip
        self.tokenizer = tokenizer
        part: Any = clip if isinstance(clip, open_clip.CLIP) else clip.text
        self.part = part
        own = hasattr(part, "token_embedding")
        self.embedding: nn.Embedding = part.token_embedding if own else part.transformer.get_input_embeddings()
        self.short = self._is_causal() and self._pools_end()
        if self.short:
            self.blocks = [Block(block) for block in part.transformer.resblocks]
            heads = self.blocks[0].heads
            nothing = self.embedding.weight.new_empty(heads, 1, 0, self.width // heads)
            start = torch.tensor([tokenizer.start], dtype=torch.long, device=self.device)
            self.start = self.constants(start, 0, [(nothing, nothing)] * len(self.blocks))

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def width(self) -> int:
        return self.embedding.weight.shape[1]

    def _is_causal(self) -> bool:
        part, blocks = self.part, getattr(self.part.transformer, "resblocks", None)
        if blocks is None or part.attn_mask is None or getattr(part, "cls_emb", None) is not None:
            return False
        causal = torch.full_like(part.attn_mask, float("-inf")).triu(1)
        return all(is_known(block) for block in blocks) and torch.equal(part.attn_mask, causal)

    def _pools_end(self) -> bool:
        of_clip = isinstance(self.part, open_clip.CLIP)
        pool = self.part.text_pool_type if of_clip else self.part.pool_type
        if pool == "argmax":
            return self.tokenizer.end == (self.embedding.num_embeddings - 1,)
        return pool == "eos" and self.tokenizer.end == (self.part.text_eos_id if of_clip else self.part.eos_id,)

    def words(self, text: str) -> Tensor:
        """The embeddings of the words of `text`: [tokens, d]."""
        ids = torch.tensor(self.tokenizer.encode(text), dtype=torch.long, device=self.device)
        return self.embedding.weight[ids].detach()

    @torch.no_grad()
    def constants(self, ids: Tensor, position: int, past: list[KeyValue]) -> list[KeyValue]:
        """Keys and values of `past` and of the token ids [n, S] that follow it, one pair a layer."""
        positions = self.part.positional_embedding[position : position + ids.shape[1]]
        kept: list[KeyValue] = []
        self.walk(
            (self.embedding.weight[ids] + positions).flatten(0, 1), [Segment(len(ids), ids.shape[1], past)], keep=kept
        )
        return kept

    def walk(
        self, x: Tensor, segments: Sequence[Segment], ends: Tensor | None = None, keep: list[KeyValue] | None = None
    ) -> Tensor:
        """Packed rows [T, d] through all blocks: [T, d], or the rows `ends` of the last block alone.

        ends: the last row of every sequence but the first segment's, in order.
        keep: is filled with all keys and values of the first segment, its past's included, one pair a layer.
        """
        sizes = [segment.count * segment.size for segment in segments]
        for layer, block in enumerate(self.blocks):
            last = ends is not None and layer == len(self.blocks) - 1
            h = block.norm(x)
            rows = block.project(h, slice(int(last), 3)).split(sizes)
            queries: list[Tensor | None] = [None] * len(segments)
            if last:  # only the end rows ask, and the shared prefix has none
                x = x[ends]
                counts = [segment.count for segment in segments[1:]]
                queries[1:] = block.project(h[ends], slice(0, 1)).split(counts)
            out = []
            shared: KeyValue | None = None
            for segment, packed, query in zip(segments, rows, queries, strict=True):
                *asks, k, v = packed.unflatten(0, (segment.count, segment.size)).permute(2, 3, 0, 1, 4)  # [H, n, S, D]
                before = segment.past[layer]
                if shared is None:
                    shared = k, v
                elif segment.prefix:
                    before_k, before_v = (
                        torch.cat([past, new[:, :, : segment.prefix]], 2)
                        for past, new in zip(before, shared, strict=True)
                    )
                    before = before_k, before_v
                if keep is not None:
                    keep.append((_after(before[0], k), _after(before[1], v)))
                if query is not None:
                    asks = [query.permute(2, 0, 1, 3)]
                if asks:
                    out.append(_attend(asks[0], before, k, v))
            x = block.finish(x, torch.cat(out))
        return x

    def pool(self, ends: Tensor) -> Tensor:
        """End-of-text rows [N, d] to features [N, D]."""
        x: Tensor = self.part.ln_final(ends)
        projection = self.part.text_projection
        if projection is not None:
            x = projection(x) if isinstance(projection, nn.Linear) else x @ projection
        return x


def _after(past: Tensor, new: Tensor) -> Tensor:
    """Keys or values [H, n, rows, D] behind those of the past, which all n may share."""
    return torch.cat([past.expand(-1, new.shape[1], -1, -1), new], 2)


def _attend(q: Tensor, before: KeyValue, k: Tensor, v: Tensor) -> Tensor:
    """Attention of n sequences to what is before them and, causally, to themselves: [n * S, H, D].

    q: [H, n, S or 1 (the last row), D]; k, v: [H, n, S, D].
    before: keys and values [H, n, c, D], or [H, 1, c, D] that all sequences share: those are never repeated.
    Written out because the fused kernels have no second derivative; at these lengths it is as fast.
    """
    heads, n, asking, width = q.shape
    old, new = before[0].shape[2], k.shape[2]
    groups = (heads * n, asking) if before[0].shape[1] == n else (heads, n * asking)
    # contiguous, so that what is kept for the backward pass is never a view that keeps all rows
    q, k, v = (t.reshape(heads * n, t.shape[2], width).contiguous() for t in (q, k, v))
    rows = q.view(*groups, width)
    before_k, before_v = (t.reshape(groups[0], old, width) for t in before)
    ahead = torch.full((asking, new), float("-inf"), dtype=q.dtype, device=q.device).triu(new - asking + 1)
    first = torch.bmm(rows, before_k.transpose(1, 2)).view(heads * n, asking, old)
    scores = torch.cat([first, torch.bmm(q, k.transpose(1, 2)) + ahead], -1) * width**-0.5
    to_old, to_new = scores.softmax(-1).split([old, new], -1)
    out = torch.bmm(to_old.reshape(*groups, old), before_v).view(heads * n, asking, width) + torch.bmm(to_new, v)
    return out.view(heads, n, asking, width).permute(1, 2, 0, 3).flatten(0, 1)


class PackedWalk:
    """The short way, for some classes: shared prefixes, no padding, only the end rows leave the last block.

    names: token ids; -1 - k among them is the k-th prompt vector.
    keep_front: keep the keys and values of `start name` in the front view, which do not depend on the prompt.
    """

    def __init__(
        self,
        tower: TextTower,
        names: Sequence[Sequence[int]],
        tail: Sequence[int],
        length: int,
        views: Sequence[View],
        keep_front: bool,
    ) -> None:
        self.tower = tower
        self.shape = (len(views), len(names))
        device, first = tower.device, len(tower.tokenizer.start)
        ending = torch.tensor([*tail, *tower.tokenizer.end], device=device)
        prompt = -1 - torch.arange(length, device=device)  # the k-th prompt vector, where an id would stand
        by_size: dict[int, list[int]] = {}
        for i, name in enumerate(names):
            by_size.setdefault(len(name), []).append(i)

        prefix = max(before_name(view, length) for view in views)
        ids, positions = [prompt[:prefix]], [torch.arange(first, first + prefix, device=device)]
        self.segments, order = [Segment(1, prefix, tower.start)], []
        for v, view in enumerate(views):
            before = before_name(view, length)
            for size, classes in sorted(by_size.items()):
                n, past = len(classes), tower.start
                ahead = torch.tensor([names[i] for i in classes], dtype=torch.long, device=device)
                position = first + before
                if view == "front" and keep_front:
                    past, ahead = tower.constants(ahead, first, past), ahead[:, :0]
                    position += size
                sequence = torch.cat([ahead, prompt[before:].expand(n, -1), ending.expand(n, -1)], 1)
                ids.append(sequence.flatten())
                positions.append(torch.arange(position, position + sequence.shape[1], device=device).repeat(n))
                self.segments.append(Segment(n, sequence.shape[1], past, before))
                order.append(torch.tensor(classes, device=device) + v * len(names))
        rows = torch.cat(ids)
        self.ids, self.positions = rows.clamp(min=0), torch.cat(positions)
        self.prompt_rows = (rows < 0).nonzero()[:, 0]
        self.prompt_index = -1 - rows[self.prompt_rows]
        sizes = torch.tensor([s.size for s in self.segments[1:]], device=device)
        counts = torch.tensor([s.count for s in self.segments[1:]], device=device)
        self.ends = prefix + sizes.repeat_interleave(counts).cumsum(0) - 1
        self.inverse = torch.cat(order).argsort()

    def __call__(self, prompt: Tensor) -> Tensor:
        """Prompt [M, d] to features [views, classes, D]."""
        x = self.tower.embedding.weight[self.ids].index_fill(0, self.prompt_rows, 0.0)
        x = x + self.tower.part.positional_embedding[self.positions]
        x = x.index_add(0, self.prompt_rows, prompt[self.prompt_index])
        features = self.tower.pool(self.tower.walk(x, self.segments, self.ends))
        return features[self.inverse].view(*self.shape, -1)


class PlainWalk:
    """open_clip's own text encoder over every position, the prompt put in place of stand-in tokens.

    names: token ids; -1 - k among them is the k-th prompt vector.
    """

    def __init__(
        self, tower: TextTower, names: Sequence[Sequence[int]], tail: Sequence[int], length: int, views: Sequence[View]
    ) -> None:
        self.tower = tower
        self.shape = (len(views), len(names))
        sentences: list[list[int]] = []
        prompt = [-1 - k for k in range(length)]  # the k-th prompt vector, where an id would stand
        for view in views:
            before = before_name(view, length)
            for name in names:
                sentences.append(tower.tokenizer.sentence([*prompt[:before], *name, *prompt[before:], *tail]))
        ids = torch.tensor(sentences, device=tower.device)
        self.rows = (ids.flatten() < 0).nonzero()[:, 0]
        self.index = -1 - ids.flatten()[self.rows]
        self.ids = ids.where(ids >= 0, tower.tokenizer.encode("photo")[0])  # neither padding nor an end

    def __call__(self, prompt: Tensor) -> Tensor:
        """Prompt [M, d] to features [views, classes, D]."""

        def place(_module: nn.Module, _args: Any, embedded: Tensor) -> Tensor:
            return embedded.flatten(0, 1).index_copy(0, self.rows, prompt[self.index]).view_as(embedded)

        hook = self.tower.embedding.register_forward_hook(place)
        try:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
                features: Tensor = self.tower.clip.encode_text(self.ids, normalize=False)
        finally:
            hook.remove()
        return features.view(*self.shape, -1)


def _walk(
    tower: TextTower,
    names: Sequence[Sequence[int]],
    tail: Sequence[int],
    length: int,
    views: Sequence[View],
    keep_front: bool,
) -> PackedWalk | PlainWalk:
    """The shortest way that computes what the tower computes."""
    if tower.short:
        return PackedWalk(tower, names, tail, length, views, keep_front)
    return PlainWalk(tower, names, tail, length, views)


def encode_pairs(tower: TextTower, prompts: Tensor, names: Sequence[Sequence[int]]) -> Tensor:
    """Features [B, D] of B sentences, each with a prompt of its own [B, M, d] before the token ids of its name."""
    slots = (-1 - torch.arange(prompts[..., 0].numel())).view(prompts.shape[:2]).tolist()
    sentences = [[*slot, *name] for slot, name in zip(slots, names, strict=True)]
    ending = tower.tokenizer.encode(".", after="photo")
    return _walk(tower, sentences, ending, 0, ("end",), keep_front=False)(prompts.flatten(0, 1))[0]


class TextEncoder:
    """The features of a class list under a prompt of `length` vectors, in some views.

    chunk: walk at most so many classes at once where a graph is kept. A longer list is cut into chunks of names of like
    length, and its gradients (`pull`, `curve`) are computed chunk by chunk, so that with the list only the features
    themselves grow.
    """

    def __init__(
        self,
        tower: TextTower,
        tokens: ClassTokens,
        length: int,
        views: Sequence[View] = VIEWS,
        tail: str = ".",
        chunk: int | None = None,
    ) -> None:
        self.tower, self.views = tower, tuple(views)
        by_size = torch.tensor(sorted(range(len(tokens)), key=lambda i: len(tokens.ids[i])), device=tower.device)
        size = chunk or len(tokens)
        self.whole = len(tokens) <= size
        self.inverse = by_size.argsort()
        self.tick: Callable[[], object] = lambda: None  # is told of every walk, for a progress bar
        ending = tower.tokenizer.encode(tail, after="photo")

        def walk(classes: Tensor) -> PackedWalk | PlainWalk:
            names = [tokens.ids[i] for i in classes.tolist()]
            return _walk(tower, names, ending, length, views, keep_front=self.whole)

        self.chunks = by_size.split(size)
        self.walks = [walk(classes) for classes in self.chunks]
        enough = self.whole or size >= WIDE or not tower.short
        self.wide = self.walks if enough else [walk(classes) for classes in by_size.split(WIDE)]

    def __call__(self, prompt: Tensor) -> Tensor:
        """Prompt [M, d] to features [V, C, D]. With a graph, if the prompt asks for one: a large one if chunked."""
        features = []
        for walk in self.wide:
            features.append(walk(prompt))
            self.tick()
        return torch.cat(features, 1)[:, self.inverse]

    def pull(self, prompt: Tensor, *cotangents: Tensor) -> list[Tensor]:
        """Jᵀu for each u [V, C, D], chunk by chunk: [M, d] each."""
        pulled = [torch.zeros_like(prompt) for _ in cotangents]
        for classes, walk in zip(self.chunks, self.walks, strict=True):
            p = prompt.detach().requires_grad_()
            features = walk(p)
            for i, u in enumerate(cotangents):
                more = i + 1 < len(cotangents)
                pulled[i] += torch.autograd.grad(features, p, u[:, classes], retain_graph=more)[0]
            self.tick()
        return pulled

    def curve(self, prompt: Tensor, cotangent: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """The second derivative of u·f along v, Σ u·∂²f·v [M, d], and J v [V, C, D], chunk by chunk."""
        curved, moved = torch.zeros_like(prompt), torch.empty_like(cotangent)
        for classes, walk in zip(self.chunks, self.walks, strict=True):
            p = prompt.detach().requires_grad_()
            u = cotangent[:, classes].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(walk(p), p, u, create_graph=True)
            along, moved[:, classes] = torch.autograd.grad((gradient * direction).sum(), [p, u])
            curved += along
        return curved, moved


@torch.no_grad()
def encode_template(tower: TextTower, tokens: ClassTokens, template: str, chunk: int | None = None) -> Tensor:
    """The features [C, D] of class names in a hand-written sentence such as "a photo of a {}." (Eq. 8).

    It is the end view with the sentence's own words for a prompt.
    """
    words, tail = template.split("{}")
    prompt = tower.words(words)
    return TextEncoder(tower, tokens, len(prompt), ("end",), tail, chunk)(prompt)[0]
