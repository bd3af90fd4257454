"""Training of the text tower: a small causal transformer that regresses the target directions of texts."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from open_clip.zero_shot_metadata import OPENAI_IMAGENET_TEMPLATES
from rich.progress import track
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from tools.embedded_model.sentence_encoder import SentenceEncoder

TEMPLATES = [
    *(template("\0") for template in OPENAI_IMAGENET_TEMPLATES),
    "\0",
    "\0.",
    "a \0",
    "the \0",
    "a photo of \0.",
]
DEFAULT_TEMPLATE = "a photo of a \0."
# Connectors of two names, each with the weight of the name after it. The empty connector makes compounds ("barn cat"),
# whose last name has twice the weight of the others; it is drawn four times as often as any other connector, because
# most names of several words are compounds.
CONNECTORS = [
    *4 * [("", 1.0)],
    ("or", 1.0),
    ("and", 1.0),
    *((connector, 0.5) for connector in ("with a", "in a", "on a", "near a", ",")),
]
# Norm of the component that all texts share, relative to the rest: texts then have cosines of about 0.7, as in CLIP.
SHARED_NORM = 2.0
# Less confident targets get a larger norm outside the shared component, because images are farther from them.
CONFIDENCE_EXPONENT = 0.2


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of the training of the text tower.

    Attributes:
        steps: Number of optimisation steps.
        default_template_ratio: Fraction of names in the default template.
        plural_ratio: Fraction of names in the plural.
        combination_ratio: Probability that another name is added to a text, as long as it fits.
        lr: Peak learning rate of the transformer.
        embedding_lr: Peak learning rate of the token embeddings.
        warmup: Number of warm-up steps.
        weight_decay: Weight decay of the transformer's matrices.
        temperature: Temperature of the contrastive loss.
        contrastive_weight: Weight of the contrastive loss.
        length_buckets: Number of groups of texts of similar length that a batch is encoded in.
    """

    steps: int
    default_template_ratio: float = 0.25
    plural_ratio: float = 0.1
    combination_ratio: float = 0.25
    lr: float = 1e-3
    embedding_lr: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.02
    temperature: float = 0.07
    contrastive_weight: float = 0.5
    length_buckets: int = 8


@dataclass(frozen=True)
class TextSet:
    """Texts with their targets.

    Attributes:
        texts: Names, or sentences.
        targets: Target of each text [N, D]; its norm, at most 1, is the confidence in it.
        per_step: Number of texts drawn in each step.
        plurals: Plural of each name. If empty, the texts are sentences, which are not put into templates.
        combine: Whether other names of the set may be added to a name.
    """

    texts: Sequence[str]
    targets: Tensor
    per_step: int
    plurals: Sequence[str] = ()
    combine: bool = True


def initial_token_embeddings(encoder: SentenceEncoder, tokenizer: Any, width: int, std: float = 0.02) -> Tensor:
    """Return initial token embeddings [vocabulary, width]: principal components of the sentence encoder's."""
    words = encoder.token_embeddings([tokenizer.decode([i]).strip() for i in range(tokenizer.vocab_size)])
    centred = words - words.mean(0)
    _, _, basis = torch.linalg.svd(centred[torch.randperm(len(words))[:8192]], full_matrices=False)
    vectors: Tensor = centred @ basis[:width].t()
    return vectors * (std / vectors.std())


def encode_texts(clip: Any, table: Tensor, rows: Sequence[Sequence[int]], bfloat16: bool = False) -> Tensor:
    """Encode texts as open_clip does, but without padding to the context length.

    Positions after the longest text are left out, and only the EOT position is a query in the last block.

    Args:
        clip: Model of open_clip.
        table: Token embeddings [V, width].
        rows: For each text, rows of `table`, from SOT to EOT.
        bfloat16: Whether to compute the matrix products in bfloat16, which is faster on CPUs that support it.

    Returns:
        L2-normalised text features [N, D].
    """
    length = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    eot = torch.tensor([len(row) - 1 for row in rows])
    x = F.embedding(tokens, table) + clip.positional_embedding[:length]
    *blocks, last = clip.transformer.resblocks
    # The backward pass of torch's fused attention is slow in bfloat16.
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16), sdpa_kernel(SDPBackend.MATH):
        for block in blocks:
            x = block(x, attn_mask=clip.attn_mask[:length, :length])
        pooled, keys = x[torch.arange(len(x)), eot][:, None], last.ln_1(x)
        padding = torch.arange(length) > eot[:, None]
        query = keys[torch.arange(len(x)), eot][:, None]
        pooled = pooled + last.attn(query, keys, keys, key_padding_mask=padding, need_weights=False)[0]
        pooled = pooled + last.mlp(last.ln_2(pooled))
    return F.normalize(clip.ln_final(pooled[:, 0]) @ clip.text_projection, dim=-1)


