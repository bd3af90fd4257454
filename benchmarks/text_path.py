"""Compare the packed text forward pass with the plain one: time and memory of a step of stages 1 and 2.

The plain forward pass is how prompt learners usually compute text features: every view of every class over all 77
positions, and the hand-crafted view again at every step. The model is the text tower of ViT-B/16 with random weights,
in fp32. Compared jobs take turns in every round. Ratios are computed within a round; the script prints their median
over rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import extra_memory, in_own_process, interleaved
from open_clip import IMAGENET_CLASSNAMES
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from selftpt.config import VIEWS, ContrastConfig, LearnConfig, View
from selftpt.losses import Head
from selftpt.models import Model, load_model
from selftpt.models.text import TextEncoder, before_name, encode_template
from selftpt.models.tokenizer import ClassTokens, end_ids, tokenize
from selftpt.objective import Batch, Task, contrast_step, joint_step
from selftpt.prompt import initial_context, initial_head


def class_names(count: int) -> list[str]:
    """Return ImageNet's names in random order; beyond those, short names after an adjective."""
    names = list(dict.fromkeys(IMAGENET_CLASSNAMES))
    adjectives = "red black white small giant wild old wooden golden spotted".split()
    more = [f"{adjective} {name}" for name in names if len(name.split()) < 3 for adjective in adjectives]
    rng = random.Random(0)
    rng.shuffle(names)
    rng.shuffle(more)
    return (names + more)[:count]


class PlainEncoder:
    """The plain forward pass: open_clip's modules on the embeddings of all positions."""

    single_pass = True
    views: tuple[View, ...] = VIEWS

    def __init__(self, model: Model, tokens: ClassTokens, length: int) -> None:
        self.clip, self.shape = model.clip, (len(VIEWS), len(tokens))
        tokenizer = model.text.tokenizer
        dot, rows, index = tokenizer.encode("."), list[int](), list[int]()
        joint = end_ids(tokenizer, tokens.names)
        sentences: list[list[int]] = []
        for view in VIEWS:
            before = before_name(view, length)
            for name, end in zip(tokens.ids, joint, strict=True):
                first = len(sentences) * tokenizer.context + 1  # the row after the start token
                rows += [first + k + (len(name) if k >= before else 0) for k in range(length)]
                index += range(length)
                split = [0] * before + list(name) + [0] * (length - before) + dot
                sentences.append(tokenizer.add_special_tokens([0] * length + end if view == "end" else split))
        self.rows, self.index, self.ids = torch.tensor(rows), torch.tensor(index), torch.tensor(sentences)
        words = tokenizer.encode("a photo of a")
        self.hand_ids = torch.tensor([tokenizer.add_special_tokens([*words, *ids]) for ids in joint])

    def _forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.clip.transformer(x + self.clip.positional_embedding, attn_mask=self.clip.attn_mask)
        features: Tensor = self.clip.ln_final(x)[torch.arange(len(x)), ids.argmax(-1)] @ self.clip.text_projection
        return features

    def __call__(self, prompt: Tensor) -> Tensor:
        x = self.clip.token_embedding(self.ids)
        x = x.flatten(0, 1).index_copy(0, self.rows, prompt[self.index]).view_as(x)
        return self._forward(x, self.ids).view(*self.shape, -1)

    @torch.no_grad()
    def hand_crafted(self) -> Tensor:
        return self._forward(self.clip.token_embedding(self.hand_ids), self.hand_ids)


