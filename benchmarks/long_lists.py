"""Measure the memory and the time per name of one step with long class lists.

The model is the embedded one, and each size is measured in a process of its own. The memory is that above the loaded
model; it includes what is prepared for a class list (tokens, template features, encoder). The fraction of the time that
the [4C, 4C] similarities of Eq. 9 take shows from which size on they dominate.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.nn.functional as F
from measure import extra_memory, in_own_process
from text_path import class_names

from selftpt.config import AdaptConfig, LearnConfig
from selftpt.learning import ClassLists
from selftpt.losses import Head, cpt
from selftpt.models import Model, load_model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import Batch, Task, contrast_step, joint_step
from selftpt.prompt import Prompt

SIZES = (1000, 2000, 5000, 10000, 21000)
GRADIENT_MATCHING = 5000


def names_of(count: int) -> list[str]:
    """Return distinct names: those of `class_names`, then the same names with numbers."""
    names = class_names(count)
    return [names[i] if i < len(names) else f"{names[i % len(names)]} {i // len(names)}" for i in range(count)]


def time_step(model: Model, stage: int, count: int) -> dict[str, float]:
    """Prepare a class list of `count` names and make one step.

    Returns:
        The seconds of the step and, for stage 2, of its similarities.
    """
    prompt, config = Prompt.embedded(), LearnConfig()
    head, contrast = Head(*prompt.head), prompt.contrast
    tokens = class_tokens(model.text.tokenizer, names_of(count), len(prompt.context), contrast)
    if stage == 1:
        images = F.normalize(torch.randn(4, model.dimension, generator=torch.Generator().manual_seed(0)), dim=-1)
        batch = Batch(images, torch.arange(4), model.scale)
        task, _ = ClassLists(model, tokens, config).draw([0, 1, 2, 3], "")
        begin = time.perf_counter()
        joint_step(task, prompt.context, head, batch, torch.ones_like(prompt.context), config)
        return {"seconds": time.perf_counter() - begin}
    chunk = AdaptConfig.chunk
    hand_crafted = encode_template(model.text, tokens, contrast.template, chunk)
    encoder = TextEncoder(model.text, tokens, len(prompt.context), contrast.learned, chunk=chunk)
    begin = time.perf_counter()
    contrast_step(Task(encoder, hand_crafted, tokens.name_ids, contrast), prompt.context, head)
    seconds = time.perf_counter() - begin
    z = F.normalize(torch.randn(4, count, len(head.w2)), dim=-1).requires_grad_()
    begin = time.perf_counter()
    torch.autograd.grad(cpt(z), z)
    return {"seconds": seconds, "similarities": time.perf_counter() - begin}


def measure(stage: int, count: int) -> dict[str, Any]:
    """Measure one step: its memory in MB, its seconds and its time per name."""
    model = load_model(device="cpu")
    time_step(model, stage, 300)  # loads libraries, whose memory is not counted
    result: dict[str, Any] = {}
    result["mb"] = extra_memory(lambda: result.update(time_step(model, stage, count)))
    return {"stage": stage, "names": count, **result, "ms_per_name": 1e3 * result["seconds"] / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--one", nargs=2, type=int, metavar=("STAGE", "NAMES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    rows = []
    for stage, count in [*((2, count) for count in SIZES), (1, GRADIENT_MATCHING)]:
        row = in_own_process(__file__, "--threads", str(options.threads), "--one", str(stage), str(count))
        rows.append(row)
        share = f", similarities {row['similarities'] / row['seconds']:.0%}" if "similarities" in row else ""
        print(
            f"stage {stage}, {count:6,} names: {row['mb']:5.0f} MB, {row['ms_per_name']:.2f} ms per name{share}",
            flush=True,
        )
    if options.json:
        print(json.dumps({"threads": options.threads, "rows": rows}))


if __name__ == "__main__":
    main()