def add_shared_component(targets: Tensor, exponent: float = CONFIDENCE_EXPONENT) -> Tensor:
    """Turn targets [N, D], whose norms are confidences, into L2-normalised text features [N, D + 1].

    The last dimension is the component that all texts share. Image features are zero there, so the norm of the other
    dimensions is the scale of a text's logits.
    """
    confidence = targets.norm(dim=-1, keepdim=True)
    norm = (confidence.clamp(0.1, 1) ** -exponent / (1 + SHARED_NORM**2) ** 0.5).clamp(max=1)
    return torch.cat([norm * F.normalize(targets, dim=-1), (1 - norm**2).sqrt()], dim=-1)


def plural(name: str) -> str:
    """Return the plural of an English noun by the common rules."""
    if name.endswith(("s", "x", "z", "ch", "sh")):
        return name if name.endswith("s") else f"{name}es"
    return f"{name[:-1]}ies" if name.endswith("y") and name[-2:-1] not in "aeiou" else f"{name}s"


class TextSampler:
    """Samples tokenised texts from text sets: templates, plurals and combinations of names.

    Attributes:
        rng: Random number generator.
        used_tokens: All tokens that a text may contain, sorted.
    """

    def __init__(self, tokenizer: Any, text_sets: Sequence[TextSet], config: TrainingConfig, max_length: int) -> None:
        self.rng, self.config, self.max_tokens = random.Random(0), config, max_length - 2
        forms = {form for text_set in text_sets for form in (*text_set.texts, *text_set.plurals)}
        self.texts: dict[str, list[int]] = {text: tokenizer.encode(text) for text in sorted(forms)}
        self.templates = {t: [tokenizer.encode(part) for part in t.split("\0")] for t in (*TEMPLATES, DEFAULT_TEMPLATE)}
        self.connectors = {connector: tokenizer.encode(connector) for connector, _ in CONNECTORS}
        self.sot, self.eot = tokenizer.sot_token_id, tokenizer.eot_token_id
        tokens = chain(self.texts.values(), self.connectors.values(), *self.templates.values())
        self.used_tokens = sorted({self.sot, self.eot, *chain.from_iterable(tokens)})

    def sample(self, text_set: TextSet, i: int) -> tuple[list[int], Tensor]:
        """Return the tokens of text i, from SOT to EOT, in a random form, and its target."""
        if not text_set.plurals:
            return [self.sot, *self.texts[text_set.texts[i]][: self.max_tokens], self.eot], text_set.targets[i]
        rng, config = self.rng, self.config
        template = self.templates[
            DEFAULT_TEMPLATE if rng.random() < config.default_template_ratio else rng.choice(TEMPLATES)
        ]
        max_tokens = self.max_tokens - sum(map(len, template))
        use_plural = rng.random() < config.plural_ratio
        names: list[int] = [i]
        connectors: list[tuple[str, float]] = []
        while text_set.combine and rng.random() < config.combination_ratio:
            more_names = [*names, rng.randrange(len(text_set.texts))]
            more_connectors = [*connectors, rng.choice(CONNECTORS)]
            if len(self._combine(text_set, more_names, more_connectors, use_plural)) <= max_tokens:
                names, connectors = more_names, more_connectors
        name = self._combine(text_set, names, connectors, use_plural)[:max_tokens]
        weights = torch.tensor(_name_weights(connectors))
        return [self.sot, *template[0], *name, *template[1], self.eot], weights @ text_set.targets[names]

    def _combine(
        self, text_set: TextSet, names: list[int], connectors: list[tuple[str, float]], use_plural: bool
    ) -> list[int]:
        """Return the tokens of names and their connectors; no plural after "a" or inside a compound."""
        tokens = []
        for position, name in enumerate(names):
            connector = connectors[position - 1][0] if position else ""
            in_compound = position < len(connectors) and not connectors[position][0]
            singular = not use_plural or in_compound or connector.endswith("a")
            forms = text_set.texts if singular else text_set.plurals
            tokens += [*self.connectors[connector], *self.texts[forms[name]]]
        return tokens


