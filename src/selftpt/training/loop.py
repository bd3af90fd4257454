"""Optimisation on labelled images, epoch by epoch, by CoOp's schedule."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from selftpt.config import TrainConfig
from selftpt.errors import SelfTPTError
from selftpt.progress import Bar
from selftpt.training.checkpoints import RunFiles
from selftpt.training.state import State

Losses = Mapping[str, float]  # by name, for the log
StepFunction = Callable[[Tensor, int, int], tuple[Losses, Sequence[Tensor]]]


def learning_rate(epoch: int, config: TrainConfig) -> float:
    """The rate of an epoch: a constant warm-up in the first, then the cosine, not shortened by it (as in CoOp)."""
    if epoch == 0:
        return config.warmup_lr
    return config.lr * (1 + math.cos(math.pi * (epoch - 1) / config.epochs)) / 2


def seeded(text: str) -> torch.Generator:
    """A generator of its own for every text."""
    return torch.Generator().manual_seed(random.Random(text).getrandbits(63))


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
    first = files.resume(state, config.epochs)
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
