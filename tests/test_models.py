"""Loading models by name, from a folder or from a file, their digests, and error messages."""

from __future__ import annotations

import errno
import json
import urllib.error
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
from huggingface_hub import errors as hub
from open_clip.transformer import QuickGELU
from safetensors.torch import load_file, save_file

from selftpt import SelfTPTError, SelfTPTWarning, list_models, load_model
from selftpt.models import ModelId, load_recorded_model, loading
from tests.helpers.folders import make_model


def test_model_is_loaded_from_a_folder_and_its_digest_depends_on_the_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    first = load_model(str(folder), device="cpu")
    assert first.id.digest == load_model(str(folder), device="cpu", precision="bf16").id.digest
    file = folder / "open_clip_model.safetensors"
    weights = load_file(file)
    weights["logit_scale"] += 1e-3
    save_file(weights, file)
    assert load_model(str(folder), device="cpu").id.digest != first.id.digest


def test_digest_depends_on_activation_and_preprocessing(tmp_path: Path) -> None:
    plain, quick = make_model(tmp_path / "a"), make_model(tmp_path / "b", quick_gelu=True)
    weights = "open_clip_model.safetensors"
    (quick / weights).write_bytes((plain / weights).read_bytes())
    digests = {load_model(str(folder), device="cpu").id.digest for folder in (plain, quick)}
    config = json.loads((plain / "open_clip_config.json").read_text())
    config["preprocess_cfg"]["mean"] = [0.4, 0.4, 0.4]
    (plain / "open_clip_config.json").write_text(json.dumps(config))
    digests.add(load_model(str(plain), device="cpu").id.digest)
    assert len(digests) == 3


def test_checkpoint_file_is_loaded_for_a_known_architecture(tmp_path: Path) -> None:
    state = open_clip.create_model("ViT-S-32-alt").state_dict()
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "w.safetensors")
    model = load_model("ViT-S-32-alt", str(tmp_path / "w.safetensors"), device="cpu")
    assert torch.equal(model.clip.token_embedding.weight, state["token_embedding.weight"])
    assert not model.id.random_init


@pytest.mark.parametrize(
    ("name", "mean", "mode"), [("MobileCLIP-S1", 0.0, "shortest"), ("ViT-B-16-SigLIP", 0.5, "squash")]
)
def test_checkpoint_file_uses_the_preprocessing_of_the_published_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mean: float, mode: str
) -> None:
    """open_clip determines the preprocessing from the name of the weights."""
    requested = {}

    def build(_: object, preprocess: dict[str, Any]) -> None:
        requested.update(preprocess)
        raise RuntimeError("enough")

    monkeypatch.setattr(loading, "build_model", build)
    (tmp_path / "w.safetensors").write_text("")
    with pytest.raises(SelfTPTError, match="enough"):
        load_model(name, str(tmp_path / "w.safetensors"), device="cpu")
    assert tuple(requested["mean"]) == (mean,) * 3
    assert requested.get("resize_mode", "shortest") == mode


def test_checkpoint_file_for_a_model_with_a_quickgelu_variant_gives_a_warning(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_text("")
    with pytest.warns(SelfTPTWarning, match="ViT-B-16-quickgelu"), pytest.raises(SelfTPTError):
        load_model("ViT-B-16", str(tmp_path / "w.pt"), device="cpu")


def test_random_weights_are_reproducible_and_do_not_change_the_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = load_model("ViT-S-32-alt", "random", device="cpu")
    assert torch.equal(torch.rand(1), expected)
    assert first.id == load_model("ViT-S-32-alt", "random", device="cpu").id
    assert first.id.random_init


@pytest.mark.parametrize(
    ("name", "tag", "quick"),
    [("ViT-B/32", "openai", True), ("ViT-B-32-quickgelu", "openai", True), ("ViT-B-32", "laion2b_e16", False)],
)
def test_published_weights_are_downloaded_and_get_their_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tag: str, quick: bool
) -> None:
    """A file or folder with the same name is ignored."""
    known = name.replace("/", "-")
    source = open_clip.create_model(known, force_quick_gelu=quick)
    save_file({k: v.contiguous() for k, v in source.state_dict().items()}, tmp_path / "w.safetensors")
    requested = []

    def download(cfg: dict[str, Any], **_: object) -> str:
        requested.append(cfg)
        return str(tmp_path / "w.safetensors")

    monkeypatch.setattr(loading, "get_hf_file_metadata", lambda _url: None)
    monkeypatch.setattr(open_clip, "download_pretrained", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / tag).write_text("no weights")
    make_model(tmp_path / name)
    model = load_model(name, tag, device="cpu")
    assert requested == [open_clip.get_pretrained_cfg(known, tag)]
    assert (model.id.name, model.id.pretrained) == (name, tag)
    found = model.clip
    assert torch.equal(found.token_embedding.weight, source.token_embedding.weight)
    activations = [type(m) for m in found.modules() if "GELU" in type(m).__name__]
    assert activations
    assert all((kind is QuickGELU) == quick for kind in activations)