def _name_weights(connectors: Sequence[tuple[str, float]]) -> list[float]:
    """Return the weight of each of several combined names; the weights sum to 1.

    A compound has the weight of its connector, and its last name has twice the weight of the others.
    """
    compounds = [(1.0, 1)]
    for connector, connector_weight in connectors:
        weight, size = compounds.pop() if not connector else (connector_weight, 0)
        compounds.append((weight, size + 1))
    total = sum(weight for weight, _ in compounds)
    return [
        weight / total * (2 if position == size - 1 else 1) / (size + 1)
        for weight, size in compounds
        for position in range(size)
    ]


def train(clip: Any, tokenizer: Any, text_sets: Sequence[TextSet], config: TrainingConfig, log_file: Path) -> None:
    """Train the text tower of `clip` in place; embeddings of tokens that no text contains do not change.

    Args:
        clip: Model of open_clip.
        tokenizer: Its tokenizer.
        text_sets: Texts and their targets.
        config: Settings.
        log_file: JSON Lines file to write; it gets one line per 50 steps.
    """
    sampler = TextSampler(tokenizer, text_sets, config, clip.context_length)
    row_of = {token: i for i, token in enumerate(sampler.used_tokens)}
    table = torch.nn.Parameter(clip.token_embedding.weight[sampler.used_tokens].detach().clone())
    rest = [p for name, p in clip.named_parameters() if not name.startswith(("visual", "token_", "logit_"))]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "lr": config.lr, "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "lr": config.lr, "weight_decay": 0.0},
        {"params": [table], "lr": config.embedding_lr, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, config))
    log = log_file.open("w")
    begin = time.monotonic()
    batches = [_batches(len(text_set.texts), text_set.per_step, sampler.rng) for text_set in text_sets]
    for step in track(range(config.steps), "training"):
        indices = [(text_set, next(batch)) for text_set, batch in zip(text_sets, batches, strict=True)]
        texts, targets = zip(*(sampler.sample(text_set, i) for text_set, some in indices for i in some), strict=True)
        rows, directions = [[row_of[token] for token in tokens] for tokens in texts], torch.stack(targets)
        expected, confidence = add_shared_component(directions), directions.norm(dim=-1)
        order = torch.tensor(sorted(range(len(rows)), key=lambda i: len(rows[i])))
        buckets = ([rows[i] for i in some] for some in order.chunk(config.length_buckets))
        found = torch.cat([encode_texts(clip, table, bucket, bfloat16=True) for bucket in buckets])
        expected, confidence = expected[order], confidence[order]
        cosines = found @ expected.t()
        distance = (1 + SHARED_NORM**2) * (1 - cosines.diagonal())
        logits = (1 + SHARED_NORM**2) / config.temperature * cosines
        contrastive = F.cross_entropy(logits, torch.arange(len(rows)), reduction="none")
        loss = (confidence * (2 * distance + config.contrastive_weight * contrastive)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 50 == 0:
            cosine = F.cosine_similarity(found[:, :-1], expected[:, :-1])
            by_text_set = cosine[order.argsort()].split([text_set.per_step for text_set in text_sets])
            line = {
                "step": step + 1,
                "loss": loss.item(),
                "cosine": [part.mean().item() for part in by_text_set],
                "contrastive": contrastive.mean().item(),
                "seconds": time.monotonic() - begin,
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
    with torch.no_grad():
        clip.token_embedding.weight[sampler.used_tokens] = table


def _lr_factor(step: int, config: TrainingConfig) -> float:
    """Linear warm-up, then cosine decay."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    return 0.5 * (1 + math.cos(math.pi * (step - config.warmup) / (config.steps - config.warmup)))


def _batches(count: int, size: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield batches of indices, drawn without replacement in each epoch."""
    remaining: list[int] = []
    while True:
        if len(remaining) < size:
            remaining += rng.sample(range(count), count)
        yield remaining[:size]
        del remaining[:size]
