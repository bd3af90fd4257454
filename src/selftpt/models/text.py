"""Prompt and class names to text features, exactly, without a wasted token: the hot path.

Attention in CLIP's text tower is causal and only the end-of-text position is pooled. So what stands after that
position is never computed, what all classes begin with is computed once for all of them, and what does not depend on
the prompt is computed once for all steps. The result equals the forward pass over every position.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.hf_model import HFTextEncoder
from open_clip.transformer import text_global_pool
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from selftpt.config import VIEWS, View
from selftpt.errors import SelfTPTError
from selftpt.models.blocks import Block, Insert, LayerPrompts, Observer, check_layers, is_known, run_blocks
from selftpt.models.open_clip_api import text_module
from selftpt.models.tokenizer import ClassTokens, Tokenizer, end_ids

WIDE = 64  # sentences of one packed forward pass without a graph, at least: it needs little memory for each
KeyValue = tuple[Tensor, Tensor]  # of one layer, each [H, 1 or n, rows, D]
TokenIds = Sequence[int]  # without start, end and padding; -1 - k stands for the k-th prompt vector


def before_name(view: View, length: int) -> int:
    """How many of `length` prompt vectors stand before the class name (Eq. 7; the middle of an odd M is M // 2)."""
    return {"end": length, "front": 0, "middle": length // 2}[view]


@dataclass(frozen=True)
class Segment:
    """`count` sequences of `size` rows each in a packed tensor. A row attends to what is before it and to itself.

    Attributes:
        past: Keys and values of constant rows that stand before the sequences, one pair per layer.
        prefix: How many rows of the first segment stand between `past` and the sequences.
        outputs: How many rows at the end of each sequence are read after the last block.
        read_only: Whether the rows attend to `past` alone.
    """

    count: int
    size: int
    past: list[KeyValue]
    prefix: int = 0
    outputs: int = 1
    read_only: bool = False


class PackedAttention:
    """Causal attention of packed sequences.

    Args:
        segments: The sequences, in the order of the rows. The first segment holds the shared prefix.
        ends: The rows that are read after the last block, in order; none are in the first segment.
        kept: Is filled with all keys and values of the first segment, its past's included, one pair per layer.
    """

    def __init__(
        self, segments: Sequence[Segment], ends: Tensor | None = None, kept: list[KeyValue] | None = None
    ) -> None:
        self._segments, self._ends, self._kept = segments, ends, kept
        self._sizes = [segment.count * segment.size for segment in segments]
        self._outputs = [segment.count * segment.outputs for segment in segments[1:]]
        self.selects = ends is not None

    def select(self, x: Tensor) -> Tensor:
        return x[self._ends]

    def __call__(self, layer: int, projected: Tensor, queries: Tensor | None) -> Tensor:
        selected: list[Tensor | None] = [None] * len(self._segments)
        if queries is not None:  # the shared prefix has none
            selected[1:] = queries[:, 0].split(self._outputs)
        out = []
        shared: KeyValue | None = None
        for segment, rows, query in zip(self._segments, projected.split(self._sizes), selected, strict=True):
            *q, k, v = rows.unflatten(0, (segment.count, segment.size)).permute(2, 3, 0, 1, 4)  # each [H, n, S, D]
            before = segment.past[layer]
            if shared is None:
                shared = k, v
            elif segment.prefix:
                before_k, before_v = (
                    torch.cat([past, new[:, :, : segment.prefix]], 2) for past, new in zip(before, shared, strict=True)
                )
                before = before_k, before_v
            if self._kept is not None:
                self._kept.append((_append(before[0], k), _append(before[1], v)))
            if segment.read_only:
                k, v = k[:, :, :0], v[:, :, :0]
            if query is not None:
                q = [query.unflatten(0, (segment.count, segment.outputs)).permute(2, 0, 1, 3)]
            if q:
                out.append(_attend(q[0], before, k, v))
        return torch.cat(out)


def _append(past: Tensor, new: Tensor) -> Tensor:
    """Keys or values [H, n, rows, D] after those of the past, which all n may share."""
    return torch.cat([past.expand(-1, new.shape[1], -1, -1), new], 2)


def _attend(q: Tensor, before: KeyValue, k: Tensor, v: Tensor) -> Tensor:
    """Attention of n sequences to what is before them and, causally, to themselves: [n * queries, H, D].

    Written out because the fused kernels have no second derivative; at these lengths it is as fast.

    Args:
        q: [H, n, queries, D], of the last rows of each sequence.
        before: Keys and values [H, n, c, D], or [H, 1, c, D] that all sequences share: those are never repeated.
        k: [H, n, S, D].
        v: [H, n, S, D].
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


class TextTower(nn.Module):
    """The text half of an open_clip model.

    Attributes:
        supports_packed: Whether attention is causal and the end-of-text position is pooled, so that
            `PackedTextForward` computes what the tower computes.
    """

    def __init__(self, clip: Any, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.encoder: Any = text_module(clip)
        self._is_hf = isinstance(self.encoder, HFTextEncoder)
        self.supports_packed = self._is_causal() and self._pools_end()
        if self.supports_packed:
            blocks = enumerate(self.encoder.transformer.resblocks)
            self._blocks = [Block(block, f"transformer.resblocks.{i}") for i, block in blocks]
            heads = self._blocks[0].heads
            nothing = self.embedding.weight.new_empty(heads, 1, 0, self.width // heads)
            start = torch.tensor([tokenizer.start], dtype=torch.long, device=self.device)
            self.start = self.constants(start, 0, [(nothing, nothing)] * len(self._blocks))

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding."""
        encoder = self.encoder
        return encoder.transformer.get_input_embeddings() if self._is_hf else encoder.token_embedding  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def width(self) -> int:
        return self.embedding.weight.shape[1]

    @property
    def layers(self) -> int:
        """How many layers prompts may have."""
        return 1 if self._is_hf else len(self.encoder.transformer.resblocks)

    def _is_causal(self) -> bool:
        encoder = self.encoder
        if self._is_hf or encoder.attn_mask is None or encoder.cls_emb is not None:
            return False
        causal = torch.full_like(encoder.attn_mask, float("-inf")).triu(1)
        return all(map(is_known, encoder.transformer.resblocks)) and torch.equal(encoder.attn_mask, causal)

    def _pools_end(self) -> bool:
        if self.encoder.pool_type == "argmax":
            return self.tokenizer.end == (self.embedding.num_embeddings - 1,)
        return self.encoder.pool_type == "eos" and self.tokenizer.end == (self.encoder.eos_id,)

    def words(self, text: str) -> Tensor:
        """The embeddings of the words of `text`: [tokens, d]."""
        ids = torch.tensor(self.tokenizer.encode(text), dtype=torch.long, device=self.device)
        return self.embedding.weight[ids].detach()

    def forward(self, ids: Tensor, insert: Insert | None = None) -> Tensor:
        """Token ids [N, context], as the tokenizer of open_clip makes them, to features [N, D], over every position.

        Args:
            ids: Token ids with start, end and padding.
            insert: Puts prompts into the rows [N * rows, d] that enter each block. In an encoder of transformers only
                layer 0 is within reach, and its positional embedding is not yet in it.
        """
        with MathAttention() if torch.is_grad_enabled() else contextlib.nullcontext():
            return self._encode_hf(ids, insert) if self._is_hf else self._encode(ids, insert)

    def _encode(self, ids: Tensor, insert: Insert | None) -> Tensor:
        encoder = self.encoder
        x, mask = encoder._embeds(ids)
        for layer, block in enumerate(encoder.transformer.resblocks):
            if insert is not None:
                x = insert(layer, x.flatten(0, 1)).view_as(x)
            x = block(x, attn_mask=mask)
        if encoder.cls_emb is not None:
            return self.pool(x[:, -1])
        return self.pool(x, lambda x: text_global_pool(x, ids, encoder.pool_type, eos_token_id=encoder.eos_id))

    def _encode_hf(self, ids: Tensor, insert: Insert | None) -> Tensor:
        encoder = self.encoder
        x = self.embedding(ids)
        if insert is not None:
            x = insert(0, x.flatten(0, 1)).view_as(x)
        mask = (ids != encoder.config.pad_token_id).long()
        states = encoder.transformer(inputs_embeds=x, attention_mask=mask)
        return encoder.proj(encoder.pooler(states, mask))  # type: ignore[no-any-return]

    @torch.inference_mode(False)
    @torch.no_grad()
    def constants(self, ids: Tensor, position: int, past: list[KeyValue]) -> list[KeyValue]:
        """Keys and values of `past` and of the token ids [n, S] that follow it, one pair per layer."""
        positions = self.encoder.positional_embedding[position : position + ids.shape[1]]
        x = (self.embedding.weight[ids] + positions).flatten(0, 1)
        kept: list[KeyValue] = []
        run_blocks(self._blocks, x, PackedAttention([Segment(len(ids), ids.shape[1], past)], kept=kept))
        return kept

    def run_packed(
        self,
        x: Tensor,
        segments: Sequence[Segment],
        ends: Tensor,
        insert: Insert | None,
        observer: Observer | None,
    ) -> Tensor:
        """Packed rows [T, d] to the features [N, D] of the rows `ends` [N]."""
        attention = PackedAttention(segments, ends)
        return self.pool(run_blocks(self._blocks, x, attention, insert=insert, observer=observer))

    def pool(self, x: Tensor, select: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """Rows [..., d] after the last block to features [..., D], of the rows that are selected."""
        x = select(self.encoder.ln_final(x))
        projection = self.encoder.text_projection
        if projection is not None:
            x = projection(x) if isinstance(projection, nn.Linear) else x @ projection
        return x


class MathAttention(TorchFunctionMode):
    """Attention by matrix products, in this thread alone: the fused kernels have no second derivative.

    `torch.nn.attention.sdpa_kernel` is no alternative, for it changes flags that all threads share.
    """

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
            return func(*args, **kwargs)[0], None
        if func is F.scaled_dot_product_attention:
            return _attention_by_products(*args, **kwargs)
        return func(*args, **kwargs)


def _attention_by_products(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **rest: Any) -> Tensor:
    """What `F.scaled_dot_product_attention` computes."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, attn_mask, **rest)[0]  # type: ignore[no-any-return]


class PackedTextForward:
    """Text features of some sentences by the shortest exact computation, for a tower with `supports_packed`.

    Shared prefixes run once, nothing is padded, and only the end-of-text position is a query in the last block.

    Args:
        tower: The text tower.
        groups: For each of V groups, such as the views of a class list, the token ids of n sentences. All sentences of
            a group share their longest common prefix, and all groups share it as far as they agree.
        keep_constants: Keep the keys and values of what stands before the first prompt vector of a sentence, which no
            prompt changes. They need memory for each sentence.
    """

    @torch.inference_mode(False)
    def __init__(self, tower: TextTower, groups: Sequence[Sequence[TokenIds]], keep_constants: bool) -> None:
        self.tower = tower
        self.shape = (len(groups), len(groups[0]))
        device, first, end = tower.device, len(tower.tokenizer.start), tower.tokenizer.end
        prefixes = [() if keep_constants and _has_constants(group) else _common_prefix(group) for group in groups]
        shared = max(prefixes, key=len)
        ids, positions = [torch.tensor(shared, dtype=torch.long)], [torch.arange(first, first + len(shared))]
        self.segments, order = [Segment(1, len(shared), tower.start)], []
        for g, (group, own) in enumerate(zip(groups, prefixes, strict=True)):
            prefix = len(_common_prefix([own, shared]))
            buckets: dict[tuple[int, int], list[int]] = {}
            for i, sentence in enumerate(group):
                constant = _before_prompt(sentence) if keep_constants and not prefix else 0
                buckets.setdefault((constant, len(sentence)), []).append(i)
            for (constant, size), members in sorted(buckets.items()):
                n, begin, past = len(members), prefix + constant, tower.start
                if constant:
                    ahead = torch.tensor([group[i][:constant] for i in members], device=device)
                    past = tower.constants(ahead, first, past)
                ids.append(torch.tensor([[*group[i][begin:], *end] for i in members]).flatten())
                positions.append(torch.arange(first + begin, first + size + len(end)).repeat(n))
                self.segments.append(Segment(n, size - begin + len(end), past, prefix))
                order.append(torch.tensor(members) + g * len(group))
        rows = torch.cat(ids).to(device)
        self.ids, self.positions = rows.clamp(min=0), torch.cat(positions).to(device)
        self.prompt_rows = (rows < 0).nonzero()[:, 0]
        self.prompt_index = -1 - rows[self.prompt_rows]
        self.ends, self.inverse = _ends(self.segments).to(device), torch.cat(order).argsort().to(device)

    def __call__(self, prompt: Tensor, observer: Observer | None = None) -> Tensor:
        """Prompt [M, d], or [J, M, d] for the first J layers, to features [V, n, D].

        The observer is given the packed rows [T, d] of each layer, those of the shared prefix first.
        """
        vectors = prompt if prompt.ndim == 3 else prompt[None]
        check_layers(vectors, self.tower.layers, self.tower.width)
        x = self.tower.embedding.weight[self.ids].index_fill(0, self.prompt_rows, 0.0)
        x = x + self.tower.encoder.positional_embedding[self.positions]
        x = x.index_add(0, self.prompt_rows, vectors[0][self.prompt_index])

        def insert(layer: int, rows: Tensor) -> Tensor:
            if not 0 < layer < len(vectors):
                return rows
            return rows.index_copy(0, self.prompt_rows, vectors[layer][self.prompt_index])

        features = self.tower.run_packed(x, self.segments, self.ends, insert, observer)
        return features[self.inverse].view(*self.shape, -1)


class ReadOnlyTextForward:
    """Features of n prompt rows after the end-of-text token of each sentence, which read it and change nothing in it.

    The sentences' keys and values are constants, and the prompts are mere queries. For a tower with `supports_packed`.
    """

    @torch.inference_mode(False)
    def __init__(self, tower: TextTower, sentences: Sequence[TokenIds], count: int) -> None:
        self.tower, self.count = tower, count
        by_size: dict[int, list[int]] = {}
        for i, sentence in enumerate(sentences):
            by_size.setdefault(len(sentence), []).append(i)
        self.segments, order = [Segment(1, 0, tower.start)], []
        for members in by_size.values():
            ids = torch.tensor([[*sentences[i], *tower.tokenizer.end] for i in members], device=tower.device)
            past = tower.constants(ids, len(tower.tokenizer.start), tower.start)
            self.segments.append(Segment(len(members), count, past, outputs=count, read_only=True))
            order += members
        self.ends = torch.arange(len(sentences) * count, device=tower.device)
        self.inverse = torch.tensor(order, device=tower.device).argsort()

    def __call__(self, vectors: Tensor, observer: Observer | None = None) -> Tensor:
        """Vectors [J, n, d] of the first J layers to features [sentences, n, D]."""
        repeats = len(self.inverse)

        def insert(layer: int, rows: Tensor) -> Tensor:
            return vectors[layer].repeat(repeats, 1) if 0 < layer < len(vectors) else rows

        x = vectors[0].repeat(repeats, 1)
        rows = self.tower.run_packed(x, self.segments, self.ends, insert, observer)
        features: Tensor = rows.unflatten(0, (repeats, self.count))[self.inverse]
        return features


class ReferenceTextForward:
    """Text features by open_clip's own modules over every position: for the towers that are not causal.

    Args:
        tower: The text tower.
        groups: For each of V groups, the token ids of n sentences.
    """

    @torch.inference_mode(False)
    def __init__(self, tower: TextTower, groups: Sequence[Sequence[TokenIds]]) -> None:
        self.tower = tower
        self.shape = (len(groups), len(groups[0]))
        ids = torch.tensor([tower.tokenizer.sentence(sentence) for group in groups for sentence in group])
        ids = ids.to(tower.device)
        extra = 0 if tower._is_hf or tower.encoder.cls_emb is None else 1  # CoCa appends a class token to the rows
        sentence, self.positions = (ids < 0).nonzero(as_tuple=True)
        self.rows = sentence * (ids.shape[1] + extra) + self.positions
        self.index = -1 - ids[ids < 0]
        self.ids = ids.where(ids >= 0, tower.tokenizer.encode("photo")[0])  # neither padding nor an end

    def __call__(self, prompt: Tensor) -> Tensor:
        """Prompt [M, d], or [J, M, d] for the first J layers, to features [V, n, D]."""
        vectors = prompt if prompt.ndim == 3 else prompt[None]
        check_layers(vectors, self.tower.layers, self.tower.width)

        def insert(layer: int, rows: Tensor) -> Tensor:
            if layer >= len(vectors):
                return rows
            values = vectors[layer][self.index]
            if layer == 0 and not self.tower._is_hf:
                values = values + self.tower.encoder.positional_embedding[self.positions]
            return rows.index_copy(0, self.rows, values)

        features: Tensor = self.tower(self.ids, insert)
        return features.view(*self.shape, -1)


def _common_prefix(sentences: Sequence[TokenIds]) -> TokenIds:
    """The longest prefix that all have."""
    low, high = (
        min(map(tuple, sentences)),
        max(map(tuple, sentences)),
    )  # in the order of lists: what they share, all share
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))]


def _before_prompt(sentence: TokenIds) -> int:
    """How many tokens stand before the first prompt vector; none if there is no prompt vector."""
    return next((i for i, token in enumerate(sentence) if token < 0), 0)


def _has_constants(group: Sequence[TokenIds]) -> bool:
    return any(map(_before_prompt, group))


def _ends(segments: Sequence[Segment]) -> Tensor:
    """The last row of every sequence but the first segment's."""
    sizes = torch.tensor([segment.size for segment in segments[1:]])
    counts = torch.tensor([segment.count for segment in segments[1:]])
    return segments[0].size + sizes.repeat_interleave(counts).cumsum(0) - 1


def text_forward(
    tower: TextTower, groups: Sequence[Sequence[TokenIds]], keep_constants: bool = False
) -> PackedTextForward | ReferenceTextForward:
    """The fastest forward pass that computes what the tower computes; see `PackedTextForward` for the arguments."""
    if tower.supports_packed:
        return PackedTextForward(tower, groups, keep_constants)
    return ReferenceTextForward(tower, groups)


def encode_sentences(
    tower: TextTower,
    sentences: Sequence[TokenIds],
    chunk: int | None = None,
    prompts: LayerPrompts | None = None,
) -> Tensor:
    """Features of sentences.

    Args:
        tower: The text tower.
        sentences: Token ids of N sentences, without start, end and padding. A common prefix is found and shared.
        chunk: At most so many sentences run at once.
        prompts: n prompt vectors per layer, in place of the first n tokens of each sentence; read-only ones stand
            after the end-of-text token.

    Returns:
        [N, D]; [N, n, D] if the prompts are read-only.
    """
    count = 0 if prompts is None else prompts.vectors.shape[1]
    read_only = prompts is not None and prompts.read_only
    vectors = tower.embedding.weight.new_empty(1, 0, tower.width) if prompts is None else prompts.vectors
    check_layers(vectors, tower.layers, tower.width)
    if read_only and not tower.supports_packed:
        raise SelfTPTError("read-only prompts need a causal text tower that pools the end-of-text token, as CLIP's")
    if count and not read_only:
        if min(map(len, sentences)) < count:
            raise SelfTPTError(f"{count} prompt vectors need sentences of at least {count} tokens to replace")
        slots = [-1 - k for k in range(count)]
        sentences = [[*slots, *sentence[count:]] for sentence in sentences]
    by_size = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    size = chunk or len(sentences)
    if tower.supports_packed and not (torch.is_grad_enabled() and vectors.requires_grad):
        size = max(size, WIDE)
    features = []
    for begin in range(0, len(sentences), size):
        some = [sentences[i] for i in by_size[begin : begin + size]]
        if read_only:
            features.append(ReadOnlyTextForward(tower, some, count)(vectors))
        else:
            features.append(text_forward(tower, [some])(vectors)[0])
    return torch.cat(features)[torch.tensor(by_size, device=tower.device).argsort()]


def encode_pairs(tower: TextTower, prompts: Tensor, endings: Sequence[TokenIds]) -> Tensor:
    """Features [B, D] of B sentences, each with a prompt of its own [B, M, d] before the token ids of its ending.

    Args:
        tower: The text tower.
        prompts: [B, M, d].
        endings: What follows each prompt, as `end_ids` makes it of class names.
    """
    slots = (-1 - torch.arange(prompts[..., 0].numel())).view(prompts.shape[:2]).tolist()
    sentences = [[*slot, *ending] for slot, ending in zip(slots, endings, strict=True)]
    return text_forward(tower, [sentences])(prompts.flatten(0, 1))[0]


@torch.no_grad()
def encode_template(tower: TextTower, tokens: ClassTokens, template: str, chunk: int | None = None) -> Tensor:
    """The features [C, D] of class names in a hand-crafted template such as "a photo of a {}." (Eq. 8).

    Each sentence is tokenised as a whole, as CLIP does.
    """
    sentences = [template.replace("{}", name) for name in tokens.names]
    return encode_sentences(tower, [tower.tokenizer.fitting(sentence) for sentence in sentences], chunk)


class TextEncoder:
    """The features of a class list under a prompt of `length` vectors, in some views.

    In the end view a class name and what stands beside it are tokenised together, as CLIP does; in the front and the
    middle view they are split after the name.

    Args:
        tower: The text tower.
        tokens: The class names.
        length: M, the number of prompt vectors.
        views: Where the prompt stands.
        tail: What every sentence ends with.
        chunk: At most so many classes run at once where a graph is kept. A longer list is cut into chunks of names of
            similar length, and its derivatives (`vjp`, `hvp`) are computed chunk by chunk, so that only the features
            themselves grow with the list.
        infix: Words between prompt and name in the end view, such as "of a " where the prompt stands for "a photo".

    Attributes:
        unchunked: Whether all classes run at once.
        forwards: The forward passes of the chunks.
        wide_forwards: Forward passes of more classes at once, for use without a graph.
        on_forward: Is called after every forward pass.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        tower: TextTower,
        tokens: ClassTokens,
        length: int,
        views: Sequence[View] = VIEWS,
        tail: str = ".",
        chunk: int | None = None,
        infix: str = "",
    ) -> None:
        self.tower, self.views = tower, tuple(views)
        ending = tower.tokenizer.encode(tail, after="photo")
        prompt = [-1 - k for k in range(length)]

        def sentences(view: View) -> list[TokenIds]:
            if view == "end":
                return [[*prompt, *ids] for ids in end_ids(tower.tokenizer, tokens.names, tail, infix)]
            before = before_name(view, length)
            return [[*prompt[:before], *name, *prompt[before:], *ending] for name in tokens.ids]

        groups = [sentences(view) for view in self.views]
        by_size = torch.tensor(sorted(range(len(tokens)), key=lambda i: len(tokens.ids[i])), device=tower.device)
        size = chunk or len(tokens)
        self.unchunked = len(tokens) <= size
        self.inverse = by_size.argsort()
        self.on_forward: Callable[[], object] = lambda: None

        def forward(classes: Tensor) -> PackedTextForward | ReferenceTextForward:
            some = [[group[i] for i in classes.tolist()] for group in groups]
            return text_forward(tower, some, keep_constants=self.unchunked)

        self.chunks = by_size.split(size)
        self.forwards = [forward(classes) for classes in self.chunks]
        wide_enough = self.unchunked or size >= WIDE or not tower.supports_packed
        self.wide_forwards = self.forwards if wide_enough else [forward(classes) for classes in by_size.split(WIDE)]

    def __call__(self, prompt: Tensor) -> Tensor:
        """Prompt [M, d], or [J, M, d] for the first J layers, to features [V, C, D].

        With a graph if the prompt requires one: a large one if the list is chunked.
        """
        features = []
        for forward in self.wide_forwards:
            features.append(forward(prompt))
            self.on_forward()
        return torch.cat(features, 1)[:, self.inverse]

    def vjp(self, prompt: Tensor, *cotangents: Tensor) -> list[Tensor]:
        """Vector-Jacobian products Jᵀu for each u [V, C, D], chunk by chunk: each of the shape of the prompt."""
        products = [torch.zeros_like(prompt) for _ in cotangents]
        for classes, forward in zip(self.chunks, self.forwards, strict=True):
            p = prompt.detach().requires_grad_()
            features = forward(p)
            for i, u in enumerate(cotangents):
                more = i + 1 < len(cotangents)
                products[i] += torch.autograd.grad(features, p, u[:, classes], retain_graph=more)[0]
            self.on_forward()
        return products

    def hvp(self, prompt: Tensor, cotangent: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """The Hessian-vector product of u·f along v, Σ u·∂²f·v, and J v [V, C, D], chunk by chunk."""
        product, moved = torch.zeros_like(prompt), torch.empty_like(cotangent)
        for classes, forward in zip(self.chunks, self.forwards, strict=True):
            p = prompt.detach().requires_grad_()
            u = cotangent[:, classes].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(forward(p), p, u, create_graph=True)
            along, moved[:, classes] = torch.autograd.grad((gradient * direction).sum(), [p, u])
            product += along
        return product, moved
