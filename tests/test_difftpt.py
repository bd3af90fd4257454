"""DiffTPT is what its paper and program say; generated pictures come from a folder, or from a real, tiny pipeline."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from selftpt.config import LearnConfig
from selftpt.data.decoding import ImageError, open_image
from selftpt.data.features import FeatureStore, ViewSpec
from selftpt.data.sources import read_folder
from selftpt.errors import SelfTPTError
from selftpt.methods import METHODS, Eyes, Job, difftpt
from selftpt.methods.difftpt import Generated, near_and_confident
from selftpt.methods.tpt import Tuner
from tests.folders import make_generated, make_photos
from tests.oracle import tpt as oracle
from tests.small import Small, model, relative, small

NAMES = ["cat", "red kite", "blue bird in the rain", "dog", "boat on the lake"]
FEW = 6  # generated pictures, in two groups


def fail(error: ImageError) -> None:
    raise error


def views_of(small: Small, views: int = 15) -> Tensor:
    """Unit features [V, D]: a picture, and others near it."""
    generator = torch.Generator().manual_seed(0)
    shown = torch.randn(views, small.spec.dimension, generator=generator)
    return F.normalize((shown + shown[:1]).to(small.embedding.dtype), dim=-1)


# What is tuned


@pytest.mark.parametrize(("kind", "chunk"), [("vit", None), ("vit", 2), ("custom-text", None)])
def test_tuning(kind: str, chunk: int | None) -> None:
    tiny = small(kind, torch.float64)
    views = views_of(tiny)
    settings = difftpt.Settings(generated="unused", chunk=chunk)
    tuner = difftpt.fit(Job(tiny.model, None, Path("unused"), fail), settings)(NAMES, "unused {}")
    assert isinstance(tuner, Tuner)
    begin = tiny.embedding[torch.tensor(tiny.encode("a photo of a"))]
    wanted = oracle.tune(tiny, NAMES, begin, views, 1 / tiny.model.scale, share=0.3, near=0.8, steps=4)
    objective = tuner.objective(views)
    assert objective(tuner.features).item() == pytest.approx(wanted.loss, rel=1e-9)
    assert relative(tuner.first_gradient(objective), wanted.gradient) < 1e-9
    assert relative(tuner.tune(views), wanted.prompt) < 1e-6
    assert relative(tuner(views[None])[0], wanted.probabilities) < 1e-6


@given(st.integers(1, 12), st.integers(2, 5), st.floats(0.05, 1), st.floats(0.05, 1), st.integers(0, 10**6))
def test_selection(views: int, classes: int, near: float, confident: float, seed: int) -> None:
    logits = 3 * torch.randn(views, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert near_and_confident(logits, near, confident).tolist() == oracle.choose(logits, confident, near)


def test_thirty_of_127_views() -> None:
    """100 of the 126 others are near enough, and 30 of 101 confident enough."""
    settings = difftpt.Settings()
    assert sum(look.views for look in difftpt.looks(settings)) == 127
    logits = torch.randn(127, 5, generator=torch.Generator().manual_seed(0))
    chosen = near_and_confident(logits, settings.near, settings.confident)
    assert len(chosen) == 30
    alike = F.cosine_similarity(logits[:1], logits).argsort(descending=True)
    assert {*chosen.tolist()} <= {*alike[:101].tolist()}


def test_coop_and_difftpt(tmp_path: Path) -> None:
    """It starts from the prompt that CoOp learned, of which there is one file."""
    source = read_folder(make_photos(tmp_path / "photos", each=2))
    shown = views_of(small("vit"))[None]
    answers = {}
    for name in ("coop", "coop+difftpt"):
        method = METHODS[name]
        more = {} if name == "coop" else {"steps": 0, "generated": "unused"}
        settings = type(method.settings)(learn=LearnConfig(epochs=2, cpt=0, gm=0), **more)
        answers[name] = method.fit(Job(model(), source, tmp_path / "learned", fail), settings)(NAMES, "unused {}")(
            shown[:, :1]
        )
    torch.testing.assert_close(answers["coop"], answers["coop+difftpt"], rtol=0, atol=1e-6)
    assert len(list((tmp_path / "learned").glob("*.safetensors"))) == 1
    assert METHODS["coop"].settings.learn == METHODS["coop+difftpt"].settings.learn


# Pictures of a folder


@pytest.fixture
def asked(tmp_path: Path) -> list[Path]:
    return sorted(make_photos(tmp_path / "asked", ("cat", "dog"), each=2).rglob("*.png"))


def test_pictures_of_a_folder(asked: list[Path], tmp_path: Path) -> None:
    """As the model sees them whole, after the picture and its crops."""
    folder = make_generated(tmp_path / "made", asked, each=FEW + 1)
    settings = difftpt.Settings(views=FEW + 1, generated=str(folder))
    ((usable, shown),) = Eyes(model(), fail)(METHODS["difftpt"], settings, asked)
    assert usable.tolist() == [0, 1, 2, 3]
    assert tuple(shown.shape) == (4, 1 + 2 * FEW, model().dimension)
    for i, path in enumerate(asked):
        files = [folder / path.parent.name / path.name / f"{k:02d}.png" for k in range(FEW)]
        pixels = torch.stack([model().preprocess(open_image(file)) for file in files])
        torch.testing.assert_close(shown[i, 1 + FEW :], model().encode_images(pixels), rtol=0, atol=1e-5)


def test_changed_pictures_are_looked_at_again(asked: list[Path], tmp_path: Path) -> None:
    look = Generated(FEW, folder=str(make_generated(tmp_path / "made", asked, each=FEW)))
    before = FeatureStore(model(), look, fail)(asked)
    encoded = model().encoded
    assert torch.equal(FeatureStore(model(), look, fail)(asked), before)
    assert model().encoded == encoded
    (tmp_path / "made" / "cat" / "0.png" / "03.png").write_bytes(asked[0].read_bytes())
    after = FeatureStore(model(), look, fail)(asked)
    assert model().encoded == encoded + FEW
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [False, True, True, True]


def test_keys_tell_looks_apart() -> None:
    looks = [
        ViewSpec(FEW),
        Generated(FEW, folder="a"),
        Generated(FEW, folder="b"),
        Generated(FEW + 1, folder="a"),
        Generated(FEW, folder="a", diffusion="x"),
        Generated(FEW, folder="a", diffusion="y"),
        Generated(FEW, folder="a", diffusion="x", guidance=2.0),
        Generated(FEW, folder="a", diffusion="x", denoising=2),
    ]
    assert len({look.key for look in looks}) == len(looks)
    made = [difftpt.looks(difftpt.Settings(diffusion="x", guidance=g))[-1].key for g in (2.0, 3.0)]
    assert made[0] != made[1]


def test_too_few_pictures(asked: list[Path], tmp_path: Path) -> None:
    folder = make_generated(tmp_path / "made", asked[1:], each=FEW)
    (folder / "dog" / "0.png" / "00.png").unlink()
    (folder / "dog" / "1.png" / "00.png").write_text("no picture")
    settings, told = difftpt.Settings(views=FEW + 1, generated=str(folder)), []
    ((usable, _),) = Eyes(model(), told.append)(METHODS["difftpt"], settings, asked)
    assert usable.tolist() == [1]
    assert [str(error).split(":")[0] for error in told[:2]] == [str(asked[0]), str(asked[2])]
    assert f"has 0 generated pictures of {FEW}" in str(told[0])
    assert f"has {FEW - 1} generated pictures of {FEW}" in str(told[1])
    assert "diffusion=lambdalabs" in str(told[0])
    assert str(folder / "dog" / "1.png" / "00.png") in str(told[2])


@pytest.mark.parametrize("name", ["difftpt", "coop+difftpt"])
def test_without_generated_pictures(name: str, tmp_path: Path) -> None:
    with pytest.raises(SelfTPTError, match="set generated to a folder of them, or diffusion="):
        METHODS[name].fit(Job(model(), None, tmp_path, fail), METHODS[name].settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"near": 0.0}, "near"),
        ({"near": 1.1}, "near"),
        ({"guidance": -1.0}, "guidance"),
        ({"denoising": 0}, "denoising"),
        ({"confident": 0.0}, "confident"),
        ({"words": ""}, "words"),
    ],
)
def test_senseless_settings(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SelfTPTError, match=words):
        difftpt.Settings(**change)


# Pictures that are made


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with an image-variation model of a few thousand random weights."""
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionImageVariationPipeline, UNet2DConditionModel
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=8,
            attention_head_dim=4,
            norm_num_groups=4,
        )
        vae = AutoencoderKL(
            block_out_channels=(4, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=2,
        )
        vision = CLIPVisionConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
            projection_dim=8,
        )
        pipeline = StableDiffusionImageVariationPipeline(
            vae=vae,
            image_encoder=CLIPVisionModelWithProjection(vision),
            unet=unet,
            scheduler=PNDMScheduler(skip_prk_steps=True),
            safety_checker=None,
            feature_extractor=CLIPImageProcessor(crop_size=16, size=16),
            requires_safety_checker=False,
        )
    folder = tmp_path_factory.mktemp("diffusion")
    pipeline.save_pretrained(folder)
    return str(folder)