class Bench:
    """One class list with a fixed prompt and head, for the packed (`ours`) or the plain forward pass."""

    def __init__(self, model: Model, classes: int, ours: bool, chunk: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model, self.ours, self.chunk = model, ours, chunk
        self.tokens = tokenize(class_names(classes), model.text.tokenizer, 70)
        self.context = initial_context(model, 4, "a photo of a", generator)
        self.head: Head = initial_head(model.dimension, model.dimension, 128, generator)
        self.average = torch.randn(self.context.shape, generator=generator) * 1e-2
        images = F.normalize(torch.randn(4, model.dimension, generator=generator), dim=-1)
        self.batch = Batch(images, torch.arange(4), 100.0)

    def prepare(self) -> None:
        """Prepare what is computed once per class list."""
        hand_crafted = None
        if self.ours:
            self.encoder: TextEncoder = TextEncoder(self.model.text, self.tokens, 4, chunk=self.chunk)
            hand_crafted = encode_template(self.model.text, self.tokens, "a photo of a {}.", self.chunk)
        else:
            self.encoder = PlainEncoder(self.model, self.tokens, 4)  # type: ignore[assignment]
        self.task = Task(self.encoder, hand_crafted, self.tokens.name_ids, ContrastConfig())

    def _task(self) -> Task:
        """Return the task of a step; the plain forward pass computes the hand-crafted view again."""
        if isinstance(self.encoder, PlainEncoder):
            return Task(self.encoder, self.encoder.hand_crafted(), self.tokens.name_ids, ContrastConfig())
        return self.task

    def stage2(self) -> Tensor:
        """Return the gradient of a step of stage 2."""
        return contrast_step(self._task(), self.context, self.head)[1]

    def stage1(self) -> Tensor:
        """Return the gradient of a step of stage 1."""
        if self.ours:
            return joint_step(
                self.task, self.context, self.head, self.batch, self.average, LearnConfig()
            ).prompt_gradient
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            return joint_step(
                self._task(), self.context, self.head, self.batch, self.average, LearnConfig()
            ).prompt_gradient


def memory(stage: int, classes: int, ours: bool, chunk: int | None) -> None:
    """Print the extra memory of one step, including the preparation of the encoder."""
    model = load_model("ViT-B-16-quickgelu", "random", device="cpu")

    def job(classes: int) -> None:
        bench = Bench(model, classes, ours, chunk)
        bench.prepare()
        bench.stage1() if stage == 1 else bench.stage2()

    job(4)  # loads libraries, whose memory is not counted
    print(json.dumps({"mb": extra_memory(lambda: job(classes))}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--chunk", type=int, default=14, help="classes per chunk")
    parser.add_argument("--stage1-classes", type=int, default=40, help="classes of stage 1 (plain: 0.3 GB per class)")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one that is not counted")
    parser.add_argument("--small", action="store_true", help="use a tenth of the classes, to test the script")
    parser.add_argument("--memory", nargs=4, metavar=("STAGE", "CLASSES", "OURS", "CHUNK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        stage, classes, use_ours, chunk = map(int, options.memory)
        memory(stage, classes, bool(use_ours), chunk or None)
        return

    model = load_model("ViT-B-16-quickgelu", "random", device="cpu")
    few, many, most, first = (10, 100, 40, 4) if options.small else (100, 1000, 2000, options.stage1_classes)
    result: dict[str, float | list[float]] = {
        "threads": options.threads,
        "rounds": options.rounds,
        "stage1_classes": first,
        "chunk": options.chunk,
    }

    def make(classes: int, ours: bool = True, chunk: int | None = None) -> Bench:
        bench = Bench(model, classes, ours, chunk)
        bench.prepare()
        return bench

    def mb(stage: int, classes: int, ours: int, chunk: int = 0) -> float:
        arguments = [str(value) for value in (stage, classes, ours, chunk)]
        return float(in_own_process(__file__, "--threads", str(options.threads), "--memory", *arguments)["mb"])

    def compare(field: str, over: Callable[[], object], under: Callable[[], object], divisor: float = 1) -> None:
        """Print and store the ratio of two jobs' times, divided by `divisor`."""
        seconds = interleaved({"over": over, "under": under}, rounds=options.rounds)
        ratios = [a / b / divisor for a, b in zip(seconds["over"], seconds["under"], strict=True)]
        result[field], result[f"{field}_range"] = statistics.median(ratios), [min(ratios), max(ratios)]
        result[f"{field}_seconds"] = [statistics.median(times) for times in seconds.values()]
        print(f"{field}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)

    plain, ours = make(few, ours=False), make(few)
    expected = plain.stage2()
    result["stage2_gradient_difference"] = ((expected - ours.stage2()).norm() / expected.norm()).item()
    compare("stage2_speedup", plain.stage2, ours.stage2)
    plain, ours_1 = make(first, ours=False), make(first)
    compare("stage1_speedup", plain.stage1, ours_1.stage1)
    del plain, ours_1
    long = make(many)
    compare("growth_1000_over_100", long.stage2, ours.stage2, divisor=many / few)
    del long, ours
    unchunked, chunked = make(most), make(most, chunk=options.chunk)
    compare("chunked_time_ratio", chunked.stage2, unchunked.stage2)
    del unchunked, chunked

    plain_mb, ours_mb = mb(2, few, 0), mb(2, few, 1)
    result["stage2_plain_mb"], result["stage2_mb"] = plain_mb, ours_mb
    result["stage2_memory_ratio"] = plain_mb / ours_mb
    result["chunked_extra_mb"] = mb(2, most, 1, options.chunk)
    print(f"memory of stage 2: the packed forward pass needs 1/{plain_mb / ours_mb:.1f} of the plain one's")
    print(f"memory of stage 2 in chunks, {most:,} classes: {result['chunked_extra_mb']:.0f} MB")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
