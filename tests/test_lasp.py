"""LASP equals a slow reference, on features and on pixels with tuned LayerNorms."""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt import SelfTPTError
from selftpt.data.features import FeatureProvider
from selftpt.data.sources import Source
from selftpt.data.views import LazyImage, ViewSpec
from selftpt.methods import METHODS, FitContext, FittedMethod
from selftpt.methods.lasp import (
    LASP,
    LaspConfig,
    LaspTrainConfig,
    Task,
    choose_inputs,
    classify,
    clipped,
    noisy,
    norms_rate,
    rate,
    step,
    tuned_features,
)
from selftpt.models import Model
from selftpt.training import RunFiles, source_crops
from tests.helpers.folders import make_photos
from tests.helpers.methods import check_single_steps, make_context, raise_error
from tests.helpers.models import KINDS, SPECS, Small, model, names_of, random_prompt, relative, small
from tests.oracle import lasp as oracle
from tests.oracle import reference

NAMES = ["cat", "red kite", "blue bird in the rain", "dog etc."]  # CLIP joins both full stops of the last name
TEMPLATES = ("a photo of the {}.", "{} in the snow", "a blue {}.")
SHORT = LaspConfig(LaspTrainConfig(length=3, epochs=2, batch=4, warmup_epochs=1, warmup_lr=0.05), TEMPLATES)


def config(**changes: Any) -> LaspConfig:
    return dataclasses.replace(SHORT, learn=dataclasses.replace(SHORT.learn, **changes))


def exact(kind: str) -> Small:
    """Return a small model whose image tower is also in float64."""
    tiny = copy.deepcopy(small(kind, torch.float64))
    tiny.clip.visual.double()
    return tiny


def bias_of(tiny: Small) -> Tensor:
    return torch.randn(1, tiny.spec.dimension, generator=torch.Generator().manual_seed(3)).to(tiny.embedding.dtype)


def pixels_of(tiny: Model, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(256, (count, 3, *tiny.preprocess.size), generator=generator).to(torch.uint8)


def moved(norms: dict[str, Tensor], size: float = 0.1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: t + size * torch.randn(t.shape, generator=generator).to(t) for name, t in norms.items()}


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", ["vit", "worldwide", "siglip"])
def test_step_on_features_equals_the_reference(kind: str, chunk: int | None) -> None:
    tiny = small(kind, torch.float64)
    task = Task.of(tiny.model, NAMES, config(chunk=chunk))
    prompt, bias, labels = random_prompt(tiny, 3), bias_of(tiny), torch.tensor([3, 0, 1])
    images = F.normalize(torch.randn(3, tiny.spec.dimension, dtype=torch.float64), dim=-1)
    hand_crafted = task.hand_crafted + 0.1
    found, (by_prompt, by_bias) = step(task, prompt, bias.clone(), [], lambda: images, labels, hand_crafted, 20.0, 5.0)
    p, b = prompt.clone().requires_grad_(), bias.clone().requires_grad_()
    slow = [[embedding + 0.1 for embedding in some] for some in oracle.hand_crafted_embeddings(tiny, NAMES, TEMPLATES)]
    ce, text = oracle.losses(tiny, NAMES, p, b, images, labels, slow, 20.0)
    expected = torch.autograd.grad(ce + 5 * text, [p, b])
    assert found == {"ce": pytest.approx(ce.item()), "text": pytest.approx(text.item())}
    assert relative(by_prompt, expected[0]) < 1e-9
    assert relative(by_bias, expected[1]) < 1e-9


@pytest.mark.parametrize(("kind", "chunk"), [("vit", None), ("vit", 2), ("worldwide", None)])
def test_step_on_pixels_equals_open_clip_with_other_norms(kind: str, chunk: int | None) -> None:
    """The model itself does not change."""
    tiny = exact(kind)
    task = Task.of(tiny.model, NAMES, config(chunk=chunk))
    prompt, bias, labels = random_prompt(tiny, 3), bias_of(tiny), torch.tensor([3, 0, 1])
    norms, pixels = moved(tiny.model.image.norms()), pixels_of(tiny.model)
    before = {name: tensor.clone() for name, tensor in tiny.clip.state_dict().items()}
    _, gradients = step(
        task,
        prompt,
        bias.clone(),
        list(norms.values()),
        lambda: tuned_features(tiny.model, norms, pixels),
        labels,
        task.hand_crafted,
        20.0,
        5.0,
    )
    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in norms.items()}
    p = prompt.clone().requires_grad_()
    slow = oracle.hand_crafted_embeddings(tiny, NAMES, TEMPLATES)
    images = oracle.images(tiny, own, pixels)
    ce, text = oracle.losses(tiny, NAMES, p, bias, images, labels, slow, 20.0)
    expected = torch.autograd.grad(ce + 5 * text, [p, *own.values()])
    assert relative(gradients[0], expected[0]) < 1e-9
    for name, found, right in zip(norms, gradients[2:], expected[1:], strict=True):
        assert relative(found, right) < 1e-9, name
        assert right.norm() > 0
    after = tiny.clip.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(parameter.requires_grad is False for parameter in tiny.clip.parameters())


