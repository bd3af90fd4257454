"""The text tower: a small causal transformer that learns to put a name, in a sentence, where the teacher wants it."""

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
    from tools.embedded_model.sentences import Sentences

TEMPLATES = [
    *(template("\0") for template in OPENAI_IMAGENET_TEMPLATES),
    "\0",
    "\0.",
    "a \0",
    "the \0",
    "a photo of \0.",
]
USUAL = "a photo of a \0."
# What stands between two names, and how much what comes after it counts. Nothing stands in "barn cat", of which the
# last name counts twice; that is drawn four times as often as any other: most names of several words are of it.
LINKS = [
    *4 * [("", 1.0)],
    ("or", 1.0),
    ("and", 1.0),
    *((link, 0.5) for link in ("with a", "in a", "on a", "near a", ",")),
]
# What all texts have in common, in parts of what tells them apart: words have cosines of about 0.7, as CLIP's.
CONE = 2.0
REACH = 0.2  # the less sure the direction of a text, the longer: pictures are farther from a vague direction


@dataclass(frozen=True)
class Training:
    """How the student is trained."""

    steps: int
    usual: float = 0.25  # share of names in the usual template
    plural: float = 0.1  # share of names in the plural
    beside: float = 0.25  # share of names with another beside them, if there is room; of those, with a third, and so on
    lr: float = 1e-3
    table_lr: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.02
    temperature: float = 0.07  # of telling a batch's names apart
    apart: float = 0.5  # weight of that
    groups: int = 8  # a batch is walked in groups of names of similar length


@dataclass(frozen=True)
class Lesson:
    """Texts with the directions they should have [n, D], each as long as the teacher is sure of it, 1 at most.

    each: how many are learned in a step. plurals: of names, or the same again; without them the texts are sentences,
    which go into no template. company: whether other names of the lesson may stand beside one.
    """

    texts: Sequence[str]
    targets: Tensor
    each: int
    plurals: Sequence[str] = ()
    company: bool = True


def token_vectors(sentences: Sentences, tokenizer: Any, width: int, size: float = 0.02) -> Tensor:
    """A start for the token table [vocabulary, width]: the main components of the sentence encoder's own vectors."""
    words = sentences.words([tokenizer.decode([i]).strip() for i in range(tokenizer.vocab_size)])
    centred = words - words.mean(0)
    _, _, basis = torch.linalg.svd(centred[torch.randperm(len(words))[:8192]], full_matrices=False)
    vectors: Tensor = centred @ basis[:width].t()
    return vectors * (size / vectors.std())


def walk(clip: Any, table: Tensor, rows: Sequence[Sequence[int]], half: bool = False) -> Tensor:
    """Texts, as rows of the token table that end at the text's end, to unit features [n, D].

    open_clip's own walk, but no further than the longest of them, and in the last block for the ends alone.
    half: the products of the transformer in half precision (bfloat16), which is faster on processors that have it.
    """
    length = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    at = torch.tensor([len(row) - 1 for row in rows])
    x = F.embedding(tokens, table) + clip.positional_embedding[:length]
    *blocks, last = clip.transformer.resblocks
    # torch's fused attention goes back slowly in bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=half), sdpa_kernel(SDPBackend.MATH):
        for block in blocks:
            x = block(x, attn_mask=clip.attn_mask[:length, :length])
        ends, seen = x[torch.arange(len(x)), at][:, None], last.ln_1(x)
        after = torch.arange(length) > at[:, None]
        query = seen[torch.arange(len(x)), at][:, None]
        ends = ends + last.attn(query, seen, seen, key_padding_mask=after, need_weights=False)[0]
        ends = ends + last.mlp(last.ln_2(ends))
    return F.normalize(clip.ln_final(ends[:, 0]) @ clip.text_projection, dim=-1)


def in_cone(targets: Tensor, reach: float = REACH) -> Tensor:
    """Directions [n, D], as long as they are sure, as unit vectors of texts [n, D + 1].

    Pictures have nothing of the last dimension, so what a text has of the others is the scale of its scores.
    """
    sure = targets.norm(dim=-1, keepdim=True)
    far = (sure.clamp(0.1, 1) ** -reach / (1 + CONE**2) ** 0.5).clamp(max=1)
    return torch.cat([far * F.normalize(targets, dim=-1), (1 - far**2).sqrt()], dim=-1)


def plural(name: str) -> str:
    """The plural of an English noun by the common rules."""
    if name.endswith(("s", "x", "z", "ch", "sh")):
        return name if name.endswith("s") else f"{name}es"
    return f"{name[:-1]}ies" if name.endswith("y") and name[-2:-1] not in "aeiou" else f"{name}s"


