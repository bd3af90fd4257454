"""The text tower and its exact fast forward pass: prompts and class names to text features.

Attention in CLIP's text tower is causal and only the end-of-text (EOT) position is pooled. The fast forward pass
therefore skips the positions after EOT, computes the prefix that all classes share once, and computes the tokens that
do not depend on the prompt once for all optimisation steps. Features and gradients equal those of the forward pass
over every position.
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
from selftpt.models.blocks import Block, Insert, LayerPrompts, Observer, check_prompt_shape, is_supported, run_blocks
from selftpt.models.open_clip_api import text_module
from selftpt.models.tokenizer import ClassTokens, Tokenizer, end_ids

NO_GRAPH_CHUNK = 64  # minimum number of sentences per packed forward pass when no autograd graph is kept
KeyValue = tuple[Tensor, Tensor]  # keys and values of one layer, each [H, 1 or n, rows, E]
TokenIds = Sequence[int]  # without start, end and padding tokens; the id -1 - k is a slot for the k-th prompt vector


def before_name(view: View, length: int) -> int:
    """Return how many prompt vectors precede the class name (Eq. 7).

    Args:
        view: The view.
        length: Number M of prompt vectors.

    Returns:
        M in the end view, 0 in the front view, M // 2 in the middle view.
    """
    return {"end": length, "front": 0, "middle": length // 2}[view]


@dataclass(frozen=True)
class Segment:
    """Consecutive sequences of equal length in a packed tensor, with causal attention within each sequence.

    Attributes:
        count: Number of sequences, n.
        size: Number of rows per sequence, S.
        past: Keys and values of the rows that precede the sequences and do not depend on the prompt, one pair per
            layer.
        prefix: Number of leading rows of the shared prefix (the first segment) that each sequence attends to after
            `past`; 0 if none.
        outputs: Number of rows at the end of each sequence whose output is read after the last block.
        read_only: Whether the rows attend to `past` only, and not to each other or themselves.
    """

    count: int
    size: int
    past: list[KeyValue]
    prefix: int = 0
    outputs: int = 1
    read_only: bool = False


class PackedAttention:
    """Causal attention within packed sequences.

    Args:
        segments: The sequences, in the order of the rows. The first segment holds the shared prefix.
        ends: Indices of the rows that are read after the last block, in ascending order, none of them in the first
            segment. None reads all rows.
        kept: A list to which the keys and values of each segment, preceded by those of its past, are appended, one pair
            per layer. Used with a single segment.

    Attributes:
        selects: Whether only the rows `ends` are queries in the last block.
    """

    def __init__(
        self, segments: Sequence[Segment], ends: Tensor | None = None, kept: list[KeyValue] | None = None
    ) -> None:
        self._segments, self._ends, self._kept = segments, ends, kept
        self._sizes = [segment.count * segment.size for segment in segments]
        self._outputs = [segment.count * segment.outputs for segment in segments[1:]]
        self.selects = ends is not None

    def select(self, x: Tensor) -> Tensor:
        """Select the rows `ends` [N, ...] of packed rows [T, ...]."""
        return x[self._ends]

    def __call__(self, layer: int, projected: Tensor, queries: Tensor | None) -> Tensor:
        """Compute the attention of one layer.

        Args:
            layer: Index of the block.
            projected: Queries, keys and values of all rows, [T, 3, H, E]; only keys and values, [T, 2, H, E], if
                `queries` is given.
            queries: Queries of the rows `ends`, [N, 1, H, E].

        Returns:
            The outputs of all rows, [T, H, E], or of the rows `ends`, [N, H, E], if `queries` is given.
        """
        selected: list[Tensor | None] = [None] * len(self._segments)
        if queries is not None:  # no row of the shared prefix is a query
            selected[1:] = queries[:, 0].split(self._outputs)
        out = []
        shared: KeyValue | None = None
        for segment, rows, query in zip(self._segments, projected.split(self._sizes), selected, strict=True):
            *q, k, v = rows.unflatten(0, (segment.count, segment.size)).permute(2, 3, 0, 1, 4)  # each [H, n, S, E]
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
    """Append keys or values [H, n, rows, E] to those of the past, [H, 1 or n, rows, E]."""
    return torch.cat([past.expand(-1, new.shape[1], -1, -1), new], 2)


def _attend(q: Tensor, before: KeyValue, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention of n sequences to the rows before them and, causally, to themselves.

    It uses matrix products because the fused kernels have no second derivative; at these lengths it is as fast.

    Args:
        q: Queries of the last Q rows of each sequence, [H, n, Q, E].
        before: Keys and values of the rows before the sequences, [H, n, c, E], or [H, 1, c, E] if all sequences share
            them; shared ones are not repeated in memory.
        k: Keys [H, n, S, E].
        v: Values [H, n, S, E].

    Returns:
        Outputs [n * Q, H, E].
    """
    heads, n, num_queries, width = q.shape
    old, new = before[0].shape[2], k.shape[2]
    groups = (heads * n, num_queries) if before[0].shape[1] == n else (heads, n * num_queries)
    # Contiguous copies, because a view saved for the backward pass would keep the memory of all rows.
    q, k, v = (t.reshape(heads * n, t.shape[2], width).contiguous() for t in (q, k, v))
    rows = q.view(*groups, width)
    before_k, before_v = (t.reshape(groups[0], old, width) for t in before)
    mask = torch.full((num_queries, new), float("-inf"), dtype=q.dtype, device=q.device).triu(new - num_queries + 1)
    scores_before = torch.bmm(rows, before_k.transpose(1, 2)).view(heads * n, num_queries, old)
    scores = torch.cat([scores_before, torch.bmm(q, k.transpose(1, 2)) + mask], -1) * width**-0.5
    to_old, to_new = scores.softmax(-1).split([old, new], -1)
    out = torch.bmm(to_old.reshape(*groups, old), before_v).view(heads * n, num_queries, width) + torch.bmm(to_new, v)
    return out.view(heads, n, num_queries, width).permute(1, 2, 0, 3).flatten(0, 1)


