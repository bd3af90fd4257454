"""The losses equal the paper's equations, computed with loops."""

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


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class PeakMemory(TorchDispatchMode):
    """Records the peak of the total size of live storages."""

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


def first_index_of_key(keys: Sequence[int]) -> Tensor:
    return torch.tensor([list(keys).index(key) for key in keys])


def derivatives(loss_of, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return value, gradient, and Hessian-vector product with a fixed vector."""
    z = z.clone().requires_grad_()
    loss = loss_of(z)
    (first,) = torch.autograd.grad(loss, z, create_graph=True)
    (second,) = torch.autograd.grad((first * random_tensor(*z.shape, seed=99, dtype=z.dtype)).sum(), z)
    return loss.detach(), first.detach(), second


@settings(max_examples=40, deadline=None)
@given(
    views=st.integers(2, 4),
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    temperature=st.sampled_from([0.05, 0.07, 0.5, 2.0]),
    duplicates_as_negatives=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    normalized=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(
    views=4, keys=[0, 1, 2], temperature=0.07, duplicates_as_negatives=False, reduction="sum", normalized=True, seed=0
)
@example(
    views=4,
    keys=[0, 1, 0, 0],
    temperature=0.07,
    duplicates_as_negatives=False,
    reduction="mean",
    normalized=True,
    seed=0,
)
def test_cpt_and_derivatives_equal_reference(
    views: int,
    keys: list[int],
    temperature: float,
    duplicates_as_negatives: bool,
    reduction: str,
    normalized: bool,
    seed: int,
) -> None:
    z = random_tensor(views, len(keys), 5, seed=seed)
    z = F.normalize(z, dim=-1) if normalized else 0.4 * z

    def loop(z: Tensor) -> Tensor:
        return reference.cpt(
            list(z.flatten(0, 1)), views, temperature, None if duplicates_as_negatives else keys, reduction
        )

    name_ids = None if duplicates_as_negatives else first_index_of_key(keys)
    found = derivatives(lambda z: cpt(z, name_ids, temperature, reduction), z)
    expected = derivatives(loop, z)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-9 * max(1.0, other.norm().item())


def test_cpt_of_two_views_and_two_classes_equals_the_written_out_sum() -> None:
    """All four terms of Eq. 9 are written out."""
    # One-dimensional features: a and c are the views of class 1, b and d those of class 2.
    a, b, c, d = 1.0, 2.0, 3.0, 4.0
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
    z = F.normalize(random_tensor(4, 3, 5), dim=-1)
    flat = z.flatten(0, 1)
    outside = 0.0
    for i, (positives, denominator) in enumerate(reference.index_sets(4, 3, None)):
        log_denominator = torch.stack([flat[i] @ flat[j] / 0.07 for j in denominator]).logsumexp(0)
        outside -= sum((flat[i] @ flat[j] / 0.07 - log_denominator).item() for j in positives) / len(positives)
    assert abs(cpt(z, reduction="sum").item() - outside) > 0.1


def test_cpt_of_one_class_or_of_equal_classes_is_zero() -> None:
    assert cpt(random_tensor(4, 1, 5)).item() == pytest.approx(0, abs=1e-12)
    assert cpt(random_tensor(4, 3, 5), torch.zeros(3, dtype=torch.long)).item() == pytest.approx(0, abs=1e-12)
    assert cpt(random_tensor(4, 3, 5)).item() > 0.1


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of rows of every computed block is appended."""
    seen: list[int] = []
    blocks = losses._Similarity.blocks

    def recorded(self: losses._Similarity, z: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for rows, block in blocks(self, z):
            seen.append(len(block))
            yield rows, block

    monkeypatch.setattr(losses._Similarity, "blocks", recorded)
    return seen


@pytest.mark.parametrize(
    ("max_similarities", "sizes"), [(1, [64, 64, 32]), (160 * 70, [70, 70, 20]), (160 * 160, [160])]
)
@pytest.mark.parametrize("equal", [False, True])
def test_cpt_in_blocks_of_rows_equals_one_block(
    max_similarities: int, sizes: list[int], equal: bool, blocks: list[int]
) -> None:
    """Compares value, gradient and second derivative."""
    z = F.normalize(random_tensor(4, 40, 6), dim=-1)
    name_ids = first_index_of_key([k % 30 for k in range(40)]) if equal else None
    expected = derivatives(lambda z: cpt(z, name_ids, max_similarities=1 << 30), z)
    blocks.clear()
    found = derivatives(lambda z: cpt(z, name_ids, max_similarities=max_similarities), z)
    assert blocks == 4 * sizes  # forward, backward, double backward, and once more through the saved denominators
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 1e-12
        assert other.norm() > 1e-3


def test_cpt_in_blocks_of_rows_does_not_overflow(blocks: list[int]) -> None:
    z = 1e3 * random_tensor(3, 30, 5)
    value, first, second = derivatives(lambda z: cpt(z, None, 0.001, max_similarities=1), z)
    assert blocks == 4 * [64, 26]
    assert value.item() == pytest.approx(cpt(z, None, 0.001).item(), rel=1e-9)
    assert first.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("max_similarities", [1, 1 << 20])
def test_cpt_derivatives_match_finite_differences(max_similarities: int, equal: bool) -> None:
    name_ids = torch.tensor([0, 1, 0] * 8) if equal else None
    z = F.normalize(random_tensor(3, 24, 3), dim=-1).requires_grad_()

    def loss(z: Tensor) -> Tensor:
        return cpt(z, name_ids, 0.5, max_similarities=max_similarities)

    assert torch.autograd.gradcheck(loss, z)
    assert torch.autograd.gradgradcheck(loss, z)


def test_third_derivatives_of_cpt_are_refused() -> None:
    z = random_tensor(3, 4, 5).requires_grad_()
    (first,) = torch.autograd.grad(cpt(z), z, create_graph=True)
    with pytest.raises(RuntimeError, match="no third derivatives"):
        torch.autograd.grad(first.square().sum(), z, create_graph=True)


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_memory_of_cpt_is_linear_in_the_number_of_classes(second_order: bool, equal: bool) -> None:
    """The peak is counted from the results of all operations."""

    def peak(classes: int) -> int:
        z = random_tensor(2, classes, 4, dtype=torch.float32).requires_grad_()
        name_ids = torch.arange(classes) // 2 * 2 if equal else None
        with PeakMemory() as memory:
            (gradient,) = torch.autograd.grad(cpt(z, name_ids, max_similarities=1), z, create_graph=second_order)
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
    z = (size * random_tensor(3, 4, 5, seed=3)).to(dtype)
    name_ids = torch.tensor([0, 1, 0, 3])
    value, first, second = derivatives(lambda z: cpt(z, name_ids, temperature, "sum"), z)
    expected = reference.cpt_in_decimal(z.flatten(0, 1).tolist(), 3, temperature, name_ids.tolist())
    # Numbers as large as the largest similarity are subtracted, so the rounding error is relative to it.
    largest = (z.double().flatten(0, 1).square().sum(-1).max() / temperature).item()
    rounding = 20 * torch.finfo(dtype).eps * max(1.0, largest)
    assert value.item() == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-12, abs=rounding)
    assert first.isfinite().all()
    assert second.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    scale=st.sampled_from([1.0, 14.3, 100.0]),
    length=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_cross_entropy_and_derivatives_equal_reference(labels: list[int], scale: float, length: float) -> None:
    images = F.normalize(random_tensor(len(labels), 6, seed=1), dim=-1)
    classes, target = length * random_tensor(4, 6, seed=2), torch.tensor(labels)
    found = derivatives(lambda w: cross_entropy(images, w, target, scale), classes)
    expected = derivatives(lambda w: reference.cross_entropy(images, w, target, 1 / scale), classes)
    for order, (one, other) in enumerate(zip(found, expected, strict=True)):
        usual = (scale / length) ** order  # near certainty, values are rounding errors only
        assert (one - other).norm() <= 1e-9 * max(usual, other.norm().item())


def test_cross_entropy_of_certain_wrong_predictions_is_finite() -> None:
    images = torch.eye(3)
    loss = cross_entropy(images, images, torch.tensor([1, 2, 0]), 1000.0)
    assert loss.item() == pytest.approx(1000.0)


@pytest.mark.parametrize("normalize", [True, False])
def test_project_equals_reference(normalize: bool) -> None:
    head = Head(
        random_tensor(7, 6, seed=1), random_tensor(7, seed=2), random_tensor(4, 7, seed=3), random_tensor(4, seed=4)
    )
    features = random_tensor(3, 5, 6)
    found = project(features, head, normalize)
    expected = torch.stack([reference.head(x, head, normalize) for x in features.flatten(0, 1)]).unflatten(0, (3, 5))
    assert relative(found, expected) < 1e-12
    lengths = found.norm(dim=-1)
    assert torch.allclose(lengths, torch.ones_like(lengths)) is normalize


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 7), decay=st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_moving_average_equals_the_explicit_sum(count: int, decay: float) -> None:
    gradients = [random_tensor(4, 3, seed=seed) for seed in range(count)]
    average = None
    for gradient in gradients:
        average = moving_average(average, gradient, decay)
    assert relative(average, reference.moving_average(gradients, decay)) < 1e-12
    if decay == 0:
        assert torch.equal(average, gradients[-1])


