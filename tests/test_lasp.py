"""LASP against the same written out: of features, and of pixels where a ViT's LayerNorms are tuned."""

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
from selftpt.classifier import Classifier
from selftpt.data.features import ViewSpec
from selftpt.data.sources import read_folder
from selftpt.methods import METHODS, Eyes, Job
from selftpt.methods.lasp import (
    LASP,
    LaspConfig,
    Settings,
    Task,
    classify,
    clipped,
    descent,
    learn,
    noisy,
    pixels,
    rate,
    tuned_features,
)
from selftpt.models import Model
from selftpt.training import RunFiles, source_crops
from tests.folders import make_photos
from tests.oracle import lasp as oracle
from tests.oracle import plain
from tests.small import Small, model, names_of, random_prompt, relative, small

NAMES = ["cat", "red kite", "blue bird in the rain", "dog"]
SENTENCES = ("a photo of the {}.", "{} in the snow", "a blue {}.")
SHORT = Settings(LaspConfig(length=3, epochs=2, batch=4, warmup_epochs=1, warmup_lr=0.05), SENTENCES)


def config(**changes: Any) -> Settings:
    return dataclasses.replace(SHORT, learn=dataclasses.replace(SHORT.learn, **changes))


def exact(kind: str) -> Small:
    """A small model with its image tower too in float64."""
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


def job(folder: Path, kind: str = "vit") -> Job:
    photos = folder / "photos"
    source = read_folder(photos if photos.is_dir() else make_photos(photos))
    return Job(model(kind), source, folder / "learned", lambda _: None)


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", ["vit", "worldwide", "siglip"])
def test_a_step_of_features_equals_the_plain_walk(kind: str, chunk: int | None) -> None:
    tiny = small(kind, torch.float64)
    task = Task.of(tiny.model, NAMES, config(chunk=chunk))
    context, bias, labels = random_prompt(tiny, 3), bias_of(tiny), torch.tensor([3, 0, 1])
    images = F.normalize(torch.randn(3, tiny.spec.dimension, dtype=torch.float64), dim=-1)
    hand = task.hand + 0.1
    found, (by_context, by_bias) = descent(task, context, bias.clone(), [], lambda: images, labels, hand, 20.0, 5.0)
    p, b = context.clone().requires_grad_(), bias.clone().requires_grad_()
    written = [[h + 0.1 for h in sentence] for sentence in oracle.hand_written(tiny, NAMES, SENTENCES)]
    ce, told = oracle.losses(tiny, NAMES, p, b, images, labels, written, 20.0)
    wanted = torch.autograd.grad(ce + 5 * told, [p, b])
    assert found == {"ce": pytest.approx(ce.item()), "text": pytest.approx(told.item())}
    assert relative(by_context, wanted[0]) < 1e-9
    assert relative(by_bias, wanted[1]) < 1e-9


@pytest.mark.parametrize(("kind", "chunk"), [("vit", None), ("vit", 2), ("worldwide", None)])
def test_a_step_of_pixels_equals_open_clip_s_own_tower(kind: str, chunk: int | None) -> None:
    tiny = exact(kind)
    task = Task.of(tiny.model, NAMES, config(chunk=chunk))
    context, bias, labels = random_prompt(tiny, 3), bias_of(tiny), torch.tensor([3, 0, 1])
    norms, shown = moved(tiny.model.image.norms()), pixels_of(tiny.model)
    before = {name: tensor.clone() for name, tensor in tiny.clip.state_dict().items()}
    _, gradients = descent(
        task,
        context,
        bias.clone(),
        list(norms.values()),
        lambda: tuned_features(tiny.model, norms, shown),
        labels,
        task.hand,
        20.0,
        5.0,
    )
    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in norms.items()}
    p = context.clone().requires_grad_()
    written = oracle.hand_written(tiny, NAMES, SENTENCES)
    images = oracle.images(tiny, own, shown)
    ce, told = oracle.losses(tiny, NAMES, p, bias, images, labels, written, 20.0)
    wanted = torch.autograd.grad(ce + 5 * told, [p, *own.values()])
    assert relative(gradients[0], wanted[0]) < 1e-9
    for name, found, right in zip(norms, gradients[2:], wanted[1:], strict=True):
        assert relative(found, right) < 1e-9, name
        assert right.norm() > 0
    after = tiny.clip.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(parameter.requires_grad is False for parameter in tiny.clip.parameters())


def test_which_norms_are_tuned() -> None:
    """The two of each block, as in the authors' log, and none of a tower that the block loop does not run."""
    found = model("qk-norm").image.norms()
    assert set(found) == {
        f"transformer.resblocks.{i}.ln_{j}.{part}" for i in (0, 1) for j in (1, 2) for part in ("weight", "bias")
    }
    assert all(model(kind).image.norms() == {} for kind in ("resnet", "custom-text", "mobileclip"))
    assert pixels(SHORT, model())
    assert not pixels(dataclasses.replace(SHORT, layer_norms=False), model())
    assert not pixels(SHORT, model("resnet"))
    assert not pixels(SHORT, model("custom-text"))