class TextTower(nn.Module):
    """Text tower of an open_clip model.

    Args:
        clip: The open_clip model.
        tokenizer: Its tokenizer.

    Attributes:
        tokenizer: The tokenizer.
        encoder: The text module of the open_clip model, as `open_clip_api.text_module` returns it.
        supports_packed: Whether attention is causal and the EOT position is pooled, so that `PackedTextForward`
            computes the same features as the tower.
        start: Keys and values of the start token, one pair per layer; only if `supports_packed`.
    """

    def __init__(self, clip: Any, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.encoder: Any = text_module(clip)
        self._is_hf = isinstance(self.encoder, HFTextEncoder)
        self.supports_packed = self._is_causal() and self._pools_eot()
        if self.supports_packed:
            blocks = enumerate(self.encoder.transformer.resblocks)
            self._blocks = [Block(block, f"transformer.resblocks.{i}") for i, block in blocks]
            heads = self._blocks[0].heads
            nothing = self.embedding.weight.new_empty(heads, 1, 0, self.width // heads)
            start = torch.tensor([tokenizer.start], dtype=torch.long, device=self.device)
            self.start = self.constants(start, 0, [(nothing, nothing)] * len(self._blocks))

    @property
    def embedding(self) -> nn.Embedding:
        """Token embedding, with weights [vocabulary, d]."""
        encoder = self.encoder
        return encoder.transformer.get_input_embeddings() if self._is_hf else encoder.token_embedding  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.weight.device

    @property
    def width(self) -> int:
        """Width d of the hidden states."""
        return self.embedding.weight.shape[1]

    @property
    def layers(self) -> int:
        """Maximum number of layers of `LayerPrompts`: the number of blocks, or 1 for a Hugging Face encoder."""
        return 1 if self._is_hf else len(self.encoder.transformer.resblocks)

    def _is_causal(self) -> bool:
        encoder = self.encoder
        if self._is_hf or encoder.attn_mask is None or encoder.cls_emb is not None:
            return False
        causal = torch.full_like(encoder.attn_mask, float("-inf")).triu(1)
        return all(map(is_supported, encoder.transformer.resblocks)) and torch.equal(encoder.attn_mask, causal)

    def _pools_eot(self) -> bool:
        if self.encoder.pool_type == "argmax":
            return self.tokenizer.end == (self.embedding.num_embeddings - 1,)
        return self.encoder.pool_type == "eos" and self.tokenizer.end == (self.encoder.eos_id,)

    def embed_words(self, text: str) -> Tensor:
        """Return the token embeddings of a text.

        Args:
            text: The text.

        Returns:
            Embeddings [tokens, d], without start, end and padding tokens.
        """
        ids = torch.tensor(self.tokenizer.encode(text), dtype=torch.long, device=self.device)
        return self.embedding.weight[ids].detach()

    def forward(self, ids: Tensor, insert: Insert | None = None) -> Tensor:
        """Encode token ids with open_clip's own modules, over all positions.

        Args:
            ids: Token ids [N, context_length] with start, end and padding, as open_clip's tokenizer returns them.
            insert: Called before each block to insert prompts into its input rows [N * L, d], where L is the number of
                positions, including CoCa's class token. For a Hugging Face encoder it is called only for layer 0,
                before the positional embedding is added.

        Returns:
            Features [N, D], not normalised.
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
        """Compute the keys and values of tokens that do not depend on a prompt.

        Args:
            ids: Token ids [n, S].
            position: Position of the first of the S tokens in the sentence.
            past: Keys and values of the tokens before them, one pair per layer.

        Returns:
            Keys and values of the past and of the tokens, one pair per layer.
        """
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
        """Run packed rows through all blocks; requires `supports_packed`.

        Args:
            x: Packed rows [T, d].
            segments: The sequences that the rows belong to.
            ends: Indices [N] of the rows that are pooled.
            insert: Called before each block to insert prompts into its input rows [T, d].
            observer: Called with the index and the input rows [T, d] of each block.

        Returns:
            Features [N, D] of the rows `ends`, not normalised.
        """
        attention = PackedAttention(segments, ends)
        return self.pool(run_blocks(self._blocks, x, attention, insert=insert, observer=observer))

    def pool(self, x: Tensor, select: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Apply the final LayerNorm, select rows, and project them.

        Args:
            x: Rows [..., d] after the last block.
            select: Selects the rows to project; None projects all.

        Returns:
            Features [..., D], not normalised.
        """
        x = self.encoder.ln_final(x)
        if select is not None:
            x = select(x)
        projection = self.encoder.text_projection
        if projection is not None:
            x = projection(x) if isinstance(projection, nn.Linear) else x @ projection
        return x


class MathAttention(TorchFunctionMode):
    """Context manager in which the current thread computes attention with matrix products.

    The fused kernels have no second derivative. `torch.nn.attention.sdpa_kernel` would change flags that all threads
    share.
    """

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
            return func(*args, **kwargs)[0], None
        if func is F.scaled_dot_product_attention:
            return _math_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _math_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **rest: Any) -> Tensor:
    """Compute `F.scaled_dot_product_attention` with its twice differentiable "math" implementation."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, attn_mask, **rest)[0]  # type: ignore[no-any-return]


class PackedTextForward:
    """Exact fast text forward pass, for a tower with `supports_packed`.

    The common prefix of the sentences runs once with batch size 1, no position is padded, the positions after EOT are
    skipped, and only the EOT position is a query in the last block.

    Args:
        tower: The text tower.
        groups: Token ids of n sentences for each of V groups, such as the views of a class list. The longest of the
            groups' common prefixes is computed once. Each group reuses the part of it with which its own common prefix
            starts.
        keep_constants: Whether to compute the tokens before the first prompt vector only once and keep their keys and
            values, which no prompt changes. This needs memory for each sentence.
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
        """Encode the sentences with a prompt.

        Args:
            prompt: Prompt vectors [M, d], or [J, M, d] for the first J layers.
            observer: Called with the index and the packed input rows [T, d] of each block; the rows of the shared
                prefix come first.

        Returns:
            Features [V, n, D], not normalised.
        """
        vectors = prompt if prompt.ndim == 3 else prompt[None]
        check_prompt_shape(vectors, self.tower.layers, self.tower.width)
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
    """Forward pass of read-only prompts after the EOT token of each sentence, for a tower with `supports_packed`.

    The prompt rows attend to the sentence, which does not attend to them: its keys and values are computed only once.

    Args:
        tower: The text tower.
        sentences: Token ids of N sentences.
        count: Number n of prompt rows per sentence.
    """

    @torch.inference_mode(False)
    def __init__(self, tower: TextTower, sentences: Sequence[TokenIds], count: int) -> None:
        self.tower, self.count = tower, count
        by_size: dict[int, list[int]] = {}
        for i, sentence in enumerate(sentences):
            by_size.setdefault(len(sentence), []).append(i)
        self.segments, order = [Segment(1, 0, tower.start)], []  # an empty first segment: there is no shared prefix
        for members in by_size.values():
            ids = torch.tensor([[*sentences[i], *tower.tokenizer.end] for i in members], device=tower.device)
            past = tower.constants(ids, len(tower.tokenizer.start), tower.start)
            self.segments.append(Segment(len(members), count, past, outputs=count, read_only=True))
            order += members
        self.ends = torch.arange(len(sentences) * count, device=tower.device)
        self.inverse = torch.tensor(order, device=tower.device).argsort()

    def __call__(self, vectors: Tensor, observer: Observer | None = None) -> Tensor:
        """Encode the prompt rows.

        Args:
            vectors: Prompt vectors [J, n, d] of the first J layers.
            observer: Called with the index and the packed input rows [N * n, d] of each block.

        Returns:
            Features [N, n, D] of the prompt rows, not normalised.
        """
        repeats = len(self.inverse)

        def insert(layer: int, rows: Tensor) -> Tensor:
            return vectors[layer].repeat(repeats, 1) if 0 < layer < len(vectors) else rows

        x = vectors[0].repeat(repeats, 1)
        rows = self.tower.run_packed(x, self.segments, self.ends, insert, observer)
        features: Tensor = rows.unflatten(0, (repeats, self.count))[self.inverse]
        return features


class ReferenceTextForward:
    """Text forward pass over every position with open_clip's own modules, for towers without `supports_packed`.

    Args:
        tower: The text tower.
        groups: Token ids of n sentences for each of V groups.
    """

    @torch.inference_mode(False)
    def __init__(self, tower: TextTower, groups: Sequence[Sequence[TokenIds]]) -> None:
        self.tower = tower
        self.shape = (len(groups), len(groups[0]))
        ids = torch.tensor([tower.tokenizer.add_special_tokens(sentence) for group in groups for sentence in group])
        ids = ids.to(tower.device)
        extra = 0 if tower._is_hf or tower.encoder.cls_emb is None else 1  # CoCa appends a class token to the rows
        sentence, self.positions = (ids < 0).nonzero(as_tuple=True)
        self.rows = sentence * (ids.shape[1] + extra) + self.positions
        self.index = -1 - ids[ids < 0]
        # Prompt slots need a placeholder id that is neither padding nor EOT.
        self.ids = ids.where(ids >= 0, tower.tokenizer.encode("photo")[0])

    def __call__(self, prompt: Tensor) -> Tensor:
        """Encode the sentences with a prompt.

        Args:
            prompt: Prompt vectors [M, d], or [J, M, d] for the first J layers.

        Returns:
            Features [V, n, D], not normalised.
        """
        vectors = prompt if prompt.ndim == 3 else prompt[None]
        check_prompt_shape(vectors, self.tower.layers, self.tower.width)

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
    """Return the longest common prefix of all sentences."""
    # It is the common prefix of the first and the last sentence in lexicographic order.
    low, high = min(map(tuple, sentences)), max(map(tuple, sentences))
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))]


