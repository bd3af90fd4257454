"""All that changes while training."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selftpt.config import TrainConfig


@dataclass
class State:
    """All that changes while training.

    Args:
        parameters: What the optimizer updates.
        optimizer: Has a state of its own after the first step.
        memory: What else a step leaves for the next one, empty before the first step.
        remembers: A tensor of the same shape and data type as each entry that `memory` will have.
    """

    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer
    memory: dict[str, Tensor] = field(default_factory=dict)
    remembers: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def sgd(
        cls, parameters: Sequence[Tensor], config: TrainConfig, remembers: Mapping[str, Tensor] | None = None
    ) -> State:
        """Parameters that are updated by SGD as configured."""
        optimizer = torch.optim.SGD(
            list(parameters), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        return cls(parameters, optimizer, remembers=remembers or {})

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
        """Go back to what `tensors()` gave after a step or more.

        Raises:
            ValueError: These are not the tensors of such a state; nothing was changed.
        """
        wanted = self._after_a_step()
        if tensors.keys() != wanted.keys():
            raise ValueError("its tensors are not those of this run")
        for name, tensor in tensors.items():
            if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
                raise ValueError(f"{name} must be {_described(wanted[name])}, not {_described(tensor)}")
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

    def _after_a_step(self) -> dict[str, Tensor]:
        """Tensors of the names, shapes and data types that `tensors()` gives after a step."""
        parameters, optimizer = copy.deepcopy((list(self.parameters), self.optimizer))
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return State(parameters, optimizer, dict(self.remembers)).tensors()


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