def test_two_norms_of_each_block_are_tuned() -> None:
    """The authors' log has the same number."""
    found = model("qk-norm").image.norms()
    assert set(found) == {
        f"transformer.resblocks.{i}.ln_{j}.{part}" for i in (0, 1) for j in (1, 2) for part in ("weight", "bias")
    }
    assert all(model(kind).image.norms() == {} for kind in ("resnet", "custom-text", "mobileclip"))


@pytest.mark.parametrize("kind", KINDS)
def test_only_towers_that_run_the_block_loop_are_tuned(kind: str) -> None:
    assert choose_inputs(SHORT, model(kind)) == ("pixels" if SPECS[kind].blocks else "features")
    assert choose_inputs(dataclasses.replace(SHORT, layer_norms=False), model(kind)) == "features"


def test_tuned_features_pass_the_norms_to_the_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms are an argument of the forward pass; the model does not change."""
    tiny, given = model(), []
    norms, forward = moved(tiny.image.norms()), type(tiny.image).forward

    def spy(self: Any, pixels: Tensor, **more: Any) -> Tensor:
        given.append(more["norms"])
        return forward(self, pixels, **more)

    monkeypatch.setattr(type(tiny.image), "forward", spy)
    tuned_features(tiny, norms, pixels_of(tiny))
    (passed,) = given
    assert passed is norms


def test_learning_rates_are_those_of_the_authors_log() -> None:
    """The log has the rates of the LayerNorms."""
    printed = [1e-5, 1e-5, 1e-5, 3.2e-3, 3.1874e-3, 3.1497e-3, 3.0876e-3, 3.0021e-3, 2.8944e-3]
    assert [norms_rate(epoch, LaspTrainConfig()) for epoch in range(9)] == pytest.approx(printed, rel=2e-5)
    assert rate(0, LaspTrainConfig()) == 1e-5
    assert rate(3, LaspTrainConfig()) == 0.032


@pytest.mark.parametrize("of_pixels", [False, True])
def test_training_equals_plain_steps(of_pixels: bool, tmp_path: Path) -> None:
    """The reference clips gradients, adds noise in some steps, and uses a tenth of the learning rate for LayerNorms."""
    chosen = dataclasses.replace(config(words="photo of the", lr=0.3, seed=3, epochs=4), layer_norms=of_pixels)
    tiny, source = exact("vit"), Source.from_folder(make_photos(tmp_path))
    names = [name.replace("_", " ") for name in source.names]
    crops, labels = source_crops(model(), source, chosen.learn, raise_error)
    features = torch.stack([model().encode_images(crops(torch.arange(9), epoch)) for epoch in range(4)], 1)
    if not of_pixels:
        source = Source.from_features(features, source.labels, source.names)
    found = LASP.fit(FitContext(model(), source, on_error=raise_error), chosen).tensors

    norms = {name: t.detach().clone() for name, t in tiny.model.image.norms().items()} if of_pixels else {}
    prompt = tiny.embedding[torch.tensor(tiny.encode("photo of the"))].clone()
    parameters = [prompt, torch.zeros(1, tiny.spec.dimension, dtype=torch.float64), *norms.values()]
    start = [p.clone() for p in parameters]
    momentum = [torch.zeros_like(p) for p in parameters]
    plain_embeddings, lengths, noises = oracle.hand_crafted_embeddings(tiny, names, TEMPLATES), [], 0
    for epoch in range(4):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(3 * 100_003 + epoch))
        for number in range(2):
            batch = order[4 * number : 4 * number + 4]
            leaves = [p.clone().requires_grad_() for p in parameters]
            hand_crafted = oracle.noise(plain_embeddings, 0.05, f"noise 3 {epoch} {number}")
            noises += not torch.equal(hand_crafted[0][0], plain_embeddings[0][0])
            images = (
                oracle.images(tiny, dict(zip(norms, leaves[2:], strict=True)), crops(batch, epoch))
                if of_pixels
                else features[batch, epoch].double()
            )
            ce, text = oracle.losses(
                tiny, names, leaves[0], leaves[1], images, labels[batch], hand_crafted, tiny.model.scale
            )
            gradients = torch.autograd.grad(ce + 5 * text, leaves)
            lengths.append(torch.cat([g.flatten() for g in gradients]).norm().item())
            for i, gradient in enumerate(oracle.clip(gradients, 1.0)):
                momentum[i] = 0.9 * momentum[i] + gradient + 5e-4 * parameters[i]
                lr = rate(epoch, chosen.learn, 1.0 if i < 2 else 0.1)
                parameters[i] = parameters[i] - lr * momentum[i]
    assert 0 < noises < 8
    assert max(lengths) > 1
    assert set(found) == {"context", "bias", *norms}
    for name, expected, was in zip(("context", "bias", *norms), parameters, start, strict=True):
        assert relative(found[name] - was, expected - was) < 1e-2, name
        assert relative(was, expected) > 1e-3, name


def test_single_steps_on_features_in_memory_equal_a_run(tmp_path: Path) -> None:
    check_single_steps(LASP, dataclasses.replace(SHORT, layer_norms=False), make_context(tmp_path))


def test_single_steps_on_pixels_equal_a_run(tmp_path: Path) -> None:
    images = make_context(tmp_path)
    images.folder = None
    whole, training = LASP.fit(images, SHORT).tensors, LASP.training(images, SHORT)
    for epoch in range(2):
        for number in range(2):
            assert {"ce", "text"} == set(training.step(epoch, number))
    for name, value in training.parameters.items():
        assert torch.equal(value.detach(), whole[name]), name


def test_pixels_cannot_be_learned_from_features(tmp_path: Path) -> None:
    source = Source.from_features(F.normalize(torch.ones(4, 24), dim=-1), [0, 0, 1, 1], ["cat", "dog"])
    with pytest.raises(SelfTPTError, match="learns from pixels: give a source with images"):
        LASP.fit(FitContext(model(), source, tmp_path), SHORT)


def test_gradients_are_clipped_only_above_the_maximum_norm() -> None:
    short, long = [torch.tensor([0.3]), torch.tensor([0.4, 0.0])], [torch.tensor([3.0]), torch.tensor([4.0, 0.0])]
    assert [g.tolist() for g in clipped(short, 1.0)] == [g.tolist() for g in short]
    assert torch.cat(clipped(long, 2.0)).tolist() == pytest.approx([1.2, 1.6, 0.0], rel=1e-5)


def test_noise_is_added_in_about_half_of_the_steps() -> None:
    zeros = torch.zeros(2, 3, 400)
    drawn = [noisy(zeros, 0.05, f"{i}") for i in range(200)]
    with_noise = [one for one in drawn if one.any()]
    assert 70 < len(with_noise) < 130
    assert with_noise[0].std() == pytest.approx(0.05, rel=0.1)
    assert torch.equal(drawn[5], noisy(zeros, 0.05, "5"))


def test_crops_equal_those_of_the_features(tmp_path: Path) -> None:
    photos = make_photos(tmp_path)
    (photos / "kite" / "1.png").write_text("not an image")
    errors: list[object] = []
    crops, labels = source_crops(model(), Source.from_folder(photos), SHORT.learn, errors.append)
    assert len(errors) == 1
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert photos / "kite" / "1.png" not in crops.images
    for epoch in range(3):
        found = crops(torch.tensor([4, 0]), epoch)
        for row, path in zip(found, (crops.images[4], crops.images[0]), strict=True):
            assert torch.equal(row, ViewSpec(2).make_views(model().preprocess, LazyImage(path))[epoch % 2])
    crops.images[0].unlink()  # type: ignore[union-attr]
    with pytest.raises(SelfTPTError, match="no such file"):
        crops(torch.tensor([4, 0]), 0)


def test_untuned_norms_give_the_features_of_the_model() -> None:
    """Also while other threads use the same model with other LayerNorms."""
    tiny, pixels = model(), pixels_of(model(), 5)
    norms = {name: tensor.clone() for name, tensor in tiny.image.norms().items()}
    expected, different = tiny.encode_images(pixels), tuned_features(tiny, moved(norms), pixels)
    assert relative(different, expected) > 0.01
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda i: tuned_features(tiny, moved(norms) if i % 2 else norms, pixels), range(40)))
    for i, features in enumerate(made):
        assert relative(features, different if i % 2 else expected) < 1e-5


@pytest.mark.parametrize(("kind", "norms"), [("vit", True), ("vit", False), ("resnet", True)])
def test_parameters_are_learned_once_per_seed(
    kind: str, norms: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, paths = dataclasses.replace(SHORT, layer_norms=norms), make_context(tmp_path).source.paths
    provider = FeatureProvider(model(kind), LASP.views(chosen), on_error=raise_error)

    def answers(chosen: LaspConfig) -> Tensor:
        predictor = LASP.fit(make_context(tmp_path, kind), chosen).for_classes(["cat", "dog"], "")
        assert (predictor.classifier is not None) == (kind == "resnet" or not norms)
        return torch.cat(
            [predictor(block.views) for block in provider.blocks(paths, pixels=predictor.fitted.inputs == "pixels")]
        )

    first = answers(chosen)
    assert first.shape == (9, 2)
    assert torch.allclose(first.sum(-1), torch.ones(9))
    seed = dataclasses.replace(chosen, learn=dataclasses.replace(chosen.learn, seed=2))
    assert not torch.equal(answers(seed), first)
    for needed_to_learn in ("features", "crops"):
        monkeypatch.setattr(FitContext, needed_to_learn, None)
    assert torch.equal(answers(chosen), first)


def test_predictor_is_the_tuned_tower_and_the_classifier(tmp_path: Path) -> None:
    fitted = LASP.fit(make_context(tmp_path), SHORT)
    predictor, norms = fitted.for_classes(["cat", "dog"], ""), dict(fitted.tensors)
    prompt, bias = norms.pop("context"), norms.pop("bias")
    pixels = pixels_of(model(), 4).unflatten(0, (2, 2))
    images = oracle.images(small("vit"), norms, pixels.flatten(0, 1))
    weights = [oracle.unit(w + bias[0]) for w in reference.encode(small("vit"), "end", ["cat", "dog"], prompt)]
    expected = reference.probabilities(images, torch.stack(weights), 1 / model().scale).unflatten(0, (2, 2)).mean(1)
    assert torch.allclose(predictor(pixels), expected, atol=1e-4)


def test_interrupted_training_resumes_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LASP.fit(make_context(tmp_path), SHORT)
    (learned,) = (tmp_path / "out").glob("*.safetensors")
    whole, keep = learned.read_bytes(), RunFiles.keep
    learned.unlink()

    def stop(self: RunFiles, *rest: Any) -> None:
        keep(self, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFiles, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        LASP.fit(make_context(tmp_path), SHORT)
    monkeypatch.setattr(RunFiles, "keep", keep)
    LASP.fit(make_context(tmp_path), SHORT)
    assert learned.read_bytes() == whole


@pytest.mark.parametrize("kind", ["vit", "clipa"])
def test_chunked_class_list_equals_unchunked(kind: str) -> None:
    names = names_of([1, 3, 2, 5, 1, 2, 4])
    tensors = {"context": random_prompt(small(kind), 3), "bias": bias_of(small(kind))}

    def weights(names: list[str], chunk: int | None = LaspTrainConfig.chunk) -> Tensor:
        chosen = LaspConfig(LaspTrainConfig(chunk=chunk))
        return classify(FittedMethod(LASP, chosen, model(kind).id, tensors, {}, None, model(kind)), names).weights

    whole, chunked = (weights(names, chunk) for chunk in (None, 2))
    assert relative(chunked, whole) < 1e-5
    assert relative(weights(names[:2]), whole[:2]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (LaspConfig, {"templates": ()}),
        (LaspConfig, {"templates": ("a photo",)}),
        (LaspConfig, {"templates": "a photo of a {}."}),
        (LaspConfig, {"text": -1.0}),
        (LaspConfig, {"text": "5"}),
        (LaspConfig, {"noise": float("nan")}),
        (LaspConfig, {"layer_norms": 1}),
        (LaspConfig, {"learn": {"epochs": 2}}),
        (LaspTrainConfig, {"warmup_epochs": -1}),
        (LaspTrainConfig, {"warmup_epochs": 1.5}),
        (LaspTrainConfig, {"clip": 0.0}),
        (LaspTrainConfig, {"lr": 0.0}),
    ],
)
def test_invalid_configuration_is_refused(kind: type, wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match=r"must (be|have)"):
        kind(**wrong)


def test_template_that_is_too_long_for_the_names_is_refused() -> None:
    long = dataclasses.replace(SHORT, templates=("{}", "a photo of the {} in the snow and rain and wind."))
    tiny = small("layerscale").model  # context length 32
    with pytest.raises(SelfTPTError, match="too long: it has 19 tokens"):
        Task.of(tiny, [*NAMES, names_of([19])[0]], long)
    Task.of(tiny, [*NAMES, names_of([18])[0]], long)


def test_method_is_registered() -> None:
    assert METHODS["lasp"] is LASP
    assert LASP.seeded(7).learn.seed == 7
    assert len(LASP.config.templates) == 35
    assert LASP.cost(LASP.config) == "1 view"