def made(look: ViewSpec, path: Path) -> dict[str, bytes]:
    assert isinstance(look, Generated)
    return {file.name: file.read_bytes() for file in sorted(look.place(path).iterdir())}


def look_of(folder: Path, diffusion: str, **more: Any) -> Generated:
    return Generated(FEW, folder=str(folder), diffusion=diffusion, denoising=2, **more)


def test_pictures_are_made(asked: list[Path], diffusion: str, tmp_path: Path) -> None:
    """By picture and number, whatever was made before; all of a picture are different, and guidance matters."""
    first, second = (look_of(tmp_path / name, diffusion) for name in ("first", "second"))
    guided = look_of(tmp_path / "guided", diffusion, guidance=9.0)
    for path in asked:
        assert isinstance(first.cut(model().preprocess, path), Tensor)
    for path in asked[::-1]:
        second.cut(model().preprocess, path)
    files = [made(first, path) for path in asked]
    assert [made(second, path) for path in asked] == files
    assert [*files[0]] == [f"{i:03d}.png" for i in range(FEW)]
    assert len({content for each in files for content in each.values()}) == 4 * FEW
    guided.cut(model().preprocess, asked[0])
    assert made(guided, asked[0]) != files[0]
    assert {open_image(file).size for file in first.place(asked[0]).iterdir()} == {(16, 16)}


