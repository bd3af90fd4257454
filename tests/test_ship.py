"""SHIP: the generator equals a slow reference, and CoOp learns from real and generated features."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.adaptation import adapt
from selftpt.classifier import Classifier
from selftpt.config import AdaptConfig, LearnConfig
from selftpt.data.cache import NO_CACHE
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError
from selftpt.learning import learn_from_features
from selftpt.methods import METHODS, FitContext, ship
from selftpt.methods.ship import (
    SHIP,
    Autoencoder,
    GeneratorConfig,
    ShipConfig,
    ShipCoopConfig,
    generated_features,
    generator_step,
    initial_autoencoder,
)
from selftpt.models.tokenizer import class_tokens, clean_name, end_ids
from selftpt.prompt import Prompt
from selftpt.training import RunFiles, source_features
from tests.helpers.folders import make_photos
from tests.helpers.methods import check_single_steps, raise_error
from tests.helpers.models import Small, model, relative, small
from tests.oracle import reference
from tests.oracle import ship as slow

NAMES = ["cat", "red kite", "bird etc."]  # CLIP joins both full stops of the last name
GENERATOR = GeneratorConfig(epochs=2, batch=2, encoder=7, generator=9, length=3)
QUICK = ShipConfig(GENERATOR, ShipCoopConfig(epochs=2, lr=0.1, warmup_lr=0.1))


def ids_of(tiny: Small, names: list[str]) -> list[list[int]]:
    return end_ids(tiny.model.text.tokenizer, [clean_name(name) for name in names])


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def large_autoencoder(tiny: Small) -> Autoencoder:
    """Return the initial autoencoder with noise added, so that all weights and biases affect the result."""
    first = initial_autoencoder(tiny.model, GENERATOR)
    return Autoencoder(*(t.double() + 0.3 * random_tensor(*t.shape, seed=i) for i, t in enumerate(first)))


@pytest.mark.parametrize("kind", ["vit", "custom-text", "layerscale", "worldwide", "siglip", "coca"])
def test_losses_and_gradients_equal_the_reference(kind: str) -> None:
    tiny = small(kind, torch.float64)
    vae, d = large_autoencoder(tiny), tiny.spec.dimension
    images, noise = F.normalize(random_tensor(4, d, seed=20), dim=-1), random_tensor(4, d, seed=21)
    names = [NAMES[i] for i in (0, 2, 1, 0)]
    expected_losses = slow.loss(tiny, vae, images, noise, names)
    expected = slow.gradients(tiny, vae, images, noise, names)
    for chunk in (None, 3):
        losses, found = generator_step(tiny.model, vae, images, noise, ids_of(tiny, names), chunk)
        assert list(losses.values()) == pytest.approx([loss.item() for loss in expected_losses], rel=1e-9)
        for name, one, other in zip(Autoencoder._fields, found, expected, strict=True):
            assert relative(one, other) < 1e-8, name


def autoencoder_of(tensors: Mapping[str, Tensor]) -> Autoencoder:
    return Autoencoder(*(tensors[name] for name in Autoencoder._fields))


def test_training_equals_plain_steps(tmp_path: Path) -> None:
    tiny = small("vit", torch.float64)
    config = dataclasses.replace(GENERATOR, lr=0.01, warmup_lr=0.005)
    features, labels = F.normalize(random_tensor(5, 2, tiny.spec.dimension), dim=-1), torch.tensor([0, 0, 1, 1, 2])
    memory = FitContext(model(), Source.from_features(features.float(), labels.tolist(), NAMES))
    training = SHIP.training(memory, ShipConfig(config))
    found = autoencoder_of(training.run(RunFiles(tmp_path / "g", "", False)))

    parameters = [tensor.double() for tensor in initial_autoencoder(tiny.model, config)]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    number = 0
    for epoch, lr in enumerate((0.005, 0.01)):
        order = torch.randperm(5, generator=torch.Generator().manual_seed(config.seed * 100_003 + epoch))
        for step in range(2):  # the fifth image does not fill a batch
            chosen = order[2 * step : 2 * step + 2]
            generator = ship.seeded(f"noise 1 {epoch} {step}")
            noise = torch.randn(2, tiny.spec.dimension, generator=generator).double()
            names = [NAMES[label] for label in labels[chosen].tolist()]
            by = slow.gradients(tiny, parameters, features[chosen, epoch], noise, names)
            number += 1
            slow.adamw(parameters, moments, by, number, lr)
    for name, one, other in zip(Autoencoder._fields, found, parameters, strict=True):
        assert relative(one, other) < 2e-3, name
    first = initial_autoencoder(tiny.model, config)
    assert all(relative(one, other) > 1e-2 for one, other in zip(found, first, strict=True))
    lines = [json.loads(line) for line in (tmp_path / "g.log.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [{"epoch", "step", "lr", "reconstruction", "divergence"}] * 4


def test_training_data_is_kept_with_the_generator() -> None:
    """CoOp needs the training data for every class list."""
    features = F.normalize(torch.randn(6, 2, model().dimension), dim=-1)
    fitted = SHIP.fit(FitContext(model(), Source.from_features(features, [0, 0, 1, 1, 2, 2], NAMES)), QUICK)
    assert torch.equal(fitted.tensors["features"], features)
    assert fitted.tensors["labels"].tolist() == [0, 0, 1, 1, 2, 2]
    assert fitted.data["classes"] == NAMES


def test_single_steps_equal_a_run(tmp_path: Path, source: Source) -> None:
    check_single_steps(SHIP, QUICK, context(tmp_path, source))


def test_initial_weights_are_random_and_biases_are_zero() -> None:
    vae = initial_autoencoder(model(), dataclasses.replace(GENERATOR, encoder=200, generator=300))
    D, d = model().dimension, model().text.width
    assert [tuple(t.shape) for t in vae] == [
        (3, d), (200, D), (200,), (D, 200), (D,), (D, 200), (D,), (300, D), (300,), (d, 300), (d,)
    ]  # fmt: skip
    assert all(t.std() == pytest.approx(0.02, rel=0.3) for t in vae if t.ndim == 2)
    assert all(not t.any() for t in vae if t.ndim == 1)


@pytest.mark.parametrize("chunk", [None, 4])
def test_generated_features_equal_the_reference(chunk: int | None) -> None:
    """Each name gets the same number of L2-normalised features, independent of the chunk size."""
    tiny = small("vit", torch.float64)
    vae, config = large_autoencoder(tiny), dataclasses.replace(GENERATOR, chunk=chunk)
    vae = Autoencoder(*(tensor.float() for tensor in vae))
    found = generated_features(model(), vae, ids_of(tiny, NAMES), 2, 3, config)
    z = torch.randn(18, tiny.spec.dimension, generator=ship.seeded("generate 1")).view(6, 3, -1)
    for i, crops in enumerate(z):
        for j, one in enumerate(crops):
            expected = slow.make(tiny, [t.double() for t in vae], one.double(), NAMES[i // 2])
            assert relative(found[i, j], expected) < 1e-4


def context(folder: Path, source: Source) -> FitContext:
    return FitContext(model(), source, folder / "learned", on_error=raise_error)


def classifier(context: FitContext, names: list[str], config: ShipConfig = QUICK) -> Classifier:
    found = SHIP.fit(context, config).for_classes(names, "a photo of a {}.").classifier
    assert found is not None
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source.from_folder(make_photos(tmp_path_factory.mktemp("photos")))


def real(source: Source) -> tuple[Tensor, Tensor]:
    return source_features(model(), source, GENERATOR, NO_CACHE, raise_error)


def coop(names: list[str], features: Tensor, labels: Tensor) -> Prompt:
    config = LearnConfig(cpt=0, gm=0, epochs=2, batch=512, lr=0.1, warmup_lr=0.1, momentum=0, weight_decay=0)
    tokens = class_tokens(model().text.tokenizer, names, 4, config.contrast)
    return learn_from_features(model(), tokens, features, labels, config)


def test_new_names_are_learned_from_generated_features(source: Source, tmp_path: Path) -> None:
    """The reference trains CoOp on nine real features and three generated features for each of four new names."""
    asked = ["Red  Fox", "wolf", "old bear", "lion", "duck"]
    found = classifier(context(tmp_path, source), asked)
    features, labels = real(source)
    vae = autoencoder_of(SHIP.fit(FitContext(model(), source, on_error=raise_error), QUICK).tensors)
    made = generated_features(model(), vae, ids_of(small("vit"), asked[1:]), 3, 2, GENERATOR)
    assert len(labels) == 9
    everything = torch.cat([features, made]), torch.cat([labels, torch.tensor([3] * 3 + [4] * 3 + [5] * 3 + [6] * 3)])
    prompt = coop([*source.names, *asked[1:]], *everything)
    expected = adapt(model(), prompt, asked, AdaptConfig(steps=0))
    assert found.names == ("Red Fox", "wolf", "old bear", "lion", "duck")
    assert torch.allclose(found.weights, expected.weights, atol=1e-6)
    fewer = adapt(model(), coop(list(source.names), features, labels), asked, AdaptConfig(steps=0))
    assert not torch.allclose(found.weights, fewer.weights, atol=1e-4), "generated features make no difference"


def test_without_new_names_ship_equals_coop(source: Source, tmp_path: Path) -> None:
    found = classifier(context(tmp_path, source), ["Kite", "red_fox"])
    prompt = coop(list(source.names), *real(source))
    expected = adapt(model(), prompt, ["kite", "red fox"], AdaptConfig(steps=0))
    assert torch.allclose(found.weights, expected.weights, atol=1e-6)


def test_prompt_is_learned_once_per_class_list_and_seed(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["kite", "wolf"]
    first = classifier(context(tmp_path, source), asked)
    others = classifier(context(tmp_path, source), ["kite", "lion"])
    assert not torch.equal(others.weights[0], first.weights[0]), "the prompt of other names"
    other = dataclasses.replace(QUICK, coop=ShipCoopConfig(epochs=1))
    with monkeypatch.context() as patch:
        patch.setattr(FitContext, "features", None)  # training the generator would call it
        changed = classifier(context(tmp_path, source), asked, other)
        assert not torch.equal(changed.weights, first.weights), "CoOp with another configuration"

        def never(*_: object) -> None:
            raise AssertionError("the prompt is learned again")

        patch.setattr(ship, "learn_from_features", never)
        assert torch.equal(classifier(context(tmp_path, source), asked).weights, first.weights)
    assert torch.equal(classifier(context(tmp_path / "elsewhere", source), asked).weights, first.weights)
    seeded = dataclasses.replace(QUICK, learn=dataclasses.replace(GENERATOR, seed=2))
    assert not torch.equal(classifier(context(tmp_path, source), asked, seeded).weights, first.weights)


def test_without_a_folder_no_files_are_written(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    memory = FitContext(model(), source, on_error=raise_error)
    found = classifier(memory, ["kite", "wolf"])
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(found.weights, classifier(context(tmp_path, source), ["kite", "wolf"]).weights)


def test_interrupted_generator_resumes_bitwise(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = classifier(context(tmp_path / "whole", source), ["kite", "wolf"])
    keep = RunFiles.keep

    def stop(self: RunFiles, *rest: object) -> None:
        keep(self, *rest)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFiles, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        classifier(context(tmp_path, source), ["kite", "wolf"])
    monkeypatch.setattr(RunFiles, "keep", keep)
    assert list((tmp_path / "learned").glob("*.checkpoint"))
    assert torch.equal(classifier(context(tmp_path, source), ["kite", "wolf"]).weights, first.weights)
    assert not list((tmp_path / "learned").glob("*.checkpoint"))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (GeneratorConfig, {"encoder": 0}),
        (GeneratorConfig, {"generator": -1}),
        (GeneratorConfig, {"generator": 9.5}),
        (GeneratorConfig, {"epochs": 0}),
        (ShipCoopConfig, {"epochs": 0}),
        (ShipCoopConfig, {"momentum": 1.0}),
        (ShipCoopConfig, {"lr": "0.1"}),
        (ShipConfig, {"coop": GENERATOR}),
    ],
)
def test_invalid_configuration_is_refused(kind: type, wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match=f"{kind.__name__}.{next(iter(wrong))} must be"):
        kind(**wrong)


@pytest.mark.parametrize("names", [["cat"], ["cat", ""], "cat"])
def test_invalid_names_are_refused_before_coop_is_trained(names: list[str], source: Source, tmp_path: Path) -> None:
    with pytest.raises(SelfTPTError):
        classifier(context(tmp_path, source), names)
    assert not list((tmp_path / "learned").glob("ship-prompt*"))


def test_bias_is_added_to_every_prompt_vector() -> None:
    tiny = small("vit", torch.float64)
    vae = large_autoencoder(tiny)
    still = vae._replace(shift=torch.zeros_like(vae.shift), shift_bias=torch.ones_like(vae.shift_bias))
    expected = reference.encode(tiny, "end", ["cat"], vae.context + 1)[0]
    z = torch.zeros(1, tiny.spec.dimension).double()
    assert relative(still.generate(tiny.model, z, ids_of(tiny, ["cat"]))[0], slow.unit(expected)) < 1e-9


def test_method_is_registered() -> None:
    assert METHODS["ship"] is SHIP
    assert SHIP.seeded(7).learn.seed == 7
    assert SHIP.cost(SHIP.config) == "1 view"
