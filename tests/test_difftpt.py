"""DiffTPT equals a slow reference; generated images come from a folder or from a tiny diffusion model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from selftpt.config import LearnConfig
from selftpt.data.cache import Cache
from selftpt.data.decoding import ImageError, ImageInput, open_image
from selftpt.data.features import Block, FeatureProvider
from selftpt.data.sources import Source
from selftpt.data.views import LazyImage, ViewSpec
from selftpt.errors import SelfTPTError
from selftpt.methods import METHODS, FitContext, difftpt
from selftpt.methods.coop import CoopTrainConfig
from selftpt.methods.difftpt import (
    COOP_DIFFTPT,
    DIFFTPT,
    CoopDiffTptConfig,
    DiffTptConfig,
    Generated,
    near_and_confident,
)
from selftpt.methods.tpt import Tuner
from tests.helpers.folders import make_generated, make_photos
from tests.helpers.methods import raise_error
from tests.helpers.models import Small, model, relative, small
from tests.oracle import tpt as oracle

NAMES = ["cat", "red kite", "blue bird in the rain", "dog", "boat etc."]  # CLIP joins both full stops of the last name
FEW = 6  # number of generated images, made in two groups


def views_of(small: Small, views: int = 15) -> Tensor:
    """Return L2-normalised features [V, D] that are similar like views of one image."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(views, small.spec.dimension, generator=generator)
    return F.normalize((drawn + drawn[:1]).to(small.embedding.dtype), dim=-1)


def block_of(config: DiffTptConfig, images: list[Path], on_error: Any = raise_error) -> Block:
    """Return the block of views that DiffTPT gets for the usable images."""
    (block,) = FeatureProvider(model(), DIFFTPT.views(config), Cache(), on_error=on_error).blocks(images)
    return block


def make_views(spec: ViewSpec, image: ImageInput) -> Tensor:
    return spec.make_views(model().preprocess, LazyImage(image))


# Tuning


@pytest.mark.parametrize(("kind", "chunk"), [("vit", None), ("vit", 2), ("custom-text", None)])
def test_tuning_equals_the_reference(kind: str, chunk: int | None) -> None:
    tiny = small(kind, torch.float64)
    views = views_of(tiny)
    tuner = (
        DIFFTPT.fit(FitContext(tiny.model), DiffTptConfig(generated="unused", chunk=chunk)).for_classes(NAMES).function
    )
    assert isinstance(tuner, Tuner)
    begin = tiny.embedding[torch.tensor(tiny.encode("a photo of a"))]
    expected = oracle.tune(tiny, NAMES, begin, views, 1 / tiny.model.scale, ratio=0.3, near_ratio=0.8, steps=4)
    loss = tuner.view_loss(views)
    assert loss(tuner.class_features).item() == pytest.approx(expected.loss, rel=1e-9)
    assert relative(tuner.first_gradient(loss), expected.gradient) < 1e-9
    assert relative(tuner.tune(views), expected.prompt) < 1e-6
    assert relative(tuner(views[None])[0], expected.probabilities) < 1e-6