def _before_prompt(sentence: TokenIds) -> int:
    """Return the number of tokens before the first prompt vector; 0 if there is no prompt vector."""
    return next((i for i, token in enumerate(sentence) if token < 0), 0)


def _has_constants(group: Sequence[TokenIds]) -> bool:
    return any(map(_before_prompt, group))


def _ends(segments: Sequence[Segment]) -> Tensor:
    """Return the index of the last row of each sequence, without the first segment."""
    sizes = torch.tensor([segment.size for segment in segments[1:]])
    counts = torch.tensor([segment.count for segment in segments[1:]])
    return segments[0].size + sizes.repeat_interleave(counts).cumsum(0) - 1


def text_forward(
    tower: TextTower, groups: Sequence[Sequence[TokenIds]], keep_constants: bool = False
) -> PackedTextForward | ReferenceTextForward:
    """Return the fastest exact forward pass of a tower.

    Args:
        tower: The text tower.
        groups: Token ids of n sentences for each of V groups.
        keep_constants: See `PackedTextForward`; ignored by `ReferenceTextForward`.

    Returns:
        A function from prompt vectors to features [V, n, D], not normalised.
    """
    if tower.supports_packed:
        return PackedTextForward(tower, groups, keep_constants)
    return ReferenceTextForward(tower, groups)


