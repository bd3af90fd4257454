"""Compare selftpt's TPT with a plain implementation: time and memory for one image.

The plain implementation works like TPT's public code: a text forward pass over all 77 positions, a backward pass, a
step of AdamW, and a second forward pass. The model is the text tower of ViT-B/16 with random weights, in fp32, with 100
classes. The features of the image's 64 views are random. What is computed once per class list counts for the memory,
but not for the time. The script checks that both implementations give the same probabilities.
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

from selftpt.methods.tpt import TptConfig, make_tuner
from selftpt.models import Model, load_model
from selftpt.models.tokenizer import end_ids

CLASSES = 100


class PlainTPT:
    """Plain TPT: the prompt is reset for every image, and open_clip's modules compute all positions."""

    def __init__(self, model: Model, names: Sequence[str], config: TptConfig) -> None:
        self.clip, self.scale, self.config = model.clip, model.scale, config
        tokenizer = model.text.tokenizer
        words = tokenizer.encode(config.words)
        sentences = [tokenizer.add_special_tokens([*words, *ids]) for ids in end_ids(tokenizer, names)]
        self.ids = torch.tensor(sentences)
        embeddings = self.clip.token_embedding(self.ids).detach()
        self.initial_prompt = embeddings[0, 1 : 1 + len(words)].clone()
        self.before, self.after = embeddings[:, :1], embeddings[:, 1 + len(words) :]

    def logits(self, prompt: Tensor, views: Tensor) -> Tensor:
        """Return the logits [V, C] of views [V, D] with a prompt [M, width]."""
        x = torch.cat([self.before, prompt.expand(len(self.ids), -1, -1), self.after], 1)
        x = self.clip.transformer(x + self.clip.positional_embedding, attn_mask=self.clip.attn_mask)
        x = self.clip.ln_final(x)[torch.arange(len(x)), self.ids.argmax(-1)] @ self.clip.text_projection
        return self.scale * views @ F.normalize(x, dim=-1).t()

    def __call__(self, images: Tensor) -> Tensor:
        """Return the probabilities [N, C] of images, given as features of their views [N, V, D]."""
        config, results = self.config, []
        for views in images:
            prompt = self.initial_prompt.clone().requires_grad_()
            optimizer = torch.optim.AdamW([prompt], lr=config.lr, weight_decay=config.weight_decay)
            probabilities = self.logits(prompt, views).softmax(-1)
            entropy = torch.special.entr(probabilities).sum(-1)
            selected = entropy.argsort()[: int(len(views) * config.confidence_ratio)]
            torch.special.entr(probabilities[selected].mean(0)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                results.append(self.logits(prompt, views[:1])[0].softmax(-1))
        return torch.stack(results)


def make_tpt(model: Model, implementation: str, classes: int) -> Callable[[Tensor], Tensor]:
    """Return an implementation of TPT: a function of the features of views [N, V, D]."""
    config, names = TptConfig(), class_names(classes)
    if implementation == "plain":
        return PlainTPT(model, names, config)
    return make_tuner(model, names, model.text.embed_words(config.words), config)


def random_views(model: Model) -> Tensor:
    """Return L2-normalised features of the views of one image [1, 64, D]."""
    features = torch.randn(1, TptConfig().views, model.dimension, generator=torch.Generator().manual_seed(0))
    return F.normalize(features, dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object on the last line")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; several wait for each other on a busy machine"
    )
    parser.add_argument("--rounds", type=int, default=1, help="counted rounds, after one that is not counted")
    parser.add_argument("--memory", choices=["plain", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model("ViT-B-16", "random", device="cpu")
    views = random_views(model)
    if options.memory:
        make_tpt(model, options.memory, 4)(views)  # loads libraries, whose memory is not counted
        print(json.dumps({"mb": extra_memory(lambda: make_tpt(model, options.memory, CLASSES)(views))}))
        return

    implementations = "plain", "ours"
    probabilities: dict[str, Tensor] = {}

    def job(implementation: str) -> Callable[[], None]:
        tpt = make_tpt(model, implementation, CLASSES)
        return lambda: probabilities.update({implementation: tpt(views)})

    seconds = interleaved({implementation: job(implementation) for implementation in implementations}, options.rounds)
    difference = (probabilities["plain"] - probabilities["ours"]).abs().max().item()
    plain = PlainTPT(model, class_names(CLASSES), TptConfig())
    with torch.no_grad():
        untuned = plain.logits(plain.initial_prompt, views[0, :1]).softmax(-1)
    change = (probabilities["plain"] - untuned).abs().max().item()
    assert difference < 1e-3 * change, f"the results differ by {difference}, and tuning changes them by {change}"
    arguments = "--threads", str(options.threads), "--memory"
    mb = {name: float(in_own_process(__file__, *arguments, name)["mb"]) for name in implementations}
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
        "moved_by_tuning": change,
    }
    print(f"TPT for one image and {CLASSES} classes, compared with the plain implementation:")
    print(f"  {result['speedup']:.1f} times the speed, 1/{result['memory_ratio']:.1f} of the memory")
    print(f"  largest difference of a probability: {difference:.1e} (tuning changes probabilities by {change:.1e})")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
