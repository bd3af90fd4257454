"""All that changes while training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selftpt.config import TrainConfig


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