def encode_sentences(
    tower: TextTower,
    sentences: Sequence[TokenIds],
    chunk: int | None = None,
    prompts: LayerPrompts | None = None,
) -> Tensor:
    """Encode sentences, optionally with prompts per layer.

    Args:
        tower: The text tower.
        sentences: Token ids of N sentences, without start, end and padding tokens.
        chunk: Maximum number of sentences per forward pass; None is no limit. A packed forward pass without an autograd
            graph raises smaller values to `NO_GRAPH_CHUNK`.
        prompts: n prompt vectors per layer, which replace the first n tokens of each sentence; read-only prompts are
            appended after the EOT token.

    Returns:
        Features [N, D], not normalised; [N, n, D] if the prompts are read-only.

    Raises:
        SelfTPTError: The prompts do not fit the tower or are longer than a sentence.
    """
    count = 0 if prompts is None else prompts.vectors.shape[1]
    read_only = prompts is not None and prompts.read_only
    vectors = tower.embedding.weight.new_empty(1, 0, tower.width) if prompts is None else prompts.vectors
    check_prompt_shape(vectors, tower.layers, tower.width)
    if read_only and not tower.supports_packed:
        raise SelfTPTError(
            "read-only prompts need a causal text tower that pools the end-of-text token, like CLIP's: "
            "use another model"
        )
    if count and not read_only:
        if min(map(len, sentences)) < count:
            raise SelfTPTError(
                f"{count} prompt vectors replace the first {count} tokens of each sentence, and a sentence has fewer: "
                "shorten the prompt or lengthen the sentence"
            )
        slots = [-1 - k for k in range(count)]
        sentences = [[*slots, *sentence[count:]] for sentence in sentences]
    by_size = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    size = chunk or len(sentences)
    if tower.supports_packed and not (torch.is_grad_enabled() and vectors.requires_grad):
        size = max(size, NO_GRAPH_CHUNK)
    features = []
    for begin in range(0, len(sentences), size):
        batch = [sentences[i] for i in by_size[begin : begin + size]]
        if read_only:
            features.append(ReadOnlyTextForward(tower, batch, count)(vectors))
        else:
            features.append(text_forward(tower, [batch])(vectors)[0])
    return torch.cat(features)[torch.tensor(by_size, device=tower.device).argsort()]