def test_the_rates_are_those_of_the_authors_log() -> None:
    """Of LayerNorms, which is what it prints."""
    printed = [1e-5, 1e-5, 1e-5, 3.2e-3, 3.1874e-3, 3.1497e-3, 3.0876e-3, 3.0021e-3, 2.8944e-3]
    assert [rate(epoch, LaspConfig(), 0.1) for epoch in range(9)] == pytest.approx(printed, rel=2e-5)
    assert rate(0, LaspConfig()) == 1e-5
    assert rate(3, LaspConfig()) == 0.032


@pytest.mark.parametrize("of_pixels", [False, True])
def test_learning_equals_a_loop_of_plain_steps(of_pixels: bool, tmp_path: Path) -> None:
    """SGD written out, gradients clipped, noise in some steps, LayerNorms at a tenth of the rate after warm-up."""
    settings = config(words="photo of the", lr=0.3, seed=3, epochs=4)
    tiny, source = exact("vit"), read_folder(make_photos(tmp_path))
    names = [name.replace("_", " ") for name in source.names]
    crops, labels = source_crops(model(), source, settings.learn, lambda _: None)
    shown: Any = crops
    if not of_pixels:
        shown = torch.stack([model().encode_images(crops(torch.arange(9), epoch)) for epoch in range(4)], 1)
    found = learn(model(), names, shown, labels, RunFiles(None, "", True), settings)

    norms = {name: t.detach().clone() for name, t in tiny.model.image.norms().items()} if of_pixels else {}
    context = tiny.embedding[torch.tensor(tiny.encode("photo of the"))].clone()
    parameters = [context, torch.zeros(1, tiny.spec.dimension, dtype=torch.float64), *norms.values()]
    start = [p.clone() for p in parameters]
    momentum = [torch.zeros_like(p) for p in parameters]
    written, lengths, noises = oracle.hand_written(tiny, names, SENTENCES), [], 0
    for epoch in range(4):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(3 * 100_003 + epoch))
        for number in range(2):
            pictures = order[4 * number : 4 * number + 4]
            leaves = [p.clone().requires_grad_() for p in parameters]
            hand = oracle.noise(written, 0.05, f"noise 3 {epoch} {number}")
            noises += not torch.equal(hand[0][0], written[0][0])
            images = (
                oracle.images(tiny, dict(zip(norms, leaves[2:], strict=True)), crops(pictures, epoch))
                if of_pixels
                else shown[pictures, epoch].double()
            )
            ce, told = oracle.losses(
                tiny, names, leaves[0], leaves[1], images, labels[pictures], hand, tiny.model.scale
            )
            gradients = torch.autograd.grad(ce + 5 * told, leaves)
            lengths.append(torch.cat([g.flatten() for g in gradients]).norm().item())
            for i, gradient in enumerate(oracle.clip(gradients, 1.0)):
                momentum[i] = 0.9 * momentum[i] + gradient + 5e-4 * parameters[i]
                lr = rate(epoch, settings.learn, 1.0 if i < 2 else 0.1)
                parameters[i] = parameters[i] - lr * momentum[i]
    assert 0 < noises < 8
    assert max(lengths) > 1
    assert set(found) == {"context", "bias", *norms}
    for (name, one), wanted, was in zip(found.items(), parameters, start, strict=True):
        assert relative(one.detach() - was, wanted - was) < 1e-2, name
        assert relative(was, wanted) > 1e-3, name


def test_only_long_gradients_are_clipped() -> None:
    short, long = [torch.tensor([0.3]), torch.tensor([0.4, 0.0])], [torch.tensor([3.0]), torch.tensor([4.0, 0.0])]
    assert [g.tolist() for g in clipped(short, 1.0)] == [g.tolist() for g in short]
    assert torch.cat(clipped(long, 2.0)).tolist() == pytest.approx([1.2, 1.6, 0.0], rel=1e-5)


def test_noise_comes_in_half_of_the_steps() -> None:
    hand = torch.zeros(2, 3, 400)
    drawn = [noisy(hand, 0.05, f"{i}") for i in range(200)]
    with_noise = [one for one in drawn if one.any()]
    assert 70 < len(with_noise) < 130
    assert with_noise[0].std() == pytest.approx(0.05, rel=0.1)
    assert torch.equal(drawn[5], noisy(hand, 0.05, "5"))


def test_crops_are_those_of_the_features(tmp_path: Path) -> None:
    photos = make_photos(tmp_path)
    (photos / "kite" / "1.png").write_text("not a picture")
    told: list[object] = []
    crops, labels = source_crops(model(), read_folder(photos), SHORT.learn, told.append)
    assert len(told) == 1
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert photos / "kite" / "1.png" not in crops.paths
    for epoch in range(3):
        found = crops(torch.tensor([4, 0]), epoch)
        for row, path in zip(found, (crops.paths[4], crops.paths[0]), strict=True):
            assert torch.equal(row, ViewSpec(2).cut(model().preprocess, path)[epoch % 2])  # type: ignore[index]
    crops.paths[0].unlink()
    with pytest.raises(SelfTPTError, match="no such file"):
        crops(torch.tensor([4, 0]), 0)