@pytest.mark.parametrize("kind", ["cosine", "mse"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_gradient_matching_and_derivatives_equal_reference(kind: str, size: float) -> None:
    target, gradient = random_tensor(4, 3, seed=1), size * random_tensor(4, 3, seed=2)
    found = derivatives(lambda g: gradient_matching(target, g, kind), gradient)
    expected = derivatives(lambda g: reference.gradient_matching(target, g, kind), gradient)
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 1e-9


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
def test_floor_bounds_the_derivative_of_gradient_matching(size: float) -> None:
    target, gradient = random_tensor(4, 3, seed=1), size * random_tensor(4, 3, seed=2)

    def value_and_derivative(loss: Any, floor: float) -> tuple[Tensor, Tensor]:
        g = gradient.clone().requires_grad_()
        value = loss(target, g, floor=floor)
        return value.detach(), torch.autograd.grad(value, g)[0]

    for floor in (0.0, 0.1):
        found, expected = (
            value_and_derivative(loss, floor) for loss in (gradient_matching, reference.gradient_matching)
        )
        assert all(relative(one, other) < 1e-9 for one, other in zip(found, expected, strict=True))
    slopes = {floor: value_and_derivative(gradient_matching, floor)[1].norm().item() for floor in (0.0, 0.1)}
    bound = 1 / (0.1 * target.norm().item())
    assert slopes[0.1] <= bound * (1 + 1e-12)
    assert (slopes[0.0] > bound) == (size < 0.1)


def test_cosine_and_gradient_matching_of_known_pairs() -> None:
    a, b = random_tensor(4, 3, seed=1), random_tensor(4, 3, seed=2)
    assert cosine(a, b).item() == pytest.approx(reference.cosine(a, b).item(), rel=1e-12)
    assert cosine(a, 3 * a).item() == pytest.approx(1)
    assert cosine(a, -a).item() == pytest.approx(-1)
    assert gradient_matching(a, -a).item() == pytest.approx(2)
    assert gradient_matching(a, a + 2, "mse").item() == pytest.approx(4)
