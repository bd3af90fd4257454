"""Device handling, tested on a simulated GPU that rejects what a GPU rejects and computes on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import selftpt
from selftpt.config import AdaptConfig, LearnConfig, PredictConfig
from selftpt.data.cache import Cache
from selftpt.data.features import FeatureProvider
from selftpt.data.sources import Source, images_in
from selftpt.data.views import ViewSpec
from selftpt.methods import METHODS, FitContext
from selftpt.models import Model
from tests.helpers.folders import make_photos
from tests.helpers.models import small
from tests.helpers.pretend_device import DeviceError, pretend_device
from tests.test_methods import Data, data, small_config  # noqa: F401

NAMES = ("red fox", "blue whale", "kite")


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    with pretend_device() as device:
        yield device


def model_on(device: torch.device | str, kind: str = "vit") -> Model:
    """Return a small model whose weights are copied to a device."""
    made = small(kind)
    return Model(copy.deepcopy(made.clip), made.tokenizer, made.model.id, made.spec.dimension, str(device), "fp32")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tensor: tensor + torch.ones(3),
        lambda tensor: torch.stack([tensor, torch.ones(3)]),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.uniform_(generator=torch.Generator()),
        lambda tensor: torch.randn(3, device=tensor.device, generator=torch.Generator()),
        lambda tensor: torch.randn(3, generator=torch.Generator(tensor.device)),
        lambda tensor: tensor.requires_grad_().to("cpu").dot(tensor),
    ],
)
def test_simulated_gpu_rejects_invalid_operations(wrong: Callable[[Tensor], object], gpu: torch.device) -> None:
    with pytest.raises(DeviceError):
        wrong(torch.zeros(3, device=gpu))


def test_simulated_gpu_allows_valid_operations(gpu: torch.device) -> None:
    tensor = torch.arange(6.0, device=gpu).view(2, 3)
    assert tensor.device == gpu
    assert (tensor * torch.tensor(2.0)).device == gpu
    assert tensor[torch.tensor([1])].device == gpu
    assert tensor.cpu().numpy().tolist() == tensor.tolist()
    assert tensor.cpu().device == torch.device("cpu")
    leaf = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad((tensor @ leaf.to(gpu)).square().sum(), leaf, create_graph=True)
    assert grad.device == leaf.device
    grad.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.device == leaf.device


@pytest.mark.parametrize("kind", ["vit", "siglip"])
def test_learn_adapt_and_predict_on_gpu_equal_cpu(kind: str, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos")
    images = images_in(photos)[:3]

    def stages(model: Model) -> list[Tensor]:
        prompt = selftpt.learn(model, photos, LearnConfig(epochs=2, classes_per_step=2))
        found = [prompt.context.cpu()]
        for made in (
            selftpt.zero_shot(model, NAMES),
            selftpt.adapt(model, prompt, NAMES, AdaptConfig(steps=2, chunk=2)),
        ):
            predictions = [list(made.predict(images, config=PredictConfig(views=views))) for views in (1, 3)]
            found += [made.weights.cpu(), *(torch.tensor([p.probabilities for p in each]) for each in predictions)]
        return found

    expected = stages(model_on("cpu", kind))
    with pretend_device() as gpu:
        found = stages(model_on(gpu, kind))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_on_gpu_equals_cpu(name: str, data: Data, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    method, source = METHODS[name], data.folder / "source"

    def probabilities(model: Model, cache: str) -> Tensor:
        monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / cache))
        train_set = Source.from_folder(source) if method.needs_labels else None
        context = FitContext(model, train_set, tmp_path / cache / "learned", Cache())
        predictor = method.fit(context, small_config(name, data)).for_classes(NAMES)
        return torch.tensor([answer.probabilities for answer in predictor.predict(data.images, top=3)])

    expected = probabilities(model_on("cpu"), "cpu")
    with pretend_device() as gpu:
        found = probabilities(model_on(gpu), "gpu")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_features_are_on_the_device_and_class_vectors_are_moved_once(tmp_path: Path) -> None:
    images = images_in(make_photos(tmp_path / "photos"))
    with pretend_device() as gpu:
        own = model_on(gpu)
        (block,) = FeatureProvider(own, [ViewSpec()]).blocks(images)
        assert block.views.device == gpu
        classifier = selftpt.zero_shot(own, NAMES)
        assert classifier.probabilities(block.views).device == gpu
        (moved,) = classifier._on_device.values()
        assert moved.device == gpu
        classifier.probabilities(block.views)
        (again,) = classifier._on_device.values()
        assert again is moved
