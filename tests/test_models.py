"""Models by name, from a folder or a file; their digest; what stands in the way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file

from selftpt import SelfTPTError, SelfTPTWarning, list_models, load_model
from selftpt.models import ModelId
from tests.folders import make_model


def test_a_folder_is_a_model_and_its_digest_tells_its_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    first = load_model(str(folder), device="cpu")
    assert first.id.digest == load_model(str(folder), device="cpu", precision="bf16").id.digest
    file = folder / "open_clip_model.safetensors"
    weights = load_file(file)
    weights["logit_scale"] += 1e-3
    save_file(weights, file)
    assert load_model(str(folder), device="cpu").id.digest != first.id.digest


def test_the_digest_tells_activation_and_preprocessing_too(tmp_path: Path) -> None:
    plain, quick = make_model(tmp_path / "a"), make_model(tmp_path / "b", quick_gelu=True)
    weights = "open_clip_model.safetensors"
    (quick / weights).write_bytes((plain / weights).read_bytes())
    digests = {load_model(str(folder), device="cpu").id.digest for folder in (plain, quick)}
    config = json.loads((plain / "open_clip_config.json").read_text())
    config["preprocess_cfg"]["mean"] = [0.4, 0.4, 0.4]
    (plain / "open_clip_config.json").write_text(json.dumps(config))
    digests.add(load_model(str(plain), device="cpu").id.digest)
    assert len(digests) == 3


def test_a_checkpoint_file_is_taken_for_a_known_architecture(tmp_path: Path) -> None:
    state = open_clip.create_model("ViT-S-32-alt").state_dict()
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "w.safetensors")
    model = load_model("ViT-S-32-alt", str(tmp_path / "w.safetensors"), device="cpu")
    assert torch.equal(model.clip.token_embedding.weight, state["token_embedding.weight"])
    assert not model.id.meaningless


@pytest.mark.parametrize(
    ("name", "mean", "mode"), [("MobileCLIP-S1", 0.0, "shortest"), ("ViT-B-16-SigLIP", 0.5, "squash")]
)
def test_a_file_is_preprocessed_as_the_published_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mean: float, mode: str
) -> None:
    """open_clip knows the preprocessing of weights by their name only."""
    asked = {}

    def create(*_: object, **options: object) -> None:
        asked.update(options)
        raise RuntimeError("enough")

    monkeypatch.setattr(open_clip, "create_model", create)
    (tmp_path / "w.safetensors").write_text("")
    with pytest.raises(SelfTPTError, match="does not hold weights"):
        load_model(name, str(tmp_path / "w.safetensors"), device="cpu")
    preprocess = asked["force_preprocess_cfg"]
    assert isinstance(preprocess, dict)
    assert tuple(preprocess["mean"]) == (mean,) * 3
    assert preprocess.get("resize_mode", "shortest") == mode


def test_a_file_for_a_name_with_a_quickgelu_twin_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_text("")
    with pytest.warns(SelfTPTWarning, match="ViT-B-16-quickgelu"), pytest.raises(SelfTPTError):
        load_model("ViT-B-16", str(tmp_path / "w.pt"), device="cpu")


def test_random_weights_are_the_same_every_time_and_leave_the_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = load_model("ViT-S-32-alt", "random", device="cpu")
    assert torch.equal(torch.rand(1), expected)
    assert first.id == load_model("ViT-S-32-alt", "random", device="cpu").id
    assert first.id.meaningless


def test_openai_weights_get_quickgelu_under_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the weights: what is asked of open_clip."""
    asked = []

    def create(name: str, pretrained: str | None, **options: object) -> None:
        asked.append((name, pretrained, options["force_quick_gelu"]))
        raise RuntimeError("offline")

    monkeypatch.setattr(open_clip, "create_model", create)
    for name, weights in (("ViT-B/16", "openai"), ("ViT-B-16-quickgelu", "openai"), ("ViT-B-16", "laion400m_e32")):
        with pytest.raises(SelfTPTError, match="could not be downloaded: check the connection"):
            load_model(name, weights, device="cpu")
    assert asked == [
        ("ViT-B-16", "openai", True),
        ("ViT-B-16-quickgelu", "openai", True),
        ("ViT-B-16", "laion400m_e32", False),
    ]


def test_loading_leaves_logging_as_it_was(tmp_path: Path) -> None:
    handlers, level = logging.root.handlers[:], logging.root.manager.disable
    load_model(str(make_model(tmp_path / "a")), device="cpu")
    assert logging.root.handlers == handlers
    assert logging.root.manager.disable == level


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precision_is_of_the_image_tower(tmp_path: Path, precision: str) -> None:
    folder = make_model(tmp_path / "a")
    exact, model = (load_model(str(folder), device="cpu", precision=p) for p in ("fp32", precision))  # type: ignore[arg-type]
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's bf16 kernels crash where a host forbids AMX
        features = model.encode_images(pixels)
    assert features.dtype == torch.float32
    assert (features - exact.encode_images(pixels)).norm() < 0.05
    assert model.text.embedding.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["RN50", "ViT-B-32-quickgelu", "MobileCLIP-B"])
def test_models_of_open_clip_by_name(name: str) -> None:
    model = load_model(name, "random", device="cpu")
    assert model.text.supports_packed
    assert model.encode_images(torch.zeros(1, 3, *model.preprocess.size, dtype=torch.uint8)).shape == (
        1,
        model.dimension,
    )


def test_the_list_has_the_embedded_model_and_all_of_open_clip() -> None:
    assert list(list_models()) == ["selftpt-tiny", *open_clip.list_models()]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(SelfTPTError, match="cannot be loaded"):
        load_model(str(folder), device="cpu")
    (folder / "open_clip_config.json").write_text("{")
    with pytest.raises(SelfTPTError, match="cannot be loaded"):
        load_model(str(folder), device="cpu")


def test_an_id_says_what_it_is() -> None:
    assert str(ModelId("ViT-B-16", "openai", "0")) == "ViT-B-16 (openai)"
    assert str(ModelId("folder", None, "0")) == "folder"
