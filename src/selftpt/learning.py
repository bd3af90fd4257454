"""Stage 1: soft prompts are learned on source data with cross-entropy, CPT and gradient matching."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.features import FeatureStore, Look
from selftpt.files import check_writable, digest, read_tensors, write_after, write_tensors
from selftpt.images import PictureError, Source, read_folder, warn_of
from selftpt.losses import Head
from selftpt.models import Model
from selftpt.objective import Batch, Step, Task, joint_step
from selftpt.progress import Bar
from selftpt.prompt import Prompt, initial_context, initial_head
from selftpt.settings import VIEWS, LearnConfig
from selftpt.text import TextEncoder, encode_template
from selftpt.tokens import ClassTokens, class_tokens
from selftpt.version import __version__


def learning_rate(epoch: int, config: LearnConfig) -> float:
    """The rate of an epoch: a constant warm-up in the first, then the cosine, not shortened by it (as in CoOp)."""
    if epoch == 0:
        return config.warmup_lr
    return config.lr * (1 + math.cos(math.pi * (epoch - 1) / config.epochs)) / 2


def learn(
    model: Model,
    source: str | os.PathLike[str] | Source,
    config: LearnConfig | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    on_error: Callable[[PictureError], None] = warn_of,
) -> Prompt:
    """Learn a prompt from labelled pictures.

    source: a folder with a folder a class, or a `Source`.
    out: where the prompt is written; beside it `OUT.log.jsonl`, a line a step, and while it learns
    `OUT.checkpoint`, from which a run that was killed goes on to the same bits.
    on_error: is told of every picture that cannot be used; the others go on.
    """
    config = config or LearnConfig()
    path = Path(out) if out is not None else None
    if path:
        check_writable(path)
    few = (source if isinstance(source, Source) else read_folder(source)).few(config.shots, config.seed)
    tokens = class_tokens(model.text.tokenizer, few.names, config.length, config.contrast)
    look = Look(config.epochs, max_megapixels=config.max_megapixels)
    features = FeatureStore(model, look, on_error)(few.paths)
    labels = torch.tensor(few.labels)
    usable = ~features.isnan().flatten(1).any(1)
    for label, name in enumerate(few.names):
        if not usable[labels == label].any():
            raise SelfTPTError(f"the class {name!r} has no picture that can be read")
    return learn_from_features(model, tokens, features[usable], labels[usable], config, path)


def learn_from_features(
    model: Model, tokens: ClassTokens, features: Tensor, labels: Tensor, config: LearnConfig, out: Path | None = None
) -> Prompt:
    """Stage 1 proper, which touches no pixel.

    features: [N, epochs, D], unit features of the crop of each picture for each epoch; labels: [N].
    """
    device = model.device
    generator = torch.Generator().manual_seed(config.seed)
    context = initial_context(model, config.length, config.words, generator)
    head = initial_head(model.dimension, config.hidden or model.dimension, config.projection, generator)
    state = State(context.to(device), Head(*(t.to(device) for t in head)), config)
    lists = ClassLists(model, tokens, config)

    settings = dataclasses.asdict(config)
    content = hashlib.sha256(features.contiguous().numpy().data).hexdigest()
    made_of = digest(__version__, model.id.digest, settings, tokens.names, content, labels.tolist())
    files = RunFiles(out, made_of)
    first = files.resume(state)
    steps = len(labels) // config.batch if len(labels) >= config.batch else 1
    with Bar("learning", steps * config.epochs, done=steps * first) as bar:
        for epoch in range(first, config.epochs):
            rate = learning_rate(epoch, config)
            lines = []
            for step, chosen in enumerate(_batches(len(labels), config, epoch)):
                task, classes = lists.draw(labels[chosen].tolist(), f"classes {config.seed} {epoch} {step}")
                batch = Batch(features[chosen, epoch].to(device), classes.to(device), model.scale)
                result = joint_step(task, state.context, state.head, batch, state.average, config)
                if not all(map(math.isfinite, result.losses.values())):
                    raise SelfTPTError(
                        f"the losses are no longer numbers in epoch {epoch}, step {step}: lower the rate"
                    )
                state.descend(result, rate)
                lines.append({"epoch": epoch, "step": step, "lr": rate, **result.losses})
                bar.step()
            files.keep(state, epoch + 1, lines, model.id.meaningless)
    origin = {
        "stage": "learn",
        "settings": settings,
        "classes": list(tokens.names),
        "pictures": len(labels),
        "selftpt": __version__,
    }
    learned = [parameter.detach().cpu() for parameter in state.parameters]
    prompt = Prompt(learned[0], Head(*learned[1:]), config.contrast, model.id, origin)
    files.finish(prompt)
    return prompt


def _batches(count: int, config: LearnConfig, epoch: int) -> Sequence[Tensor]:
    """The pictures of each step of an epoch; the last incomplete batch is dropped unless it is the only one."""
    generator = torch.Generator().manual_seed(config.seed * 100_003 + epoch)
    batches = torch.randperm(count, generator=generator).split(config.batch)
    return [batch for batch in batches if len(batch) == config.batch] or batches


class ClassLists:
    """The class list of a step: all classes, or the batch's own and others drawn at random."""

    def __init__(self, model: Model, tokens: ClassTokens, config: LearnConfig) -> None:
        self.model, self.tokens, self.config = model, tokens, config
        self.hand = None
        if config.contrasts and "hand" in config.contrast.views:
            self.hand = encode_template(model.text, tokens, config.contrast.template, config.chunk)
        self.all = None if config.classes_per_step else self._task(tokens, self.hand)

    def _task(self, tokens: ClassTokens, hand: Tensor | None) -> Task:
        config = self.config
        contrasted = config.contrast.learned if config.contrasts else ()
        views = [view for view in VIEWS if view == "end" or view in contrasted]  # cross-entropy is of Eq. 2
        encoder = TextEncoder(self.model.text, tokens, config.length, views, chunk=config.chunk)
        return Task(encoder, hand, tokens.same.to(self.model.device), config.contrast)

    def draw(self, labels: Sequence[int], seed: str) -> tuple[Task, Tensor]:
        """The step's class list, and the labels [B] in it."""
        if self.all is not None:
            return self.all, torch.tensor(labels)
        own = sorted(set(labels))
        others = sorted(set(range(len(self.tokens))) - set(own))
        wanted = max(0, (self.config.classes_per_step or 0) - len(own))
        chosen = own + random.Random(seed).sample(others, min(wanted, len(others)))
        hand = None if self.hand is None else self.hand[torch.tensor(chosen, device=self.hand.device)]
        return self._task(self.tokens.subset(chosen), hand), torch.tensor([chosen.index(label) for label in labels])