def encode_pairs(tower: TextTower, prompts: Tensor, endings: Sequence[TokenIds]) -> Tensor:
    """Encode B sentences, each of which has its own prompt.

    Args:
        tower: The text tower.
        prompts: Prompt vectors [B, M, d].
        endings: Token ids that follow each of the B prompts, such as those that `end_ids` returns.

    Returns:
        Features [B, D], not normalised.
    """
    count, length = prompts.shape[:2]
    slots = (-1 - torch.arange(count * length)).view(count, length).tolist()
    sentences = [[*slot, *ending] for slot, ending in zip(slots, endings, strict=True)]
    return text_forward(tower, [sentences])(prompts.flatten(0, 1))[0]


@torch.no_grad()
def encode_template(tower: TextTower, tokens: ClassTokens, template: str, chunk: int | None = None) -> Tensor:
    """Encode class names in a hand-crafted template (Eq. 8), without an autograd graph.

    Each sentence is tokenised in one piece, as CLIP does.

    Args:
        tower: The text tower.
        tokens: The tokenised class names, C of them.
        template: A template such as "a photo of a {}.".
        chunk: Maximum number of sentences per forward pass; None is no limit. A packed forward pass raises smaller
            values to `NO_GRAPH_CHUNK`.

    Returns:
        Features [C, D], not normalised.

    Raises:
        SelfTPTError: A sentence is too long for the model.
    """
    sentences = [template.replace("{}", name) for name in tokens.names]
    return encode_sentences(tower, [tower.tokenizer.encode_sentence(sentence) for sentence in sentences], chunk)


