"""Descent on labelled pictures, epoch by epoch, by CoOp's schedule; what was killed goes on to the same bits."""

from __future__ import annotations

import json
import math
import os
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.features import GROUP, FeatureStore, Look
from selftpt.files import read_tensors, write_after, write_tensors
from selftpt.images import PictureError, Source, in_threads
from selftpt.models import Model
from selftpt.progress import Bar
from selftpt.settings import TrainConfig

Losses = Mapping[str, float]  # by name, for the log
StepFunction = Callable[[Tensor, int, int], tuple[Losses, Sequence[Tensor]]]


def learning_rate(epoch: int, config: TrainConfig) -> float:
    """The rate of an epoch: a constant warm-up in the first, then the cosine, not shortened by it (as in CoOp)."""
    if epoch == 0:
        return config.warmup_lr
    return config.lr * (1 + math.cos(math.pi * (epoch - 1) / config.epochs)) / 2


def source_features(
    model: Model, source: Source, config: TrainConfig, on_error: Callable[[PictureError], None]
) -> tuple[Tensor, Tensor]:
    """Unit features [N, crops, D] of random crops of the source's pictures, and their labels [N].

    Crops are as many as epochs, unless the settings say fewer. Pictures that cannot be used are left out.
    """
    features = FeatureStore(model, _look(config), on_error)(source.paths)
    usable = ~features.isnan().flatten(1).any(1)
    return features if usable.all() else features[usable], _labels(source, usable)


class Crops:
    """Pixels of random crops of pictures: those of `source_features`, cut when they are asked for."""

    def __init__(self, model: Model, paths: Sequence[Path], look: Look) -> None:
        self.model, self.paths, self.look = model, paths, look

    def __call__(self, chosen: Tensor, epoch: int) -> Tensor:
        """One crop of each of the chosen pictures [B] for an epoch: uint8 [B, 3, S, S]."""
        paths = [self.paths[i] for i in chosen.tolist()]
        cuts = []
        for cut in in_threads(lambda path: self._cut(path, epoch), paths, ahead=len(paths)):
            if isinstance(cut, PictureError):
                raise cut
            cuts.append(cut)
        return torch.cat(cuts)

    def _cut(self, path: Path, epoch: int) -> Tensor | PictureError:
        return self.look.cut(self.model.preprocess, path, epoch % self.look.crops)


def source_crops(
    model: Model, source: Source, config: TrainConfig, on_error: Callable[[PictureError], None]
) -> tuple[Crops, Tensor]:
    """Pixels of random crops of the source's pictures, and their labels [N], as `source_features` for features."""
    crops, usable = Crops(model, source.paths, _look(config)), []
    for cut in in_threads(lambda path: crops._cut(path, 0), source.paths, ahead=GROUP):
        usable.append(isinstance(cut, Tensor))
        if isinstance(cut, PictureError):
            on_error(cut)
    crops.paths = [path for path, good in zip(source.paths, usable, strict=True) if good]
    return crops, _labels(source, torch.tensor(usable))


def _look(config: TrainConfig) -> Look:
    return Look(config.crops or config.epochs, max_megapixels=config.max_megapixels)


def _labels(source: Source, usable: Tensor) -> Tensor:
    """The labels of usable pictures [N]; refused if a class has none."""
    labels = torch.tensor(source.labels)
    for label, name in enumerate(source.names):
        if not usable[labels == label].any():
            raise SelfTPTError(f"the class {name!r} has no picture that can be read")
    return labels[usable]


def seeded(text: str) -> torch.Generator:
    """A generator of its own for every text."""
    return torch.Generator().manual_seed(random.Random(text).getrandbits(63))


@dataclass
class State:
    """All that changes while learning: what the optimizer updates, its own memory, and what else a step remembers."""

    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer
    memory: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def sgd(cls, parameters: Sequence[Tensor], config: TrainConfig) -> State:
        """Parameters descended by the settings' SGD."""
        return cls(
            parameters,
            torch.optim.SGD(list(parameters), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything, by name."""
        named = {f"parameter.{i}": p.detach() for i, p in enumerate(self.parameters)}
        for i, p in enumerate(self.parameters):
            named |= {
                f"optimizer.{i}.{key}": value
                for key, value in self.optimizer.state[p].items()
                if isinstance(value, Tensor)
            }
        return named | {f"memory.{key}": value for key, value in self.memory.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Back to what `tensors()` gave."""
        device = self.parameters[0].device
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "parameter":
                self.parameters[int(rest)].data.copy_(tensor)
            elif kind == "optimizer":
                i, _, key = rest.partition(".")
                self.optimizer.state[self.parameters[int(i)]][key] = tensor.to("cpu" if key == "step" else device)
            else:
                self.memory[rest] = tensor.to(device)


def train(
    state: State,
    step: StepFunction,
    count: int,
    config: TrainConfig,
    files: RunFiles,
    rate: Callable[[int, TrainConfig], float] = learning_rate,
) -> None:
    """Descend for `config.epochs`, in batches of `count` pictures.

    step: the pictures of a batch [B], the epoch and the step's number in it, to losses and the gradient of each of
    the state's parameters. rate: the learning rate of an epoch, which is all of it; a group of the optimizer may have
    one of its own, called "rate".
    """
    first = files.resume(state)
    steps = len(batches(count, config, 0))
    with Bar("learning", steps * config.epochs, done=steps * first) as bar:
        for epoch in range(first, config.epochs):
            lr = rate(epoch, config)
            for group in state.optimizer.param_groups:
                group["lr"] = group.get("rate", rate)(epoch, config)
            lines = []
            for number, chosen in enumerate(batches(count, config, epoch)):
                losses, gradients = step(chosen, epoch, number)
                if not all(map(math.isfinite, losses.values())):
                    raise SelfTPTError(
                        f"the losses are no longer numbers in epoch {epoch}, step {number}: lower the rate"
                    )
                for parameter, gradient in zip(state.parameters, gradients, strict=True):
                    parameter.grad = gradient
                state.optimizer.step()
                lines.append({"epoch": epoch, "step": number, "lr": lr, **losses})
                bar.step()
            files.keep(state, epoch + 1, lines)


def batches(count: int, config: TrainConfig, epoch: int) -> Sequence[Tensor]:
    """The pictures of each step of an epoch; the last incomplete batch is dropped unless it is the only one."""
    generator = torch.Generator().manual_seed(config.seed * 100_003 + epoch)
    parts = torch.randperm(count, generator=generator).split(config.batch)
    return [part for part in parts if len(part) == config.batch] or parts


class RunFiles:
    """What is learned, its log and its checkpoint, or nothing at all without a path.

    made_of: a digest of all that decides the result; a checkpoint of another making is not taken up.
    """

    def __init__(self, out: Path | None, made_of: str, meaningless: bool) -> None:
        self.out, self.made_of, self.meaningless = out, made_of, meaningless
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

    def keep(self, state: State, epochs: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """After an epoch: its log and a checkpoint."""
        if self.out is None:
            return
        mark = {"meaningless": True} if self.meaningless else {}
        text = "".join(json.dumps({**line, **mark}) + "\n" for line in lines).encode()
        write_after(self.log, self.logged, text)
        self.logged += len(text)
        header = {"made_of": self.made_of, "epochs": epochs, "logged": self.logged}
        write_tensors(self.checkpoint, "checkpoint", state.tensors(), header)

    def finish(self, save: Callable[[Path], None]) -> None:
        """At the end: what was learned is saved, and the checkpoint goes."""
        if self.out is not None:
            save(self.out)
            self.checkpoint.unlink(missing_ok=True)
