"""Slow reference implementation of the paper's equations.

Nothing here is shared with selftpt. Sentences are assembled position by position, every position passes through
open_clip's own modules, and sums are loops. Gradients come from autograd, with double backward where the paper needs
second derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers.models import Small

PAPER_VIEWS = ("end", "front", "middle", "hand_crafted")


# The text encoder g


def math_attention() -> AbstractContextManager[None]:
    """Select an attention kernel that supports double backward. The choice is global, so use it in one thread only."""
    return sdpa_kernel(SDPBackend.MATH)


def sentence(small: Small, view: str, name: str, prompt: Tensor, template: str = "a photo of a {}.") -> list[Tensor]:
    """Return the embedding of each token from start to end (Eq. 7 and 8)."""
    table = small.embedding

    def words(text: str) -> list[Tensor]:
        return [table[i] for i in small.encode(text)]

    vectors, half = list(prompt), len(prompt) // 2
    if view == "end":
        inner = vectors + words(f"{name}.")  # a name and the full stop are tokenised together, as CLIP does
    elif view == "front":
        inner = words(name) + vectors + words(".")
    elif view == "middle":
        inner = vectors[:half] + words(name) + vectors[half:] + words(".")
    else:
        inner = words(template.replace("{}", name))
    start = [table[i] for i in small.spec.frame.start]
    return [*start, *inner, table[small.spec.frame.end]]


def encode(small: Small, view: str, names: Sequence[str], prompt: Tensor, template: str = "a photo of a {}.") -> Tensor:
    """Return the features [C, D] of one view of all classes."""
    padding = small.embedding[small.spec.frame.pad]
    rows, sizes = [], []
    for name in names:
        content = sentence(small, view, name, prompt, template)
        assert len(content) <= small.context, f"{name!r} does not fit"
        rows.append(torch.stack(content + [padding] * (small.context - len(content))))
        sizes.append(len(content))
    with math_attention():
        if small.spec.pool == "mean":
            return _encode_hf(small.text, torch.stack(rows), sizes)
        return _encode(small, torch.stack(rows), sizes)


def _encode(small: Small, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Pass embedded sentences [N, context, d] through all blocks of an open_clip text tower and pool them: [N, D]."""
    part, spec = small.text, small.spec
    if spec.pool == "class":
        x = torch.cat([x, part.cls_emb.expand(len(x), 1, -1)], 1)
    x = x + part.positional_embedding
    # CoCa masks padding from one position too late; its weights were trained that way.
    hidden_from = [size + 1 if spec.pool == "class" else x.shape[1] for size in sizes]
    mask = torch.stack([_mask(x.shape[1], spec.causal, hidden) for hidden in hidden_from]).to(x.dtype)
    mask = mask.repeat_interleave(part.transformer.resblocks[0].attn.num_heads, 0)
    for block in part.transformer.resblocks:
        x = block(x, attn_mask=mask)
    x = part.ln_final(x)
    if spec.pool == "end":
        pooled = torch.stack([x[i, size - 1] for i, size in enumerate(sizes)])
    else:
        pooled = x[:, -1]
    if isinstance(part.text_projection, nn.Module):
        return part.text_projection(pooled)
    return pooled if part.text_projection is None else pooled @ part.text_projection


@functools.cache
def _mask(length: int, causal: bool, hidden_from: int) -> Tensor:
    """Return the additive attention mask [query, key]: 0 where a query attends to a key."""
    hidden = float("-inf")
    return torch.tensor(
        [
            [hidden if (causal and key > query) or key >= hidden_from else 0.0 for key in range(length)]
            for query in range(length)
        ]
    )


