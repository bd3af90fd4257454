"""Loads frozen vision-language models of open_clip by name."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import urllib.error
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import open_clip
import torch
from huggingface_hub import errors as hub
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from open_clip.pretrained import download_pretrained_from_hf

from selftpt.config import Precision
from selftpt.errors import SelfTPTError, SelfTPTWarning, check_type
from selftpt.models.building import (
    build_model,
    build_tokenizer,
    causes,
    find_checkpoint,
    first_line,
    load_weights,
    out_of_memory,
)
from selftpt.models.model import PRECISIONS, RANDOM, Model, ModelId, check_device

EMBEDDED = "selftpt-tiny"  # included in the package; see docs/embedded-model.md
EMBEDDED_FILES = Path(__file__).parents[1] / "embedded"
HUB, FOLDER = "hf-hub:", "local-dir:"
CONFIG_FILE = "open_clip_config.json"
WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


@dataclass(frozen=True)
class _Source:
    """Where the configuration and the weights of a model come from.

    Attributes:
        folder: The folder of a local model.
        repository: A repository of the Hugging Face hub.
        known_name: The name of an architecture that open_clip defines.
        published: open_clip's entry for published weights: their location and preprocessing.
        checkpoint: A checkpoint file.
        preprocess: The preprocessing for weights that open_clip does not publish.
    """

    folder: Path | None = None
    repository: str | None = None
    known_name: str | None = None
    published: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    preprocess: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return the architecture and the preprocessing, open_clip's `model_cfg` and `preprocess_cfg`."""
        if self.known_name:
            quick_gelu = bool(self.published.get("quick_gelu"))
            known = {"quick_gelu": quick_gelu, **open_clip.get_model_config(self.known_name)}
            return known, self.published or self.preprocess
        if self.repository:
            repository = self.repository
            file = _hub_file(
                repository, [CONFIG_FILE], lambda: download_pretrained_from_hf(repository, filename=CONFIG_FILE)
            )
        else:
            assert self.folder is not None
            file = self.folder / CONFIG_FILE
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            return {"quick_gelu": False, **config["model_cfg"]}, config.get("preprocess_cfg", {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SelfTPTError(f"{file} is not the configuration of an open_clip model: {first_line(error)}") from error

    def weights(self) -> Path:
        """Return the checkpoint file; download it if necessary."""
        if self.checkpoint:
            return self.checkpoint
        if self.folder:
            return find_checkpoint(self.folder)
        if repository := self.repository:
            return _hub_file(repository, WEIGHT_FILES, lambda: download_pretrained_from_hf(repository))
        repository, _, name = str(self.published.get("hf_hub") or "").rpartition("/")
        if not repository:
            return Path(open_clip.download_pretrained(self.published))
        # open_clip prefers a safetensors file of the same name.
        names = [str(Path(name).with_suffix(".safetensors")), name] if name else WEIGHT_FILES
        return _hub_file(repository, names, lambda: open_clip.download_pretrained(self.published))


def _hub_file(repository: str, names: Sequence[str], download: Callable[[], str]) -> Path:
    """Return a file of the Hugging Face hub, downloaded if necessary.

    If the hub cannot be reached, the file in the cache is used, or the error is raised at once: huggingface_hub would
    retry for half a minute and log every attempt.

    Args:
        repository: The repository, `ORG/REPO`.
        names: The names that the file may have.
        download: Downloads the file and returns its path.
    """
    try:
        get_hf_file_metadata(hf_hub_url(repository, names[-1]))
    except Exception as error:
        if _network(error) and not isinstance(error, hub.HfHubHTTPError):
            cached = (try_to_load_from_cache(repository, name) for name in names)
            if found := next((path for path in cached if isinstance(path, str)), None):
                return Path(found)
            raise
    return Path(download())


def list_models() -> dict[str, list[str]]:
    """Return the names of all models, each with the names of its pretrained weights.

    The embedded model comes first; its list of weights is empty, because there is nothing to choose.
    """
    return {EMBEDDED: [], **{name: open_clip.list_pretrained_tags_by_model(name) for name in open_clip.list_models()}}


def best_device() -> str:
    """Return `cuda` or `mps` if available, otherwise `cpu`."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def load_model(
    name: str = EMBEDDED, pretrained: str | None = None, *, device: str | None = None, precision: Precision = "fp32"
) -> Model:
    """Load a frozen model.

    Args:
        name: A model name of open_clip (see `selftpt.list_models`), "hf-hub:ORG/REPO", or a folder with
            open_clip_config.json; by default the small model that is included in selftpt.
        pretrained: The name of the weights, a checkpoint file, or "random" for random weights, with which predictions
            are meaningless (for tests and speed measurements).
        device: cpu, cuda or mps; by default the best one available.
        precision: Precision of the image tower: fp32, bf16 or fp16. The text tower, which runs once per class list, is
            always fp32.

    Returns:
        The model.

    Raises:
        SelfTPTError: The model cannot be loaded; the message says why and what to do.
    """
    check_type(name, str, "the name of a model")
    if precision not in PRECISIONS:
        raise SelfTPTError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    device = device or best_device()
    check_device(device)
    source = find_source(name, pretrained)
    try:
        # Autograd rejects inference tensors, and random weights must not depend on the default device.
        with torch.inference_mode(False), torch.device("cpu"):
            config, preprocess = source.config()
            file = None if pretrained == RANDOM else source.weights()
            clip = build_model(config, preprocess)
            if file:
                load_weights(clip, file, name)
            tokenizer = build_tokenizer(config, source.known_name, source.folder)
            digest = _digest(clip, {**config, "preprocess": clip.visual.preprocess_cfg})
            id = ModelId(*_recorded_names(name, pretrained, source), digest)
            return Model(clip, tokenizer, id, config["embed_dim"], device, precision)
    except Exception as error:
        if isinstance(error, SelfTPTError) and name != EMBEDDED:
            raise
        raise SelfTPTError(_why(name, pretrained, error)) from error


def load_recorded_model(
    model_id: ModelId, what: str, *, device: str | None = None, precision: Precision = "fp32"
) -> Model:
    """Load the model that a file was made with, if it is the embedded one or has weights that open_clip publishes.

    Other models are not loaded, because an untrusted file must not choose a local folder or an arbitrary repository.

    Args:
        model_id: The model that the file was made with.
        what: The file in the error message, such as "the classifier c.safetensors".
        device: See `load_model`.
        precision: See `load_model`.

    Returns:
        The model.

    Raises:
        SelfTPTError: The user must name the model explicitly, or it cannot be loaded.
    """
    name, pretrained = model_id.name, model_id.pretrained
    embedded = name == EMBEDDED and pretrained is None
    if not embedded and not open_clip.is_pretrained_cfg(name.replace("/", "-"), pretrained or ""):
        options = f"--model {_quoted(name)}" + (f" --pretrained {_quoted(pretrained)}" if pretrained else "")
        call = f"load_model({name!r}" + (f", {pretrained!r})" if pretrained else ")")
        raise SelfTPTError(
            f"{what} was made with {_quoted(str(model_id))}, which is loaded only when you name it: if you trust it, "
            f"give {options}, or in Python model={call}"
        )
    return load_model(name, pretrained, device=device, precision=precision)


def _quoted(text: str) -> str:
    """Return a text from a file, escaped if it contains characters that are special to a terminal or a shell."""
    return text if text.isprintable() and not set(text) & set("'\"\\$`;|&<>") else repr(text)


def find_source(name: str, pretrained: str | None) -> _Source:
    """Find a model by name. Names that open_clip knows have precedence over folders and files of the same name.

    Args:
        name: As in `load_model`.
        pretrained: As in `load_model`.

    Raises:
        SelfTPTError: There is no such model, or its weights do not exist.
    """
    if name == EMBEDDED:
        if pretrained not in (None, RANDOM):
            raise SelfTPTError(f"{EMBEDDED} has its own weights: choose the model of the weights {pretrained!r}")
        return _Source(folder=EMBEDDED_FILES)
    known = name.replace("/", "-")
    if known in open_clip.list_models():
        return _find_known(name, known, pretrained)
    if name.startswith(HUB):
        source = _Source(repository=name.removeprefix(HUB))
    else:
        folder = Path(name.removeprefix(FOLDER))
        if not name or not os.path.isdir(folder):  # unlike Path.is_dir, it returns False for invalid paths
            near = difflib.get_close_matches(known, list_models(), n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}? " if near else ""
            raise SelfTPTError(f"no model is called {name!r}: {hint}`selftpt models` lists them")
        if not (folder / CONFIG_FILE).is_file():
            raise SelfTPTError(f"the folder {folder} has no {CONFIG_FILE}: give the folder of an open_clip model")
        source = _Source(folder=folder)
    if pretrained not in (None, RANDOM):
        raise SelfTPTError(f"{name} has its own weights: omit the weights {pretrained!r}")
    return source


def _find_known(name: str, known: str, pretrained: str | None) -> _Source:
    tags = open_clip.list_pretrained_tags_by_model(known)
    if pretrained is None:
        published = ", ".join(tags) or "none are published"
        raise SelfTPTError(f"{name} needs weights: name them ({published}) or give a checkpoint file")
    if published_cfg := open_clip.get_pretrained_cfg(known, pretrained):
        return _Source(known_name=known, published=published_cfg)
    if pretrained != RANDOM and not os.path.isfile(pretrained):
        choice = f"choose one of {', '.join(tags)}" if tags else "none are published"
        raise SelfTPTError(f"{name} has no weights {pretrained!r}, and there is no such file: {choice}")
    if pretrained != RANDOM and f"{known}-quickgelu" in open_clip.list_models():
        text = f"if {pretrained} contains weights trained with QuickGELU, such as OpenAI's, use {known}-quickgelu"
        warnings.warn(text, SelfTPTWarning, stacklevel=4)
    # A checkpoint does not specify its preprocessing: use what all published weights of the model have in common.
    cfgs = [open_clip.get_pretrained_cfg(known, tag) for tag in tags]
    agreed = {
        key: cfgs[0][key]
        for key in ("mean", "std", "interpolation", "resize_mode")
        if cfgs and all(key in cfg and cfg[key] == cfgs[0][key] for cfg in cfgs)
    }
    return _Source(known_name=known, checkpoint=Path(pretrained), preprocess=agreed)


def _recorded_names(name: str, pretrained: str | None, source: _Source) -> tuple[str, str | None]:
    """Return the names of model and weights as files record them, with absolute paths."""
    if source.folder and name != EMBEDDED and not name.startswith(FOLDER):
        name = os.path.abspath(name)
    if source.checkpoint and pretrained != RANDOM:
        pretrained = os.path.abspath(source.checkpoint)
    return name, pretrained


def _why(name: str, pretrained: str | None, error: Exception) -> str:
    """Explain in one line why a model could not be loaded, and what to do."""
    what = f"{name} ({pretrained})" if pretrained else name
    chain = list(causes(error))
    if out_of_memory(error):
        return f"there is not enough memory to load {what}: free some, or choose a smaller model or another device"
    if name == EMBEDDED:
        return f"the model that is included in selftpt cannot be loaded: install selftpt again ({first_line(error)})"
    if any(isinstance(cause, ImportError) or "pip install" in str(cause) for cause in chain):
        return f"{name} needs a package that is not installed: pip install 'selftpt[hf]' ({first_line(error)})"
    for cause in chain:
        if isinstance(cause, hub.GatedRepoError):
            return f"{what} is gated: its terms must be accepted; accept them on the hub and run `hf auth login`"
        if isinstance(cause, hub.RepositoryNotFoundError | hub.HFValidationError):
            return f"the hub has no repository for {what}, or it is private: check the name, or run `hf auth login`"
        if isinstance(cause, hub.EntryNotFoundError) and not isinstance(cause, hub.LocalEntryNotFoundError):
            return f"the repository of {what} is not a model of open_clip: choose another ({first_line(cause)})"
    if any(_network(cause) for cause in chain):
        return (
            f"{what} could not be downloaded: check the connection, or download it on another machine and give its "
            f"folder as the model or its checkpoint file as the weights ({first_line(error)[:100]})"
        )
    return f"{what} cannot be loaded: {first_line(error)}"


def _network(error: BaseException) -> bool:
    kinds = (ConnectionError, TimeoutError, urllib.error.URLError, hub.HfHubHTTPError, hub.LocalEntryNotFoundError)
    return isinstance(error, kinds) or type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3"))


def _digest(clip: torch.nn.Module, config: Mapping[str, Any]) -> str:
    """Return a digest of the weights and of the configuration, which determine the features."""
    sha = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(clip.state_dict().items()):
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]
