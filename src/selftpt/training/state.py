"""The state of a training run, which checkpoints save and restore."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selftpt.config import TrainConfig


@dataclass
class State:
    """The state of a training run: parameters, optimizer, and other tensors that a step passes to the next.

    Attributes:
        parameters: The tensors that the optimizer updates.
        optimizer: The optimizer.
        memory: Other tensors that a step passes to the next, by name. It is empty before the first step.
        remembers: The names of the entries that `memory` has after a step, each with a tensor of its shape and data
            type.
    """

    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer
    memory: dict[str, Tensor] = field(default_factory=dict)
    remembers: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def sgd(
        cls, parameters: Sequence[Tensor], config: TrainConfig, remembers: Mapping[str, Tensor] | None = None
    ) -> State:
        """Make a state with SGD as the optimizer, with the learning rate, momentum and weight decay of `config`."""
        optimizer = torch.optim.SGD(
            list(parameters), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        return cls(parameters, optimizer, remembers=remembers or {})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state by name."""
        named = {f"parameter.{i}": p.detach() for i, p in enumerate(self.parameters)}
        for i, p in enumerate(self.parameters):
            named |= {
                f"optimizer.{i}.{key}": value
                for key, value in self.optimizer.state[p].items()
                if isinstance(value, Tensor)
            }
        return named | {f"memory.{key}": value for key, value in self.memory.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors()` returned after at least one step.

        Raises:
            ValueError: The names, shapes or data types differ. The state is then not changed.
        """
        expected = self._after_a_step()
        if tensors.keys() != expected.keys():
            raise ValueError("its tensors are not those of this run")
        for name, tensor in tensors.items():
            if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
                raise ValueError(f"{name} must be {_describe(expected[name])}, not {_describe(tensor)}")
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
        """Return tensors with the names, shapes and data types that `tensors()` returns after a step."""
        parameters, optimizer = copy.deepcopy((list(self.parameters), self.optimizer))
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return State(parameters, optimizer, dict(self.remembers)).tensors()


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