@given(st.integers(1, 12), st.integers(2, 5), st.floats(0.05, 1), st.floats(0.05, 1), st.integers(0, 10**6))
def test_selection_equals_the_reference(
    views: int, classes: int, near: float, confidence_ratio: float, seed: int
) -> None:
    logits = 3 * torch.randn(views, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = oracle.select_views(logits, confidence_ratio, near)
    assert near_and_confident(logits, near, confidence_ratio).tolist() == expected


def test_thirty_of_127_views_are_selected() -> None:
    """The 100 nearest of the 126 other views are kept, then the 30 most confident of 101."""
    config = DiffTptConfig()
    assert sum(spec.views for spec in DIFFTPT.views(config)) == 127
    logits = torch.randn(127, 5, generator=torch.Generator().manual_seed(0))
    chosen = near_and_confident(logits, config.near, config.confidence_ratio)
    assert len(chosen) == 30
    by_similarity = F.cosine_similarity(logits[:1], logits).argsort(descending=True)
    assert {*chosen.tolist()} <= {*by_similarity[:101].tolist()}


@pytest.mark.parametrize(
    ("near", "confidence_ratio", "kept"), [(0.8, 0.3, 2), (0.3, 0.9, 2), (0.05, 0.9, 1), (1.0, 0.99, 9)]
)
def test_selection_ratios_are_rounded_down(near: float, confidence_ratio: float, kept: int) -> None:
    """`near` applies to the nine other views, then `confidence_ratio` to the kept ones and the image."""
    logits = torch.randn(10, 5, generator=torch.Generator().manual_seed(0))
    assert len(near_and_confident(logits, near, confidence_ratio)) == kept


def test_coop_difftpt_starts_from_the_prompt_of_coop(tmp_path: Path) -> None:
    """The prompt is learned once for both methods, in one file."""
    source = Source.from_folder(make_photos(tmp_path / "photos", per_class=2))
    context = FitContext(model(), source, tmp_path / "learned", on_error=raise_error)
    image = views_of(small("vit"))[None, :1]
    coop = METHODS["coop"]
    expected = coop.fit(context, type(coop.config)(CoopTrainConfig(epochs=2))).for_classes(NAMES)(image)
    start = CoopDiffTptConfig(steps=0, generated="unused", learn=LearnConfig(epochs=2, cpt=0, gm=0))
    found = COOP_DIFFTPT.fit(context, start).for_classes(NAMES)(image)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert len(list((tmp_path / "learned").glob("*.safetensors"))) == 1
    assert coop.train_config(context, coop.config) == COOP_DIFFTPT.train_config(context, COOP_DIFFTPT.config)


@pytest.mark.parametrize(("method", "kind"), [(DIFFTPT, DiffTptConfig), (COOP_DIFFTPT, CoopDiffTptConfig)])
def test_cost_follows_from_the_configuration(method: Any, kind: type) -> None:
    """The views are the image, crops, and the same number of generated images."""
    assert method.cost(method.config) == "127 views, 4 steps"
    assert method.cost(kind(views=8, steps=2)) == "15 views, 2 steps"
    assert method.cost(kind(views=1, steps=1)) == "1 view, 1 step"


# Generated images from a folder


@pytest.fixture
def image_paths(tmp_path: Path) -> list[Path]:
    return sorted(make_photos(tmp_path / "photos", ("cat", "dog"), per_class=2).rglob("*.png"))


def test_generated_images_of_a_folder_come_after_image_and_crops(image_paths: list[Path], tmp_path: Path) -> None:
    """Generated images are not cropped at random."""
    folder = make_generated(tmp_path / "made", image_paths, per_image=FEW + 1)
    block = block_of(DiffTptConfig(views=FEW + 1, generated=str(folder)), image_paths)
    assert block.indices.tolist() == [0, 1, 2, 3]
    assert tuple(block.views.shape) == (4, 1 + 2 * FEW, model().dimension)
    for i, path in enumerate(image_paths):
        files = [folder / path.parent.name / path.name / f"{k:02d}.png" for k in range(FEW)]
        pixels = torch.stack([model().preprocess(open_image(file)) for file in files])
        torch.testing.assert_close(block.views[i, 1 + FEW :], model().encode_images(pixels), rtol=0, atol=1e-5)


def test_single_generated_view_equals_that_of_all_views(image_paths: list[Path], tmp_path: Path) -> None:
    spec = Generated(FEW, folder=str(make_generated(tmp_path / "made", image_paths, per_image=FEW)))
    whole = make_views(spec, image_paths[0])
    for i in range(FEW):
        assert torch.equal(spec.make_views(model().preprocess, LazyImage(image_paths[0]), only=i), whole[i : i + 1])


def test_changed_generated_images_are_encoded_again(image_paths: list[Path], tmp_path: Path) -> None:
    spec = Generated(FEW, folder=str(make_generated(tmp_path / "made", image_paths, per_image=FEW)))

    def features() -> Tensor:
        return FeatureProvider(model(), [spec], Cache(), on_error=raise_error)(image_paths)

    before = features()
    encoded = model().encoded
    assert torch.equal(features(), before)
    assert model().encoded == encoded
    (tmp_path / "made" / "cat" / "0.png" / "03.png").write_bytes(image_paths[0].read_bytes())
    after = features()
    assert model().encoded == encoded + FEW
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [False, True, True, True]


def test_different_views_have_different_cache_keys() -> None:
    specs = [
        ViewSpec(FEW),
        Generated(FEW, folder="a"),
        Generated(FEW, folder="b"),
        Generated(FEW + 1, folder="a"),
        Generated(FEW, folder="a", diffusion="x"),
        Generated(FEW, folder="a", diffusion="y"),
        Generated(FEW, folder="a", diffusion="x", guidance=2.0),
        Generated(FEW, folder="a", diffusion="x", denoising=2),
    ]
    assert len({spec.key for spec in specs}) == len(specs)
    made = [DIFFTPT.views(DiffTptConfig(diffusion="x", guidance=g))[-1].key for g in (2.0, 3.0)]
    assert made[0] != made[1]


def test_missing_generated_images_are_reported(image_paths: list[Path], tmp_path: Path) -> None:
    folder = make_generated(tmp_path / "made", image_paths[1:], per_image=FEW)
    (folder / "dog" / "0.png" / "00.png").unlink()
    (folder / "dog" / "1.png" / "00.png").write_text("no image")
    errors: list[ImageError] = []
    block = block_of(DiffTptConfig(views=FEW + 1, generated=str(folder)), image_paths, errors.append)
    assert block.indices.tolist() == [1]
    assert block.sources == image_paths[1:2]
    assert [str(error).split(":")[0] for error in errors[:2]] == [str(image_paths[0]), str(image_paths[2])]
    assert f"has 0 of {FEW} generated images" in str(errors[0])
    assert f"has {FEW - 1} of {FEW} generated images" in str(errors[1])
    assert "diffusion=lambdalabs" in str(errors[0])
    assert str(folder / "dog" / "1.png" / "00.png") in str(errors[2])


def test_images_in_memory_have_no_generated_images(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="by the path of an image: pass paths"):
        make_views(Generated(FEW, folder=str(tmp_path)), Image.new("RGB", (40, 40)))


@pytest.mark.parametrize("method", [DIFFTPT, COOP_DIFFTPT])
def test_generated_images_must_be_configured(method: Any, image_paths: list[Path]) -> None:
    source = Source.from_folder(image_paths[0].parents[1]) if method.needs_labels else None
    with pytest.raises(SelfTPTError, match="set generated to a folder of them, or diffusion="):
        method.fit(FitContext(model(), source, on_error=raise_error))


@pytest.mark.parametrize(
    "wrong",
    [
        {"near": 0.0},
        {"near": 1.1},
        {"guidance": -1.0},
        {"guidance": "3"},
        {"denoising": 0},
        {"denoising": 2.5},
        {"confidence_ratio": 0.0},
        {"generated": Path("folder")},
    ],
)
def test_invalid_configuration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SelfTPTError, match=f"DiffTptConfig.{next(iter(wrong))} must be"):
        DiffTptConfig(**wrong)