def test_hub_repository_equals_a_folder_with_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "a")
    requested = []

    def download(repository: str, filename: str | None = None) -> str:
        requested.append((repository, filename))
        return str(folder / (filename or "open_clip_model.safetensors"))

    monkeypatch.setattr(loading, "get_hf_file_metadata", lambda _url: None)
    monkeypatch.setattr(loading, "download_pretrained_from_hf", download)
    model = load_model("hf-hub:org/repo", device="cpu")
    assert requested == [("org/repo", "open_clip_config.json"), ("org/repo", None)]
    assert model.id == ModelId("hf-hub:org/repo", None, load_model(str(folder), device="cpu").id.digest)
    with pytest.raises(SelfTPTError, match="has its own weights: omit the weights 'openai'"):
        load_model("hf-hub:org/repo", "openai", device="cpu")


@pytest.mark.parametrize("change", ["plain", "wrapped", "resized", "safetensors"])
def test_checkpoint_gives_the_weights_that_open_clip_loads(tmp_path: Path, change: str) -> None:
    state = open_clip.create_model("ViT-S-32-alt").state_dict()
    file = tmp_path / ("w.safetensors" if change == "safetensors" else "w.pt")
    if change == "resized":
        state["visual.positional_embedding"] = torch.randn(101, state["visual.positional_embedding"].shape[1])
        state["positional_embedding"] = torch.randn(40, state["positional_embedding"].shape[1])
    if change == "safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, file)
    else:
        wrapped = {"state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}
        torch.save(wrapped if change == "wrapped" else state, file)
    expected = open_clip.create_model("ViT-S-32-alt", str(file)).state_dict()
    found = load_model("ViT-S-32-alt", str(file), device="cpu").clip.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_clip_weights_are_converted_for_a_custom_text_tower(tmp_path: Path) -> None:
    """A bias that is missing in the checkpoint is filled in, as open_clip does."""
    folder = make_model(tmp_path / "a", custom_text=True, init_logit_bias=-10.0)
    state = load_file(folder / "open_clip_model.safetensors")
    old = {key.removeprefix("text."): tensor for key, tensor in state.items() if key != "logit_bias"}
    old["logit_scale"] = old["logit_scale"].reshape(1)
    save_file(old, folder / "open_clip_model.safetensors")
    expected = open_clip.create_model(f"local-dir:{folder}").state_dict()
    found = load_model(str(folder), device="cpu").clip.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert found["logit_bias"] == 0


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def test_checkpoint_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": _Payload()}, "w.pt")
    with pytest.raises(SelfTPTError, match=r"w\.pt cannot be read.*only tensors are loaded; save only its state dict"):
        load_model("ViT-S-32-alt", "w.pt", device="cpu")
    assert not Path("executed").exists()
    torch.jit.script(torch.nn.Linear(2, 2)).save("w.pt")
    with pytest.raises(SelfTPTError, match=r"TorchScript archive; save its state dict"):
        load_model("ViT-S-32-alt", "w.pt", device="cpu")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("kept", [0, 100, 20_000])
def test_damaged_checkpoint_is_refused_by_name(tmp_path: Path, suffix: str, kept: int) -> None:
    folder, file = make_model(tmp_path / "a"), tmp_path / f"w.{suffix}"
    state = load_file(folder / "open_clip_model.safetensors")
    torch.save(state, file) if suffix == "pt" else save_file(state, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        SelfTPTError, match=f"{file} cannot be read.*damaged or not a checkpoint; download it again"
    ) as caught:
        load_model("ViT-S-32-alt", str(file), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"text_projection": s["text_projection"][:5]}, r"text_projection has the shape \[5, 16\]"),
        (lambda s: {k: v for k, v in s.items() if k != "ln_final.bias"}, "it has no tensor ln_final.bias"),
        (lambda s: s | {"more": torch.zeros(1)}, "the model has no tensor more"),
    ],
)
def test_weights_of_another_architecture_are_refused_with_the_first_wrong_tensor(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    folder = make_model(tmp_path / "a")
    file = folder / "open_clip_model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(file)).items()}, file)
    with pytest.raises(SelfTPTError, match=f"{file} does not contain weights of {folder}: {message}") as caught:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def _raised_from(outer: Exception, inner: Exception) -> Exception:
    outer.__context__ = inner
    return outer


RESPONSE = SimpleNamespace(headers={}, status_code=404, request=None, text="")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "not enough memory to load hf-hub:org/repo"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory"),
        (ImportError("No module named 'sentencepiece'"), r"pip install 'selftpt\[hf\]'"),
        (RuntimeError("Please `pip install transformers` to use"), r"pip install 'selftpt\[hf\]'"),
        (hub.GatedRepoError("gated", response=RESPONSE), "accept them on the hub"),  # type: ignore[arg-type]
        (hub.RepositoryNotFoundError("404", response=RESPONSE), "the hub has no repository for hf-hub:org/repo"),  # type: ignore[arg-type]
        (hub.RemoteEntryNotFoundError("404", response=RESPONSE), "not a model of open_clip"),  # type: ignore[arg-type]
        (hub.LocalEntryNotFoundError("offline"), "could not be downloaded: check the connection"),
        (hub.OfflineModeIsEnabled("offline"), "could not be downloaded: check the connection"),
        (ConnectionResetError("reset"), "could not be downloaded: check the connection"),
        (urllib.error.URLError("no route"), "could not be downloaded: check the connection"),
        (RuntimeError("something else"), "hf-hub:org/repo cannot be loaded: (wrapped|something else)"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_loading_error_names_its_cause_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str, wrapped: bool
) -> None:
    """Also if open_clip wraps the error in another one."""

    def download(*_: object, **__: object) -> str:
        raise _raised_from(FileNotFoundError("wrapped"), error) if wrapped else error

    monkeypatch.setattr(loading, "get_hf_file_metadata", lambda _url: None)
    monkeypatch.setattr(loading, "download_pretrained_from_hf", download)
    with pytest.raises(SelfTPTError, match=message) as caught:
        load_model("hf-hub:org/repo", device="cpu")
    assert "\n" not in str(caught.value)
    if "connection" not in message:
        assert "connection" not in str(caught.value)


@pytest.mark.parametrize("arguments", [("hf-hub:org/repo",), ("ViT-B-32", "openai")])
def test_unreachable_hub_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Without the retries of huggingface_hub; a file in the cache is used."""

    def unreachable(_url: str) -> None:
        raise ConnectionError("no route")

    def download(*_: object, **__: object) -> str:
        raise AssertionError("it must not be called")

    monkeypatch.setattr(loading, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(loading, "download_pretrained_from_hf", download)
    monkeypatch.setattr(open_clip, "download_pretrained", download)
    with pytest.raises(SelfTPTError, match="could not be downloaded: check the connection"):
        load_model(*arguments, device="cpu")
    if arguments[0].startswith("hf-hub:"):
        folder = make_model(tmp_path / "a")
        monkeypatch.setattr(loading, "try_to_load_from_cache", lambda _repository, name: str(folder / name))
        assert load_model(*arguments, device="cpu").id.digest == load_model(str(folder), device="cpu").id.digest


def test_cached_safetensors_file_is_used_if_the_hub_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """open_clip caches it instead of a published file of the same name in another format."""

    def unreachable(_url: str) -> None:
        raise ConnectionError("no route")

    cached = {("org/repo", "pytorch_model.safetensors"): str(tmp_path / "w.safetensors")}
    monkeypatch.setattr(loading, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda *key: cached.get(key))
    source = loading._Source(known_name="ViT-B-32", published={"hf_hub": "org/repo/pytorch_model.bin"})
    assert source.weights() == tmp_path / "w.safetensors"


def test_insufficient_memory_is_an_error_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(loading, "build_model", build)
    for arguments in ((), ("ViT-B-32", "random")):
        with pytest.raises(SelfTPTError, match="not enough memory"):
            load_model(*arguments, device="cpu")


@pytest.mark.parametrize(
    "id",
    [
        ("hf-hub:org/repo", None),
        ("/some/folder", None),
        ("local-dir:/some/folder", None),
        ("ViT-B-16", "/some/file.pt"),
        ("ViT-B-16", None),
        ("ViT-B-16", "random"),
        ("selftpt-tiny", "random"),
        ("a\x1b[31m\n", None),
    ],
)
def test_recorded_model_that_is_not_published_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, id: tuple[str, str | None]
) -> None:
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(
        SelfTPTError, match=r"the prompt p\.st was made with .* only when you name it.*give --model"
    ) as caught:
        load_recorded_model(ModelId(*id, "0" * 32), "the prompt p.st")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("id", [("selftpt-tiny", None), ("ViT-B-16", "openai"), ("ViT-B/16", "laion400m-e32")])
def test_recorded_embedded_and_published_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch, id: tuple[str, str | None]
) -> None:
    requested = []
    monkeypatch.setattr(loading, "load_model", lambda *given, **options: requested.append((*given, options)))
    load_recorded_model(ModelId(*id, "0" * 32), "the prompt", device="cpu", precision="bf16")
    assert requested == [(*id, {"device": "cpu", "precision": "bf16"})]


def test_model_with_a_hugging_face_text_tower_is_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "."]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    transformers.BertConfig(
        vocab_size=80, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    ).save_pretrained(folder)
    vision = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": None, "image_size": 160}
    text = {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "context_length": 32}
    config = {"model_cfg": {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    source = open_clip.create_model(f"local-dir:{folder}", load_weights=False, pretrained_text=False).state_dict()
    save_file({k: v.contiguous() for k, v in source.items()}, folder / "open_clip_model.safetensors")
    model = load_model(str(folder), device="cpu")
    found = model.clip.state_dict()
    assert found.keys() == source.keys()
    assert all(torch.equal(found[key], source[key]) for key in source)
    assert load_model(str(folder), "random", device="cpu").id.digest != model.id.digest


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precision_applies_to_the_image_tower_only(tmp_path: Path, precision: str) -> None:
    folder = make_model(tmp_path / "a")
    exact, model = (load_model(str(folder), device="cpu", precision=p) for p in ("fp32", precision))  # type: ignore[arg-type]
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's bf16 kernels crash on hosts that forbid AMX
        features = model.encode_images(pixels)
    assert features.dtype == torch.float32
    assert (features - exact.encode_images(pixels)).norm() < 0.05
    assert model.text.embedding.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["RN50", "ViT-B-32-quickgelu", "MobileCLIP-B"])
def test_open_clip_models_are_found_by_name(name: str) -> None:
    model = load_model(name, "random", device="cpu")
    assert model.text.supports_packed
    assert model.encode_images(torch.zeros(1, 3, *model.preprocess.size, dtype=torch.uint8)).shape == (
        1,
        model.dimension,
    )


def test_list_has_the_embedded_model_and_all_open_clip_models() -> None:
    assert list(list_models()) == ["selftpt-tiny", *open_clip.list_models()]


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(SelfTPTError, match="has no weights"):
        load_model(str(folder), device="cpu")
    for text in ("{", "[]", "{}", '{"model_cfg": 3}', "\x00"):
        (folder / "open_clip_config.json").write_text(text)
        with pytest.raises(SelfTPTError, match=r"open_clip_config\.json is not the configuration"):
            load_model(str(folder), device="cpu")


def test_model_id_is_printed_readably() -> None:
    assert str(ModelId("ViT-B-16", "openai", "0")) == "ViT-B-16 (openai)"
    assert str(ModelId("folder", None, "0")) == "folder"