class TextEncoder:
    """Text features of a class list as a function of the prompt, with `vjp` and `hvp` that run in chunks.

    In the end view a class name is tokenised together with the text next to it, as CLIP does. In the front and middle
    views the tokens are split after the name, because prompt vectors follow it.

    Args:
        tower: The text tower.
        tokens: The tokenised class names, C of them.
        length: Number M of prompt vectors.
        views: The V views: positions of the class name relative to the prompt vectors.
        tail: Text at the end of every sentence.
        chunk: Maximum number of classes per forward pass with an autograd graph; None is no limit. A longer list is
            split into chunks of names of similar length, and `vjp` and `hvp` run chunk by chunk, so that only the
            memory of the features grows with the list.
        infix: Text between prompt and name in the end view, such as "of a " for a prompt that replaces "a photo".

    Attributes:
        single_pass: Whether one forward pass encodes all classes.
        forwards: Forward passes of the chunks, which `vjp` and `hvp` use.
        no_graph_forwards: Forward passes that `__call__` uses; their chunks may be larger than those of `forwards`.
        on_forward: Called without arguments after every forward pass of `__call__` and `vjp`.
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
        self.single_pass = len(tokens) <= size
        self.inverse = by_size.argsort()
        self.on_forward: Callable[[], object] = lambda: None

        def forward(classes: Tensor) -> PackedTextForward | ReferenceTextForward:
            chunk_groups = [[group[i] for i in classes.tolist()] for group in groups]
            return text_forward(tower, chunk_groups, keep_constants=self.single_pass)

        self.chunks = by_size.split(size)
        self.forwards = [forward(classes) for classes in self.chunks]
        self.no_graph_forwards = self.forwards
        if not self.single_pass and size < NO_GRAPH_CHUNK and tower.supports_packed:
            self.no_graph_forwards = [forward(classes) for classes in by_size.split(NO_GRAPH_CHUNK)]

    def __call__(self, prompt: Tensor) -> Tensor:
        """Encode all classes.

        If `prompt.requires_grad`, the autograd graph of all classes is kept, whatever `chunk` is; use `vjp` and `hvp`
        for gradients with bounded memory.

        Args:
            prompt: Prompt vectors [M, d], or [J, M, d] for the first J layers.

        Returns:
            Features [V, C, D], not normalised.
        """
        features = []
        for forward in self.no_graph_forwards:
            features.append(forward(prompt))
            self.on_forward()
        return torch.cat(features, 1)[:, self.inverse]

    def vjp(self, prompt: Tensor, *cotangents: Tensor) -> list[Tensor]:
        """Compute vector-Jacobian products chunk by chunk.

        Args:
            prompt: Prompt vectors [M, d], or [J, M, d] for the first J layers.
            *cotangents: Vectors u [V, C, D].

        Returns:
            (∂f/∂p)ᵀ u for each u, of the shape of the prompt p, where f are the features.
        """
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
        """Compute a Hessian-vector product and a Jacobian-vector product chunk by chunk.

        Args:
            prompt: Prompt vectors [M, d], or [J, M, d] for the first J layers.
            cotangent: A vector u [V, C, D].
            direction: A vector v of the shape of the prompt.

        Returns:
            The product of the Hessian of u · f w.r.t. the prompt p with v, of the shape of the prompt, and (∂f/∂p) v,
            [V, C, D], where f are the features.
        """
        product, jvp = torch.zeros_like(prompt), torch.empty_like(cotangent)
        for classes, forward in zip(self.chunks, self.forwards, strict=True):
            p = prompt.detach().requires_grad_()
            u = cotangent[:, classes].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(forward(p), p, u, create_graph=True)
            chunk_product, jvp[:, classes] = torch.autograd.grad((gradient * direction).sum(), [p, u])
            product += chunk_product
        return product, jvp