def test_a_picture_and_its_name_decide_what_is_made(asked: list[Path], diffusion: str, tmp_path: Path) -> None:
    """The picture guides, and the names of file and folder are the seed."""
    paths = [asked[0], tmp_path / "other" / "cat" / "0.png", tmp_path / "other" / "cow" / "0.png"]
    contents = []
    for path, copied in zip(paths, (asked[0], asked[3], asked[0]), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(copied.read_bytes())
        look = look_of(tmp_path / f"made{len(contents)}", diffusion)
        look.cut(model().preprocess, path)
        contents.append(made(look, path))
    assert contents[0] != contents[1]
    assert contents[0] != contents[2]


@pytest.mark.parametrize("lost", [{0, 1, 2, 3, 4, 5}, {2}, {3, 4, 5}])
def test_what_a_killed_run_has_not_made_is_made(
    asked: list[Path], diffusion: str, tmp_path: Path, lost: set[int]
) -> None:
    look = look_of(tmp_path / "made", diffusion)
    look.cut(model().preprocess, asked[0])
    whole = made(look, asked[0])
    for i in lost:
        (look.place(asked[0]) / f"{i:03d}.png").unlink()
    look.cut(model().preprocess, asked[0])
    assert made(look, asked[0]) == whole


def test_a_run_killed_while_it_writes(
    asked: list[Path], diffusion: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves whole pictures only."""
    look, write, left = look_of(tmp_path / "made", diffusion), difftpt.write_whole, iter(range(3))

    def stop(path: Path, content: bytes) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(difftpt, "write_whole", stop)
    with pytest.raises(KeyboardInterrupt):
        look.cut(model().preprocess, asked[0])
    assert len(made(look, asked[0])) == 3
    monkeypatch.setattr(difftpt, "write_whole", write)
    look.cut(model().preprocess, asked[0])
    undisturbed = look_of(tmp_path / "undisturbed", diffusion)
    undisturbed.cut(model().preprocess, asked[0])
    assert made(look, asked[0]) == made(undisturbed, asked[0])


def test_made_once_and_answered(asked: list[Path], diffusion: str, own_cache: Path) -> None:
    """From the setting to probabilities; without a folder, in the cache; the second time nothing is made or encoded."""
    settings = difftpt.Settings(views=FEW + 1, diffusion=diffusion, denoising=2)
    predictor = difftpt.fit(Job(model(), None, own_cache, fail), settings)(NAMES, "unused {}")
    answers = []
    for _ in range(2):
        encoded = model().encoded
        ((_, shown),) = Eyes(model(), fail)(METHODS["difftpt"], settings, asked)
        answers.append(predictor(shown))
    assert model().encoded == encoded
    assert torch.equal(*answers)
    assert len(list((own_cache / "generated").rglob("*.png"))) == 4 * FEW + 4  # and a folder for each of four pictures


def test_no_model_there(asked: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    look = look_of(tmp_path / "made", str(tmp_path / "empty"))
    with pytest.raises(SelfTPTError, match=f"cannot load the diffusion model {tmp_path / 'empty'}"):
        look.cut(model().preprocess, asked[0])


def test_without_diffusers(asked: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(SelfTPTError, match=r"pip install 'selftpt\[diffusion\]'"):
        look_of(tmp_path / "made", "not loaded yet").cut(model().preprocess, asked[0])


def test_diffusers_is_not_loaded_before_it_is_needed(
    asked: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with the methods nor for pictures of a folder."""
    program = "import sys, selftpt.methods; sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    monkeypatch.setitem(sys.modules, "diffusers", None)
    folder = make_generated(tmp_path / "made", asked, each=FEW)
    assert isinstance(Generated(FEW, folder=str(folder)).cut(model().preprocess, asked[0]), Tensor)


def test_loading_the_diffusion_model_changes_no_global_state(diffusion: str) -> None:
    difftpt._pipeline.cache_clear()
    importlib.import_module("diffusers").StableDiffusionImageVariationPipeline  # noqa: B018, imports on first use
    torch.manual_seed(3)
    state, handlers, disabled = torch.get_rng_state(), logging.root.handlers[:], logging.root.manager.disable
    filters, verbosity = warnings.filters[:], logging.getLogger("diffusers").level
    difftpt._pipeline(diffusion)
    assert torch.equal(torch.get_rng_state(), state)
    assert (logging.root.handlers, logging.root.manager.disable) == (handlers, disabled)
    assert (warnings.filters, logging.getLogger("diffusers").level) == (filters, verbosity)
