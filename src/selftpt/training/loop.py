"""The training loop over labelled images, with CoOp's learning rate schedule."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selftpt.config import TrainConfig
from selftpt.errors import SelfTPTError
from selftpt.gradients import with_gradients
from selftpt.progress import Bar
from selftpt.training.checkpoints import RunFiles
from selftpt.training.state import State

Losses = Mapping[str, float]  # losses by name, for the log
# Maps the image indices [B] of a batch, the epoch and the number of the step to losses and gradients.
StepFunction = Callable[[Tensor, int, int], tuple[Losses, Sequence[Tensor]]]


def learning_rate(epoch: int, config: TrainConfig) -> float:
    """Return the learning rate of an epoch: a constant warm-up in the first epoch, then a cosine schedule.

    As in CoOp, the period of the cosine is the number of all epochs, including the warm-up epoch.
    """
    if epoch == 0:
        return config.warmup_lr
    return config.lr * (1 + math.cos(math.pi * (epoch - 1) / config.epochs)) / 2


def seeded(text: str) -> torch.Generator:
    """Return a random generator that is seeded with a text."""
    return torch.Generator().manual_seed(random.Random(text).getrandbits(63))


@dataclass
class Training:
    """A training run that is ready to start.

    Attributes:
        names: The name of each parameter.
        state: Parameters and optimizer.
        gradients: Maps the image indices [B] of a batch, the epoch and the number of the step in the epoch to the
            losses and the gradient of each parameter.
        images: Number of training images.
        config: Epochs, batch size, learning rate.
        rate: Maps an epoch to its learning rate. A parameter group of the optimizer may have its own function in the
            entry "rate".
        constants: Tensors that are returned with the learned parameters.
    """

    names: Sequence[str]
    state: State
    gradients: StepFunction
    images: int
    config: TrainConfig
    rate: Callable[[int, TrainConfig], float] = learning_rate
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(zip(self.names, self.state.parameters, strict=True))

    def start_from(self, initial: Mapping[str, Tensor]) -> None:
        """Set the initial values of some parameters.

        Raises:
            SelfTPTError: There is no parameter with this name, or its shape differs.
        """
        for name, value in initial.items():
            own = self.parameters.get(name)
            if own is None:
                raise SelfTPTError(f"no parameter is called {name!r}: initialise one of {', '.join(self.names)}")
            if own.shape != value.shape:
                raise SelfTPTError(f"the initial {name} must have shape {list(own.shape)}, not {list(value.shape)}")
            own.data.copy_(value)

    @with_gradients
    def step(self, epoch: int = 0, number: int = 0) -> Losses:
        """Do one optimisation step, the `number`-th of an epoch, and return its losses."""
        return self._step(batches(self.images, self.config, epoch)[number], epoch, number)

    @with_gradients
    def run(self, files: RunFiles) -> dict[str, Tensor]:
        """Train for all epochs, or resume an interrupted run from its checkpoint.

        Args:
            files: The log and the checkpoint.

        Returns:
            The learned parameters and the constants by name, on the CPU.

        Raises:
            SelfTPTError: A loss is not finite, or a file cannot be written.
        """
        config = self.config
        first = files.resume(self.state, config.epochs)
        steps = len(batches(self.images, config, 0))
        with Bar("learning", steps * config.epochs, done=steps * first) as bar:
            for epoch in range(first, config.epochs):
                lines = []
                for number, chosen in enumerate(batches(self.images, config, epoch)):
                    losses = self._step(chosen, epoch, number)
                    lines.append({"epoch": epoch, "step": number, "lr": self.rate(epoch, config), **losses})
                    bar.step()
                files.keep(self.state, epoch + 1, lines)
        return {name: tensor.detach().cpu() for name, tensor in {**self.parameters, **self.constants}.items()}

    def _step(self, chosen: Tensor, epoch: int, number: int) -> Losses:
        for group in self.state.optimizer.param_groups:
            group["lr"] = group.get("rate", self.rate)(epoch, self.config)
        losses, gradients = self.gradients(chosen, epoch, number)
        if not all(map(math.isfinite, losses.values())):
            raise SelfTPTError(f"the losses are not finite in epoch {epoch}, step {number}: lower the learning rate")
        for parameter, gradient in zip(self.state.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.state.optimizer.step()
        return losses


def batches(count: int, config: TrainConfig, epoch: int) -> Sequence[Tensor]:
    """Return the image indices of each step of an epoch, shuffled.

    The last batch is dropped if it is incomplete, unless it is the only one.
    """
    generator = torch.Generator().manual_seed(config.seed * 100_003 + epoch)
    parts = torch.randperm(count, generator=generator).split(config.batch)
    return [part for part in parts if len(part) == config.batch] or parts