def _encode_hf(part: nn.Module, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Do the same with a Hugging Face encoder and mean pooling."""
    mask = torch.tensor([[1] * size + [0] * (x.shape[1] - size) for size in sizes])
    states = part.transformer(inputs_embeds=x, attention_mask=mask).last_hidden_state
    pooled = torch.stack([states[i, :size].sum(0) / size for i, size in enumerate(sizes)])
    return part.proj(pooled)


# The losses


def probabilities(images: Tensor, classes: Tensor, tau: float) -> Tensor:
    """Return the probabilities [B, C] of Eq. 1 for images [B, D] and classes [C, D]."""
    rows = []
    for e in images:
        cosines = torch.stack([(w @ e) / (w.norm() * e.norm()) for w in classes])
        rows.append(torch.exp(cosines / tau) / torch.exp(cosines / tau).sum())
    return torch.stack(rows)


def cross_entropy(images: Tensor, classes: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Return the mean of -log p of the correct class (Eq. 3)."""
    p = probabilities(images, classes, tau)
    return -sum(torch.log(p[i, label]) for i, label in enumerate(labels.tolist())) / len(labels)


def head(x: Tensor, weights: Sequence[Tensor], normalize: bool = True) -> Tensor:
    """Return z = h(x) for one vector [D]."""
    w1, b1, w2, b2 = weights
    hidden = w1 @ x + b1
    z = w2 @ torch.where(hidden > 0, hidden, torch.zeros_like(hidden)) + b2
    return z / torch.sqrt((z * z).sum()) if normalize else z


def index_sets(views: int, classes: int, equal: Sequence[object] | None) -> list[tuple[list[int], list[int]]]:
    """Return for each i the set P(i) and the indices of the denominator in Eq. 9.

    Args:
        equal: One key per class. Other classes with the same key are left out of the denominator.
    """
    sets = []
    for i in range(views * classes):
        positives = [i % classes + v * classes for v in range(views) if i % classes + v * classes != i]
        denominator = [
            j
            for j in range(views * classes)
            if j != i and (equal is None or j % classes == i % classes or equal[j % classes] != equal[i % classes])
        ]
        sets.append((positives, denominator))
    return sets


def cpt(
    z: Sequence[Tensor],
    views: int,
    temperature: float = 0.07,
    equal: Sequence[object] | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Return the loss of Eq. 9, computed with loops; z has V · C vectors, view by view."""
    total: Tensor = torch.zeros((), dtype=z[0].dtype)
    for i, (positives, denominator) in enumerate(index_sets(views, len(z) // views, equal)):
        numerator = sum(torch.exp(z[i] @ z[j] / temperature) for j in positives)
        denominator_sum = sum(torch.exp(z[i] @ z[j] / temperature) for j in denominator)
        total = total - torch.log(numerator / denominator_sum)
    return total / len(z) if reduction == "mean" else total


def cpt_in_decimal(
    z: Sequence[Sequence[float]], views: int, temperature: float, equal: Sequence[object] | None = None
) -> float:
    """Return the loss of Eq. 9, computed with decimal numbers that cannot overflow."""
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 50, MAX_EMAX, MIN_EMIN
        exact = [[Decimal(value) for value in vector] for vector in z]
        total = Decimal(0)
        for i, (positives, denominator) in enumerate(index_sets(views, len(z) // views, equal)):

            def similarity(j: int, i: int = i) -> Decimal:
                dot = sum((a * b for a, b in zip(exact[i], exact[j], strict=True)), Decimal(0))
                return (dot / Decimal(temperature)).exp()

            total -= (sum(map(similarity, positives)) / sum(map(similarity, denominator))).ln()
        return float(total)


def moving_average(gradients: Sequence[Tensor], decay: float) -> Tensor:
    """Return the moving average of Eq. 11 as an explicit sum over the gradients of steps 0 to T."""
    last = len(gradients) - 1
    total = decay**last * gradients[0]
    for t in range(1, last + 1):
        total = total + decay ** (last - t) * (1 - decay) * gradients[t]
    return total


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of Eq. 10."""
    return (a * b).sum() / torch.sqrt((a * a).sum() * (b * b).sum())


def gradient_matching(target: Tensor, gradient: Tensor, kind: str = "cosine", floor: float = 0.0) -> Tensor:
    """Return the loss of Eq. 12, or the mean squared difference of the ablation.

    A `gradient` shorter than `floor` times `target` counts as that long in the denominator of the cosine.
    """
    if kind == "mse":
        return ((gradient - target) ** 2).sum() / gradient.numel()
    lengths = [torch.sqrt((t * t).sum()) for t in (target, gradient)]
    return 1 - (target * gradient).sum() / (lengths[0] * max(lengths[1], floor * lengths[0]))


# The two stages


@dataclass(frozen=True)
class Settings:
    """Settings of the losses."""

    views: tuple[str, ...] = PAPER_VIEWS
    template: str = "a photo of a {}."
    temperature: float = 0.07
    reduction: str = "mean"
    normalize: bool = True
    duplicates_as_negatives: bool = False
    ce: float = 1.0
    cpt: float = 1.0
    gm: float = 1.0
    matching: str = "cosine"
    decay: float = 0.9
    guard: str = "none"
    guard_ratio: float = 0.1


@dataclass(frozen=True)
class Joint:
    """Losses by name and gradients of their weighted sum."""

    losses: Mapping[str, Tensor]
    prompt_gradient: Tensor
    head_gradients: list[Tensor]
    by_ce: Tensor
    average_gradient: Tensor


def contrast_loss(
    small: Small, names: Sequence[str], prompt: Tensor, weights: Sequence[Tensor], settings: Settings
) -> Tensor:
    """Return the CPT loss of a class list with a prompt."""
    z = []
    for view in settings.views:
        for w in encode(small, view, names, prompt, settings.template):
            z.append(head(w, weights, settings.normalize))
    equal = None if settings.duplicates_as_negatives else [tuple(small.encode(name)) for name in names]
    return cpt(z, len(settings.views), settings.temperature, equal, settings.reduction)


def joint(
    small: Small,
    names: Sequence[str],
    prompt: Tensor,
    weights: Sequence[Tensor],
    images: Tensor,
    labels: Tensor,
    tau: float,
    past: Sequence[Tensor],
    settings: Settings,
) -> Joint:
    """Return the losses of stage 1 of Algorithm 1 and the gradients of their weighted sum, by double backward.

    Args:
        past: Gradients of the cross-entropy of all previous steps.
    """
    p = prompt.detach().clone().requires_grad_()
    weights = [w.detach().clone().requires_grad_() for w in weights]
    ce = cross_entropy(images, encode(small, "end", names, p), labels, tau)
    contrast = contrast_loss(small, names, p, weights, settings)
    (by_ce,) = torch.autograd.grad(ce, p, retain_graph=True)
    (by_cpt,) = torch.autograd.grad(contrast, p, create_graph=True)
    average = moving_average([*past, by_ce], settings.decay)
    gm = gradient_matching(
        average, by_cpt, settings.matching, settings.guard_ratio if settings.guard == "floor" else 0.0
    )
    (by_gm,) = torch.autograd.grad(gm, p, retain_graph=True)
    weight_cpt, weight_gm = settings.cpt, settings.gm
    if settings.guard == "normalize":
        weight_cpt = settings.cpt * float(by_ce.norm() / by_cpt.norm())
        weight_gm = settings.gm * float(by_ce.norm() / by_gm.norm())
    if settings.guard == "limit":
        others = float((settings.ce * by_ce + settings.cpt * by_cpt).detach().norm())
        weight_gm = min(settings.gm, settings.guard_ratio * others / float(by_gm.norm()))
    if settings.guard == "gate" and float(by_cpt.norm()) < settings.guard_ratio * float(average.norm()):
        weight_gm = 0.0
    total = settings.ce * ce + weight_cpt * contrast + weight_gm * gm
    by_prompt, *by_head = torch.autograd.grad(total, [p, *weights])
    norms = {
        "grad_ce": settings.ce * by_ce.norm(),
        "grad_cpt": weight_cpt * by_cpt.norm(),
        "grad_gm": weight_gm * by_gm.norm(),
    }
    losses = {"ce": ce, "cpt": contrast, "gm": gm, "cosine": cosine(by_ce, by_cpt), **norms}
    return Joint({k: v.detach() for k, v in losses.items()}, by_prompt, by_head, by_ce, average)