class State:
    """All that changes while learning: what SGD updates, its momentum, and the average of gradients."""

    def __init__(self, context: Tensor, head: Head, config: LearnConfig) -> None:
        self.parameters = [context, *head]
        self.average: Tensor | None = None
        self.optimizer = torch.optim.SGD(
            self.parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )

    @property
    def context(self) -> Tensor:
        return self.parameters[0]

    @property
    def head(self) -> Head:
        return Head(*self.parameters[1:])

    def descend(self, step: Step, rate: float) -> None:
        """One step of SGD."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(self.parameters, [step.prompt, *step.head], strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.average = step.average

    def tensors(self) -> dict[str, Tensor]:
        """Everything, by name."""
        named = {f"parameter.{i}": p for i, p in enumerate(self.parameters)}
        for i, p in enumerate(self.parameters):
            if (buffer := self.optimizer.state[p].get("momentum_buffer")) is not None:
                named[f"momentum.{i}"] = buffer
        if self.average is not None:
            named["average"] = self.average
        return named

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Back to what `tensors()` gave."""
        for i, p in enumerate(self.parameters):
            p.data.copy_(tensors[f"parameter.{i}"])
            if (buffer := tensors.get(f"momentum.{i}")) is not None:
                self.optimizer.state[p]["momentum_buffer"] = buffer.to(p.device)
        self.average = tensors["average"].to(self.context.device) if "average" in tensors else None


class RunFiles:
    """Prompt, log and checkpoint of one run, or nothing at all without a path."""

    def __init__(self, out: Path | None, made_of: str) -> None:
        self.out, self.made_of = out, made_of
        self.logged = 0  # bytes of the log that the checkpoint vouches for
        if out is not None:
            self.log = out.with_name(out.name + ".log.jsonl")
            self.checkpoint = out.with_name(out.name + ".checkpoint")

    def resume(self, state: State) -> int:
        """Restore the state of a run of the same making; how many epochs it had done."""
        if self.out is None or not os.path.exists(self.checkpoint):
            return 0
        try:
            header, tensors = read_tensors(self.checkpoint, "checkpoint")
        except SelfTPTError as error:
            warnings.warn(f"learning from the start: {error}", SelfTPTWarning, stacklevel=3)
            return 0
        if header["made_of"] != self.made_of:
            warnings.warn(f"learning from the start: {self.checkpoint} is of another run", SelfTPTWarning, stacklevel=3)
            return 0
        state.restore(tensors)
        self.logged = header["logged"]
        return int(header["epochs"])

    def keep(self, state: State, epochs: int, lines: list[dict[str, Any]], meaningless: bool) -> None:
        """After an epoch: its log and a checkpoint."""
        if self.out is None:
            return
        mark = {"meaningless": True} if meaningless else {}
        text = "".join(json.dumps({**line, **mark}) + "\n" for line in lines).encode()
        write_after(self.log, self.logged, text)
        self.logged += len(text)
        header = {"made_of": self.made_of, "epochs": epochs, "logged": self.logged}
        write_tensors(self.checkpoint, "checkpoint", state.tensors(), header)

    def finish(self, prompt: Prompt) -> None:
        """At the end: the prompt, and the checkpoint goes."""
        if self.out is not None:
            prompt.save(self.out)
            self.checkpoint.unlink(missing_ok=True)
