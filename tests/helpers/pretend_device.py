"""A simulated GPU, which tests device handling on machines without one.

All tensors are ordinary CPU tensors. A table records the simulated device of each storage. Inside `pretend_device()`,
`.to("cuda")`, factory functions with `device=`, `.device` and generators use the simulated device. Operations that a
GPU rejects raise `DeviceError`: operands on two devices, `.numpy()` of a GPU tensor, a generator of another device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
aten = torch.ops.aten
ACROSS = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Storage}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
Factory = torch.Generator


class DeviceError(RuntimeError):
    """Raised for an operation that would fail on a GPU."""


class PretendGenerator(Factory):
    """A CPU generator with a simulated device."""

    simulated_device = CPU

    def __new__(cls, device: Any = "cpu") -> PretendGenerator:
        generator = super().__new__(cls)
        generator.simulated_device = _place(device)
        return generator


def _place(device: Any) -> torch.device:
    return GPU if torch.device(device).type == "cuda" else CPU


class _Labels:
    """The simulated device of each storage.

    Weak references tell whether a storage is still alive, because addresses are reused.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self.made_on = CPU  # device of results that have no input tensors

    def of(self, tensor: Tensor) -> torch.device:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside vmap
            tensor = torch._C._functorch.get_unwrapped(tensor)
        known = self.known.get(tensor.untyped_storage()._cdata)
        return known[1] if known and not known[0].expired() else CPU

    def put(self, tensor: Tensor, device: torch.device) -> None:
        storage = tensor.untyped_storage()
        if device == CPU:
            self.known.pop(storage._cdata, None)
        else:
            self.known[storage._cdata] = StorageWeakRef(storage), device
        if len(self.known) > 20_000:
            self.known = {key: value for key, value in self.known.items() if not value[0].expired()}


class _Move(torch.autograd.Function):
    """Copy a tensor to another device; the backward pass copies the gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, labels: _Labels, device: torch.device) -> Tensor:
        ctx.labels, ctx.device = labels, labels.of(tensor)
        moved = tensor.clone()
        labels.put(moved, device)
        return moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Move.apply(grad, ctx.labels, ctx.device), None, None


class _Operations(TorchDispatchMode):
    """Check that the operands of every operation, forward and backward, share a device; put the result on it."""

    def __init__(self, labels: _Labels) -> None:
        super().__init__()
        self.labels = labels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        checked = given[:1] if func in INDEXED else [tensor for tensor in given if tensor.dim()]
        places = {self.labels.of(tensor) for tensor in checked}
        if len(places) > 1 and func not in ACROSS:
            raise DeviceError(f"{func} of tensors on two devices")
        place = GPU if GPU in {self.labels.of(tensor) for tensor in given} else CPU
        if not given:
            place = self.labels.made_on
        result = func(*args, **kwargs)
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in storages:
                self.labels.put(made, place)
        return result


class _Calls(TorchFunctionMode):
    """Handle every call from Python: device arguments, `.device`, transfers to the CPU, and generators."""

    def __init__(self, labels: _Labels) -> None:
        super().__init__()
        self.labels = labels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.labels.of(args[0])
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self.labels.of(args[0]) == GPU
        if func is torch.device or name == "_parse_to":
            return func(*args, **kwargs)
        if name == "pin_memory":
            return args[0]
        if name in {"numpy", "__array__"} and self.labels.of(args[0]) == GPU:
            raise DeviceError(f"{name} of a tensor on {GPU}: it needs .cpu()")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        requested = self._requested_device(name, args, kwargs)
        current = GPU if any(self.labels.of(tensor) == GPU for tensor in given) else CPU
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Factory) and getattr(leaf, "simulated_device", CPU) != (requested or current):
                raise DeviceError(
                    f"{name} on {requested or current} with a generator on {getattr(leaf, 'simulated_device', CPU)}"
                )
        args, kwargs = tree_map(_on_cpu, args), {key: _on_cpu(value) for key, value in kwargs.items()}
        before, self.labels.made_on = self.labels.made_on, requested or current
        try:
            if name in {"cpu", "cuda"}:
                result = args[0]
            else:
                result = func(*args, **kwargs)
        finally:
            self.labels.made_on = before
        if requested is not None and isinstance(result, Tensor) and self.labels.of(result) != requested:
            if given:
                return _Move.apply(result, self.labels, requested)
            self.labels.put(result, requested)
        return result

    def _requested_device(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        """Return the device that a call requests, or None."""
        if name in {"cpu", "cuda"}:
            return CPU if name == "cpu" else GPU
        if kwargs.get("device") is not None:
            return _place(kwargs["device"])
        if name == "to" and len(args) > 1:
            if isinstance(args[1], Tensor):
                return self.labels.of(args[1])
            if isinstance(args[1], str | torch.device):
                return _place(args[1])
        return None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return CPU
    return value


@contextlib.contextmanager
def pretend_device() -> Iterator[torch.device]:
    """Simulate a GPU inside the `with` block, and yield its device."""
    labels = _Labels()
    with mock.patch("torch.Generator", PretendGenerator), _Operations(labels), _Calls(labels):
        yield GPU
