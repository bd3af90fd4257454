"""TPT for one image, the plain way against ours: time and memory, as ratios in one run, and the same probabilities.

ViT-B/16's text tower with random weights, fp32, 100 classes; the features of the image's 64 views are random unit
vectors. The plain way is that of the public program: a walk over all 77 positions with a graph, back, a step of AdamW,
and a second walk. What either does once a class list is not in its time, but is in its memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from measure import extra_memory, in_own_process, interleaved, ratio
from text_path import class_names
from torch import Tensor

from selftpt.methods.tpt import TptConfig, tuner
from selftpt.models import Model, load_model

CLASSES = 100


class PlainTPT:
    """One prompt, tuned and put back for every image; open_clip's own modules over every position."""

    def __init__(self, model: Model, names: Sequence[str], config: TptConfig) -> None:
        self.clip, self.scale, self.config = model.clip, model.scale, config
        tokenizer = model.text.tokenizer
        words = tokenizer.encode(config.words)
        self.ids = torch.tensor(
            [tokenizer.add_special_tokens([*words, *tokenizer.encode(name), *tokenizer.encode(".")]) for name in names]
        )
        embedded = self.clip.token_embedding(self.ids).detach()
        self.begin = embedded[0, 1 : 1 + len(words)].clone()
        self.before, self.after = embedded[:, :1], embedded[:, 1 + len(words) :]

    def logits(self, prompt: Tensor, views: Tensor) -> Tensor:
        x = torch.cat([self.before, prompt.expand(len(self.ids), -1, -1), self.after], 1)
        x = self.clip.transformer(x + self.clip.positional_embedding, attn_mask=self.clip.attn_mask)
        x = self.clip.ln_final(x)[torch.arange(len(x)), self.ids.argmax(-1)] @ self.clip.text_projection
        return self.scale * views @ F.normalize(x, dim=-1).t()

    def __call__(self, shown: Tensor) -> Tensor:
        s, answers = self.config, []
        for views in shown:
            prompt = self.begin.clone().requires_grad_()
            optimizer = torch.optim.AdamW([prompt], lr=s.lr, weight_decay=s.weight_decay)
            p = self.logits(prompt, views).softmax(-1)
            entropy = torch.special.entr(p).sum(-1)
            chosen = entropy.argsort()[: int(len(views) * s.confidence_ratio)]
            torch.special.entr(p[chosen].mean(0)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                answers.append(self.logits(prompt, views[:1])[0].softmax(-1))
        return torch.stack(answers)


def make(model: Model, way: str, classes: int) -> Callable[[Tensor], Tensor]:
    settings, names = TptConfig(), class_names(classes)
    if way == "plain":
        return PlainTPT(model, names, settings)
    return tuner(model, names, model.text.embed_words(settings.words), settings)


def image(model: Model) -> Tensor:
    """Unit features [1, 64, D]."""
    drawn = torch.randn(1, TptConfig().views, model.dimension, generator=torch.Generator().manual_seed(0))
    return F.normalize(drawn, dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=1, help="two wait for each other on a busy machine")
    parser.add_argument("--rounds", type=int, default=1, help="rounds that are counted, after one that is not")
    parser.add_argument("--memory", choices=["plain", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model("ViT-B-16", "random", device="cpu")
    shown = image(model)
    if options.memory:
        make(model, options.memory, 4)(shown)  # so that libraries are loaded
        print(json.dumps({"mb": extra_memory(lambda: make(model, options.memory, CLASSES)(shown))}))
        return

    ways = "plain", "ours"
    answers: dict[str, Tensor] = {}

    def job(way: str) -> Callable[[], None]:
        tune = make(model, way, CLASSES)
        return lambda: answers.update({way: tune(shown)})

    seconds = interleaved({way: job(way) for way in ways}, options.rounds)
    difference = (answers["plain"] - answers["ours"]).abs().max().item()
    plain = PlainTPT(model, class_names(CLASSES), TptConfig())
    with torch.no_grad():
        untuned = (answers["plain"] - plain.logits(plain.begin, shown[0, :1]).softmax(-1)).abs().max()
    assert difference < 1e-3 * untuned.item(), f"they differ by {difference}; tuning moves them by {untuned.item()}"
    arguments = "--threads", str(options.threads), "--memory"
    mb = {way: float(in_own_process(__file__, *arguments, way)["mb"]) for way in ways}
    result = {
        "threads": options.threads,
        "classes": CLASSES,
        "plain_seconds": min(seconds["plain"]),
        "seconds": min(seconds["ours"]),
        "speedup": ratio(seconds["plain"], seconds["ours"]),
        "plain_mb": mb["plain"],
        "mb": mb["ours"],
        "memory_ratio": mb["plain"] / mb["ours"],
        "difference": difference,
        "moved_by_tuning": untuned.item(),
    }
    told = f"{result['speedup']:.1f} times faster, 1/{result['memory_ratio']:.1f} of the memory"
    print(f"a image, {CLASSES} classes: {told}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
