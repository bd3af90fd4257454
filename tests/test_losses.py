"""The losses equal the paper's equations, written out as loops."""

from __future__ import annotations

import math
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selftpt import losses
from selftpt.losses import Head, cosine, cpt, cross_entropy, gradient_matching, moving_average, project
from tests.helpers.models import relative
from tests.oracle import reference


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.held:
                    self.held[key] = storage.nbytes()
                    weakref.finalize(storage, self.held.pop, key)
        self.peak = max(self.peak, sum(self.held.values()))
        return out


def first_equal(keys: Sequence[int]) -> Tensor:
    return torch.tensor([list(keys).index(key) for key in keys])


def derivatives(loss_of, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient and the second derivative along a fixed direction."""
    z = z.clone().requires_grad_()
    loss = loss_of(z)
    (first,) = torch.autograd.grad(loss, z, create_graph=True)
    (second,) = torch.autograd.grad((first * drawn(*z.shape, seed=99, dtype=z.dtype)).sum(), z)
    return loss.detach(), first.detach(), second


@settings(max_examples=40, deadline=None)
@given(
    views=st.integers(2, 4),
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    temperature=st.sampled_from([0.05, 0.07, 0.5, 2.0]),
    apart=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    unit=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(views=4, keys=[0, 1, 2], temperature=0.07, apart=False, reduction="sum", unit=True, seed=0)
@example(views=4, keys=[0, 1, 0, 0], temperature=0.07, apart=False, reduction="mean", unit=True, seed=0)
def test_cpt(
    views: int, keys: list[int], temperature: float, apart: bool, reduction: str, unit: bool, seed: int
) -> None:
    z = drawn(views, len(keys), 5, seed=seed)
    z = F.normalize(z, dim=-1) if unit else 0.4 * z

    def loop(z: Tensor) -> Tensor:
        return reference.cpt(list(z.flatten(0, 1)), views, temperature, None if apart else keys, reduction)

    same = None if apart else first_equal(keys)
    found = derivatives(lambda z: cpt(z, same, temperature, reduction), z)
    wanted = derivatives(loop, z)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-9 * max(1.0, other.norm().item())


def test_cpt_by_hand() -> None:
    """Two views of two classes, numbers that fit on a page."""
    a, b, c, d = 1.0, 2.0, 3.0, 4.0  # views of one feature: class 1 is a and c, class 2 is b and d
    e = math.exp
    terms = [
        e(a * c) / (e(a * b) + e(a * c) + e(a * d)),
        e(b * d) / (e(b * a) + e(b * c) + e(b * d)),
        e(c * a) / (e(c * a) + e(c * b) + e(c * d)),
        e(d * b) / (e(d * a) + e(d * b) + e(d * c)),
    ]
    z = torch.tensor([[[a], [b]], [[c], [d]]], dtype=torch.float64)
    assert cpt(z, temperature=1.0, reduction="sum").item() == pytest.approx(-sum(map(math.log, terms)), rel=1e-12)
    assert cpt(z, temperature=1.0).item() == pytest.approx(-sum(map(math.log, terms)) / 4, rel=1e-12)


def test_cpt_sums_positives_inside_the_logarithm() -> None:
    z = F.normalize(drawn(4, 3, 5), dim=-1)
    flat = z.flatten(0, 1)
    outside = 0.0
    for i, (positives, denominator) in enumerate(reference.index_sets(4, 3, None)):
        below = torch.stack([flat[i] @ flat[j] / 0.07 for j in denominator]).logsumexp(0)
        outside -= sum((flat[i] @ flat[j] / 0.07 - below).item() for j in positives) / len(positives)
    assert abs(cpt(z, reduction="sum").item() - outside) > 0.1


def test_cpt_of_one_class_or_of_equal_classes_is_zero() -> None:
    assert cpt(drawn(4, 1, 5)).item() == pytest.approx(0, abs=1e-12)
    assert cpt(drawn(4, 3, 5), torch.zeros(3, dtype=torch.long)).item() == pytest.approx(0, abs=1e-12)
    assert cpt(drawn(4, 3, 5)).item() > 0.1


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every block that is computed on its own."""
    seen: list[int] = []
    blocks = losses._Similarity.blocks

    def noted(self: losses._Similarity, z: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for rows, block in blocks(self, z):
            seen.append(len(block))
            yield rows, block

    monkeypatch.setattr(losses._Similarity, "blocks", noted)
    return seen


@pytest.mark.parametrize(("held", "sizes"), [(1, [64, 64, 32]), (160 * 70, [70, 70, 20]), (160 * 160, [160])])
@pytest.mark.parametrize("equal", [False, True])
def test_cpt_in_blocks_of_rows(held: int, sizes: list[int], equal: bool, blocks: list[int]) -> None:
    """Value, gradient and second derivative are those of one block."""
    z = F.normalize(drawn(4, 40, 6), dim=-1)
    same = first_equal([k % 30 for k in range(40)]) if equal else None
    wanted = derivatives(lambda z: cpt(z, same, held=1 << 30), z)
    blocks.clear()
    found = derivatives(lambda z: cpt(z, same, held=held), z)
    assert blocks == 4 * sizes  # forward, backward, backward of that, and once more through the saved denominators
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < 1e-12
        assert other.norm() > 1e-3


def test_cpt_in_blocks_of_rows_does_not_overflow(blocks: list[int]) -> None:
    z = 1e3 * drawn(3, 30, 5)
    value, first, second = derivatives(lambda z: cpt(z, None, 0.001, held=1), z)
    assert blocks == 4 * [64, 26]
    assert value.item() == pytest.approx(cpt(z, None, 0.001).item(), rel=1e-9)
    assert first.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("held", [1, 1 << 20])
def test_cpt_derivatives_match_finite_differences(held: int, equal: bool) -> None:
    same = torch.tensor([0, 1, 0] * 8) if equal else None
    z = F.normalize(drawn(3, 24, 3), dim=-1).requires_grad_()

    def loss(z: Tensor) -> Tensor:
        return cpt(z, same, 0.5, held=held)

    assert torch.autograd.gradcheck(loss, z)
    assert torch.autograd.gradgradcheck(loss, z)


def test_third_derivatives_of_cpt_are_refused() -> None:
    z = drawn(3, 4, 5).requires_grad_()
    (first,) = torch.autograd.grad(cpt(z), z, create_graph=True)
    with pytest.raises(RuntimeError, match="no third derivatives"):
        torch.autograd.grad(first.square().sum(), z, create_graph=True)


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_memory_of_cpt_is_linear_in_the_number_of_classes(second_order: bool, equal: bool) -> None:
    """The largest amount of memory that is alive at any time, counted by what every operation gives back."""

    def peak(classes: int) -> int:
        z = drawn(2, classes, 4, dtype=torch.float32).requires_grad_()
        same = torch.arange(classes) // 2 * 2 if equal else None
        with PeakMemory() as memory:
            (gradient,) = torch.autograd.grad(cpt(z, same, held=1), z, create_graph=second_order)
            if second_order:
                torch.autograd.grad(gradient.square().sum(), z)
        return memory.peak

    assert peak(1600) < 2.2 * peak(800)  # quadratic memory gives 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_memory_of_a_long_class_list_stays_small() -> None:
    """Small results allocated between large temporary tensors once kept the allocator from reusing their memory."""
    code = """
import torch
from selftpt.losses import cpt
torch.set_num_threads(1)
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
z = torch.nn.functional.normalize(torch.randn(4, 4000, 8), dim=-1).requires_grad_()
cpt(z[:, :600])
before = peak()
torch.autograd.grad(cpt(z), z)
print((peak() - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # megabytes; all similarities would be 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 30.0, 1e3, 1e5])
@pytest.mark.parametrize("temperature", [0.001, 0.07, 100.0])
def test_cpt_does_not_overflow(size: float, temperature: float, dtype: torch.dtype) -> None:
    z = (size * drawn(3, 4, 5, seed=3)).to(dtype)
    same = torch.tensor([0, 1, 0, 3])
    value, first, second = derivatives(lambda z: cpt(z, same, temperature, "sum"), z)
    wanted = reference.cpt_in_decimal(z.flatten(0, 1).tolist(), 3, temperature, same.tolist())
    # what is subtracted is as large as the largest similarity, and rounding with it
    largest = (z.double().flatten(0, 1).square().sum(-1).max() / temperature).item()
    rounding = 20 * torch.finfo(dtype).eps * max(1.0, largest)
    assert value.item() == pytest.approx(wanted, rel=1e-6 if dtype == torch.float32 else 1e-12, abs=rounding)
    assert first.isfinite().all()
    assert second.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    scale=st.sampled_from([1.0, 14.3, 100.0]),
    length=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_cross_entropy(labels: list[int], scale: float, length: float) -> None:
    images = F.normalize(drawn(len(labels), 6, seed=1), dim=-1)
    classes, target = length * drawn(4, 6, seed=2), torch.tensor(labels)
    found = derivatives(lambda w: cross_entropy(images, w, target, scale), classes)
    wanted = derivatives(lambda w: reference.cross_entropy(images, w, target, 1 / scale), classes)
    for order, (one, other) in enumerate(zip(found, wanted, strict=True)):
        usual = (scale / length) ** order  # where the right class is certain, all is nearly 0 and nothing but rounding
        assert (one - other).norm() <= 1e-9 * max(usual, other.norm().item())


def test_cross_entropy_of_certainty_is_finite() -> None:
    images = torch.eye(3)
    loss = cross_entropy(images, images, torch.tensor([1, 2, 0]), 1000.0)
    assert loss.item() == pytest.approx(1000.0)


@pytest.mark.parametrize("normalize", [True, False])
def test_project(normalize: bool) -> None:
    head = Head(drawn(7, 6, seed=1), drawn(7, seed=2), drawn(4, 7, seed=3), drawn(4, seed=4))
    features = drawn(3, 5, 6)
    found = project(features, head, normalize)
    wanted = torch.stack([reference.head(x, head, normalize) for x in features.flatten(0, 1)]).unflatten(0, (3, 5))
    assert relative(found, wanted) < 1e-12
    units = found.norm(dim=-1)
    assert torch.allclose(units, torch.ones_like(units)) is normalize


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 7), decay=st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_moving_average(count: int, decay: float) -> None:
    gradients = [drawn(4, 3, seed=seed) for seed in range(count)]
    average = None
    for gradient in gradients:
        average = moving_average(average, gradient, decay)
    assert relative(average, reference.moving_average(gradients, decay)) < 1e-12
    if decay == 0:
        assert torch.equal(average, gradients[-1])


@pytest.mark.parametrize("kind", ["cosine", "mse"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_gradient_matching(kind: str, size: float) -> None:
    target, gradient = drawn(4, 3, seed=1), size * drawn(4, 3, seed=2)
    found = derivatives(lambda g: gradient_matching(target, g, kind), gradient)
    wanted = derivatives(lambda g: reference.gradient_matching(target, g, kind), gradient)
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < 1e-9


def test_cosine() -> None:
    a, b = drawn(4, 3, seed=1), drawn(4, 3, seed=2)
    assert cosine(a, b).item() == pytest.approx(reference.cosine(a, b).item(), rel=1e-12)
    assert cosine(a, 3 * a).item() == pytest.approx(1)
    assert cosine(a, -a).item() == pytest.approx(-1)
    assert gradient_matching(a, -a).item() == pytest.approx(2)
    assert gradient_matching(a, a + 2, "mse").item() == pytest.approx(4)