def test_untuned_norms_give_the_features_of_the_model() -> None:
    """Also while other threads use other LayerNorms with the same model."""
    tiny, shown = model(), pixels_of(model(), 5)
    norms = {name: tensor.clone() for name, tensor in tiny.image.norms().items()}
    wanted, different = tiny.encode_images(shown), tuned_features(tiny, moved(norms), shown)
    assert relative(different, wanted) > 0.01
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda i: tuned_features(tiny, moved(norms) if i % 2 else norms, shown), range(40)))
    for i, features in enumerate(seen):
        assert relative(features, different if i % 2 else wanted) < 1e-5


@pytest.mark.parametrize(("kind", "norms"), [("vit", True), ("vit", False), ("resnet", True)])
def test_it_is_learned_once_and_by_its_seed(
    kind: str, norms: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, paths = dataclasses.replace(SHORT, layer_norms=norms), job(tmp_path).teacher.paths
    eyes = Eyes(model(kind), lambda _: None)

    def answers(settings: Settings) -> Tensor:
        predictor = LASP.fit(job(tmp_path, kind), settings)(["cat", "dog"], "")
        assert isinstance(predictor, Classifier) == (kind == "resnet" or not norms)
        return torch.cat([predictor(shown) for _, shown in eyes(LASP, settings, paths)])

    first = answers(settings)
    assert first.shape == (9, 2)
    assert torch.allclose(first.sum(-1), torch.ones(9))
    seed = dataclasses.replace(settings, learn=dataclasses.replace(settings.learn, seed=2))
    assert not torch.equal(answers(seed), first)
    monkeypatch.setattr("selftpt.methods.lasp.train", None)
    assert torch.equal(answers(settings), first)


def test_the_predictor_is_the_tuned_tower_and_the_classifier(tmp_path: Path) -> None:
    kept = job(tmp_path)
    predictor = LASP.fit(kept, SHORT)(["cat", "dog"], "")
    learned = kept.learned("lasp", SHORT, None, None)  # type: ignore[arg-type]
    context, bias, norms = learned.pop("context"), learned.pop("bias"), learned
    shown = pixels_of(model(), 4).unflatten(0, (2, 2))
    images = oracle.images(small("vit"), norms, shown.flatten(0, 1))
    weights = [oracle.unit(w + bias[0]) for w in plain.encode(small("vit"), "end", ["cat", "dog"], context)]
    wanted = plain.probabilities(images, torch.stack(weights), 1 / model().scale).unflatten(0, (2, 2)).mean(1)
    assert torch.allclose(predictor(shown), wanted, atol=1e-4)


def test_killed_it_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LASP.fit(job(tmp_path), SHORT)
    (learned,) = (tmp_path / "learned").glob("*.safetensors")
    whole, keep = learned.read_bytes(), RunFiles.keep
    learned.unlink()

    def stop(self: RunFiles, *rest: Any) -> None:
        keep(self, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFiles, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        LASP.fit(job(tmp_path), SHORT)
    monkeypatch.setattr(RunFiles, "keep", keep)
    LASP.fit(job(tmp_path), SHORT)
    assert learned.read_bytes() == whole


@pytest.mark.parametrize("kind", ["vit", "clipa"])
def test_a_long_list_is_classified_in_chunks_as_at_once(kind: str) -> None:
    names = names_of([1, 3, 2, 5, 1, 2, 4])
    context, bias = random_prompt(small(kind), 3), bias_of(small(kind))
    whole, chunked = (
        classify(model(kind), names, context, bias, Settings(LaspConfig(chunk=chunk))).weights for chunk in (None, 2)
    )
    assert relative(chunked, whole) < 1e-5
    two = classify(model(kind), names[:2], context, bias, Settings()).weights
    assert relative(two, whole[:2]) < 1e-5


@pytest.mark.parametrize(
    "wrong", [{"templates": ()}, {"templates": ("a photo",)}, {"text": -1.0}, {"noise": float("nan")}]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError):
        Settings(**wrong)
    for more in ({"warmup_epochs": -1}, {"clip": 0.0}, {"lr": 0.0}):
        with pytest.raises(SelfTPTError):
            LaspConfig(**more)  # type: ignore[arg-type]


def test_a_sentence_that_leaves_no_room_is_refused() -> None:
    long = dataclasses.replace(SHORT, templates=("{}", "a photo of the {} in the snow and rain and wind."))
    tiny = small("layerscale").model  # 32 positions
    with pytest.raises(SelfTPTError, match="too long: 19 tokens"):
        Task.of(tiny, [*NAMES, names_of([19])[0]], long)
    Task.of(tiny, [*NAMES, names_of([18])[0]], long)


def test_the_table_has_it() -> None:
    assert METHODS["lasp"] is LASP
    assert LASP.seeded(7).learn.seed == 7
    assert len(LASP.settings.templates) == 35