class Writer:
    """Writes texts of lessons as they stand in sentences, in tokens; `used` are all that it may use."""

    def __init__(self, tokenizer: Any, lessons: Sequence[Lesson], config: Training, longest: int) -> None:
        self.rng, self.config, self.room = random.Random(0), config, longest - 2
        forms = {form for lesson in lessons for form in (*lesson.texts, *lesson.plurals)}
        self.texts: dict[str, list[int]] = {text: tokenizer.encode(text) for text in sorted(forms)}
        self.frames = {t: [tokenizer.encode(part) for part in t.split("\0")] for t in (*TEMPLATES, USUAL)}
        self.links = {link: tokenizer.encode(link) for link, _ in LINKS}
        self.ends = [tokenizer.sot_token_id, tokenizer.eot_token_id]
        rest = chain(self.texts.values(), self.links.values(), *self.frames.values())
        self.used = sorted({*self.ends, *chain.from_iterable(rest)})

    def write(self, lesson: Lesson, i: int) -> tuple[list[int], Tensor]:
        """A text of a lesson, with both ends, and where it should land."""
        first, last = self.ends
        if not lesson.plurals:
            return [first, *self.texts[lesson.texts[i]][: self.room], last], lesson.targets[i]
        rng, config = self.rng, self.config
        frame = self.frames[USUAL if rng.random() < config.usual else rng.choice(TEMPLATES)]
        room = self.room - sum(map(len, frame))
        many = rng.random() < config.plural
        names: list[int] = [i]
        joined: list[tuple[str, float]] = []
        while lesson.company and rng.random() < config.beside:
            more, links = [*names, rng.randrange(len(lesson.texts))], [*joined, rng.choice(LINKS)]
            if len(self._together(lesson, more, links, many)) <= room:
                names, joined = more, links
        name = self._together(lesson, names, joined, many)[:room]
        shares = torch.tensor(_shares(joined))
        return [first, *frame[0], *name, *frame[1], last], shares @ lesson.targets[names]

    def _together(self, lesson: Lesson, names: list[int], joined: list[tuple[str, float]], many: bool) -> list[int]:
        """Tokens of names and of what joins them. None is a plural after a link's "a", nor right before another."""
        tokens = []
        for at, name in enumerate(names):
            before = joined[at - 1][0] if at else ""
            one = not many or (at < len(joined) and not joined[at][0]) or before.endswith("a")
            tokens += [*self.links[before], *self.texts[(lesson.texts if one else lesson.plurals)[name]]]
        return tokens


def _shares(joined: Sequence[tuple[str, float]]) -> list[float]:
    """How much each of several names counts, by what joins them; 1 in all.

    Names with nothing between are one phrase, whose last counts twice; a phrase counts as its link says.
    """
    phrases = [(1.0, 1)]
    for link, share in joined:
        weight, size = phrases.pop() if not link else (share, 0)
        phrases.append((weight, size + 1))
    total = sum(weight for weight, _ in phrases)
    return [
        weight / total * (2 if at == size - 1 else 1) / (size + 1) for weight, size in phrases for at in range(size)
    ]


def train(clip: Any, tokenizer: Any, lessons: Sequence[Lesson], config: Training, log_file: Path) -> None:
    """Train the text tower of `clip` in place, and write a log. Tokens that no text has stay as they are."""
    writer = Writer(tokenizer, lessons, config, clip.context_length)
    row = {token: i for i, token in enumerate(writer.used)}
    table = torch.nn.Parameter(clip.token_embedding.weight[writer.used].detach().clone())
    rest = [p for name, p in clip.named_parameters() if not name.startswith(("visual", "token_", "logit_"))]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "lr": config.lr, "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "lr": config.lr, "weight_decay": 0.0},
        {"params": [table], "lr": config.table_lr, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), foreach=True)
    curve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config))
    log = log_file.open("w")
    begin = time.monotonic()
    draws = [_rounds(len(lesson.texts), lesson.each, writer.rng) for lesson in lessons]
    for step in track(range(config.steps), "training"):
        drawn = [(lesson, next(draw)) for lesson, draw in zip(lessons, draws, strict=True)]
        written, targets = zip(*(writer.write(lesson, i) for lesson, some in drawn for i in some), strict=True)
        rows, aims = [[row[token] for token in tokens] for tokens in written], torch.stack(targets)
        wanted, sure = in_cone(aims), aims.norm(dim=-1)
        order = torch.tensor(sorted(range(len(rows)), key=lambda i: len(rows[i])))
        parts = ([rows[i] for i in some] for some in order.chunk(config.groups))
        found = torch.cat([walk(clip, table, part, half=True) for part in parts])
        wanted, sure = wanted[order], sure[order]
        cosines = found @ wanted.t()
        off = (1 + CONE**2) * (1 - cosines.diagonal())
        scores = (1 + CONE**2) / config.temperature * cosines
        apart = F.cross_entropy(scores, torch.arange(len(rows)), reduction="none")
        loss = (sure * (2 * off + config.apart * apart)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        optimizer.step()
        curve.step()
        if (step + 1) % 50 == 0:
            cosine = F.cosine_similarity(found[:, :-1], wanted[:, :-1])
            by_lesson = cosine[order.argsort()].split([lesson.each for lesson in lessons])
            line = {
                "step": step + 1,
                "loss": loss.item(),
                "cosine": [part.mean().item() for part in by_lesson],
                "apart": apart.mean().item(),
                "seconds": time.monotonic() - begin,
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
    with torch.no_grad():
        clip.token_embedding.weight[writer.used] = table


def _rate(step: int, config: Training) -> float:
    if step < config.warmup:
        return (step + 1) / config.warmup
    return 0.5 * (1 + math.cos(math.pi * (step - config.warmup) / (config.steps - config.warmup)))


def _rounds(count: int, size: int, rng: random.Random) -> Iterator[list[int]]:
    """Draws without replacement, round after round."""
    waiting: list[int] = []
    while True:
        if len(waiting) < size:
            waiting += rng.sample(range(count), count)
        yield waiting[:size]
        del waiting[:size]