def test_prompt_without_words_is_refused() -> None:
    with pytest.raises(SelfTPTError, match="words is empty"):
        DiffTptConfig(words="")


# Generation


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with an image-variation model of a few thousand random weights."""
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


def made(spec: ViewSpec, path: Path) -> dict[str, bytes]:
    assert isinstance(spec, Generated)
    return {file.name: file.read_bytes() for file in sorted(spec.place(path).iterdir())}


def spec_of(folder: Path, diffusion: str, **more: Any) -> Generated:
    return Generated(FEW, folder=str(folder), diffusion=diffusion, denoising=2, **more)


def test_generated_image_depends_only_on_image_and_number(
    image_paths: list[Path], diffusion: str, tmp_path: Path
) -> None:
    """It does not depend on earlier images. All generated images of a path differ, and the guidance has an effect."""
    first, second = (spec_of(tmp_path / name, diffusion) for name in ("first", "second"))
    guided = spec_of(tmp_path / "guided", diffusion, guidance=9.0)
    for path in image_paths:
        assert make_views(first, path).shape == (FEW, 3, *model().preprocess.size)
    for path in image_paths[::-1]:
        make_views(second, path)
    files = [made(first, path) for path in image_paths]
    assert [made(second, path) for path in image_paths] == files
    assert [*files[0]] == [f"{i:03d}.png" for i in range(FEW)]
    assert len({content for each in files for content in each.values()}) == 4 * FEW
    make_views(guided, image_paths[0])
    assert made(guided, image_paths[0]) != files[0]
    assert {open_image(file).size for file in first.place(image_paths[0]).iterdir()} == {(16, 16)}


def test_generated_image_depends_on_content_and_name_of_the_image(
    image_paths: list[Path], diffusion: str, tmp_path: Path
) -> None:
    """The content guides the generation, and the names of file and folder give the seed."""
    paths = [image_paths[0], tmp_path / "other" / "cat" / "0.png", tmp_path / "other" / "cow" / "0.png"]
    contents = []
    for path, copied in zip(paths, (image_paths[0], image_paths[3], image_paths[0]), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(copied.read_bytes())
        spec = spec_of(tmp_path / f"made{len(contents)}", diffusion)
        make_views(spec, path)
        contents.append(made(spec, path))
    assert contents[0] != contents[1]
    assert contents[0] != contents[2]


@pytest.mark.parametrize("lost", [{0, 1, 2, 3, 4, 5}, {2}, {3, 4, 5}])
def test_missing_generated_images_are_restored_bitwise(
    image_paths: list[Path], diffusion: str, tmp_path: Path, lost: set[int]
) -> None:
    spec = spec_of(tmp_path / "made", diffusion)
    make_views(spec, image_paths[0])
    whole = made(spec, image_paths[0])
    for i in lost:
        (spec.place(image_paths[0]) / f"{i:03d}.png").unlink()
    make_views(spec, image_paths[0])
    assert made(spec, image_paths[0]) == whole


def test_interrupted_generation_leaves_only_complete_images(
    image_paths: list[Path], diffusion: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, write, left = spec_of(tmp_path / "made", diffusion), difftpt.write_atomically, iter(range(3))

    def stop(path: Path, content: bytes) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(difftpt, "write_atomically", stop)
    with pytest.raises(KeyboardInterrupt):
        make_views(spec, image_paths[0])
    assert len(made(spec, image_paths[0])) == 3
    monkeypatch.setattr(difftpt, "write_atomically", write)
    make_views(spec, image_paths[0])
    undisturbed = spec_of(tmp_path / "undisturbed", diffusion)
    make_views(undisturbed, image_paths[0])
    assert made(spec, image_paths[0]) == made(undisturbed, image_paths[0])


def test_second_run_generates_and_encodes_nothing(image_paths: list[Path], diffusion: str, own_cache: Path) -> None:
    """Without a folder, generated images are stored in the cache."""
    config = DiffTptConfig(views=FEW + 1, diffusion=diffusion, denoising=2)
    predictor = DIFFTPT.fit(FitContext(model(), on_error=raise_error), config).for_classes(NAMES)
    answers = []
    for _ in range(2):
        encoded = model().encoded
        answers.append(predictor(block_of(config, image_paths).views))
    assert model().encoded == encoded
    assert torch.equal(*answers)
    # Each of the four images has a folder, whose name also ends with .png.
    assert len(list((own_cache / "generated").rglob("*.png"))) == 4 * FEW + 4


def test_missing_diffusion_model_is_refused(image_paths: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    spec = spec_of(tmp_path / "made", str(tmp_path / "empty"))
    with pytest.raises(SelfTPTError, match=f"cannot load the diffusion model {tmp_path / 'empty'}") as refusal:
        make_views(spec, image_paths[0])
    assert not isinstance(refusal.value, ImageError), "it concerns all images"


def test_error_without_diffusers_names_the_extra(
    image_paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(SelfTPTError, match=r"pip install 'selftpt\[diffusion\]'"):
        make_views(spec_of(tmp_path / "made", "not loaded yet"), image_paths[0])


def test_diffusers_is_imported_only_to_generate_images(
    image_paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing the methods or reading images of a folder does not import it."""
    program = "import sys, selftpt.methods; sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    monkeypatch.setitem(sys.modules, "diffusers", None)
    folder = make_generated(tmp_path / "made", image_paths, per_image=FEW)
    assert len(make_views(Generated(FEW, folder=str(folder)), image_paths[0])) == FEW
