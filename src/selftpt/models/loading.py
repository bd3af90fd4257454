"""A frozen vision-language model by name, from open_clip: two towers, tokenizer, preprocessing, temperature."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import urllib.error
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import open_clip
import torch
from huggingface_hub import errors as hub
from open_clip.pretrained import download_pretrained_from_hf

from selftpt.config import Precision
from selftpt.errors import SelfTPTError, SelfTPTWarning
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

EMBEDDED = "selftpt-tiny"  # comes with the package: docs/embedded-model.md
EMBEDDED_FILES = Path(__file__).parents[1] / "embedded"
HUB, FOLDER = "hf-hub:", "local-dir:"
CONFIG_FILE = "open_clip_config.json"


@dataclass(frozen=True)
class _Source:
    """Where the parts of a model come from: a folder, a repository of the hub, or open_clip's own tables.

    known_name: open_clip's name of the architecture, if that is where it comes from.
    published: open_clip's entry for published weights, with where they are and the preprocessing they need.
    preprocess: preprocessing for weights that open_clip does not know.
    """

    folder: Path | None = None
    repository: str | None = None
    known_name: str | None = None
    published: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    preprocess: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Architecture and preprocessing, `model_cfg` and `preprocess_cfg` of open_clip."""
        if self.known_name:
            quick_gelu = bool(self.published.get("quick_gelu"))
            known = {"quick_gelu": quick_gelu, **open_clip.get_model_config(self.known_name)}
            return known, self.published or self.preprocess
        if self.repository:
            file = Path(download_pretrained_from_hf(self.repository, filename=CONFIG_FILE))
        else:
            assert self.folder is not None
            file = self.folder / CONFIG_FILE
        try:
            whole = json.loads(file.read_text(encoding="utf-8"))
            return {"quick_gelu": False, **whole["model_cfg"]}, whole.get("preprocess_cfg", {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SelfTPTError(f"{file} is no configuration of an open_clip model: {first_line(error)}") from error

    def weights(self) -> Path:
        """The checkpoint file, downloaded if need be."""
        if self.checkpoint:
            return self.checkpoint
        if self.folder:
            return find_checkpoint(self.folder)
        if self.repository:
            return Path(download_pretrained_from_hf(self.repository))
        return Path(open_clip.download_pretrained(self.published))


def list_models() -> dict[str, list[str]]:
    """The embedded model, with no weights to choose, and every model of open_clip with the names of its weights."""
    return {EMBEDDED: [], **{name: open_clip.list_pretrained_tags_by_model(name) for name in open_clip.list_models()}}


def best_device() -> str:
    """`cuda` or `mps` where there is one, else `cpu`."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def load_model(
    name: str = EMBEDDED, pretrained: str | None = None, *, device: str | None = None, precision: Precision = "fp32"
) -> Model:
    """Load a frozen model.

    Args:
        name: A name of open_clip (`selftpt.list_models`), "hf-hub:ORG/REPO", or a folder with open_clip_config.json;
            by default the small model that comes with selftpt.
        pretrained: The name of its weights, a checkpoint file, or "random" (for tests and measurements of speed: the
            predictions mean nothing).
        device: cpu, cuda or mps; by default the best one available.
        precision: Of the image tower: fp32, bf16 or fp16. The text tower, which runs once per class list, stays fp32.

    Raises:
        SelfTPTError: The model cannot be loaded; the message says why and what to do.
    """
    if precision not in PRECISIONS:
        raise SelfTPTError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    device = device or best_device()
    check_device(device)
    source = _find(name, pretrained)
    try:
        # Inference tensors could not be trained with later; a default device must not change the random weights.
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
    """Load the model that a file names, if that is safe: the embedded one or weights that open_clip publishes.

    A file from someone else must not decide that a folder of this machine or an arbitrary repository is loaded.

    Args:
        model_id: The model that the file was made with.
        what: The file, for the error message, such as "the classifier c.safetensors".
        device: See `load_model`.
        precision: See `load_model`.

    Raises:
        SelfTPTError: The model must be named by the user, or cannot be loaded.
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
    """A text of a file as it is, or escaped if it holds what could disturb a terminal or a shell."""
    return text if text.isprintable() and not set(text) & set("'\"\\$`;|&<>") else repr(text)


def _find(name: str, pretrained: str | None) -> _Source:
    """Where a model comes from. Names that open_clip knows have precedence over folders and files of the same name."""
    if name == EMBEDDED:
        if pretrained not in (None, RANDOM):
            raise SelfTPTError(f"{EMBEDDED} has weights of its own: name a model that has the weights {pretrained!r}")
        return _Source(folder=EMBEDDED_FILES)
    known = name.replace("/", "-")
    if known in open_clip.list_models():
        return _find_known(name, known, pretrained)
    if name.startswith(HUB):
        source = _Source(repository=name.removeprefix(HUB))
    else:
        folder = Path(name.removeprefix(FOLDER))
        if not name or not os.path.isdir(folder):  # also of a name that no path can have
            near = difflib.get_close_matches(known, list_models(), n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}? " if near else ""
            raise SelfTPTError(f"no model is called {name!r}: {hint}`selftpt models` lists them")
        if not (folder / CONFIG_FILE).is_file():
            raise SelfTPTError(f"the folder {folder} has no {CONFIG_FILE}: it is not a model of open_clip")
        source = _Source(folder=folder)
    if pretrained not in (None, RANDOM):
        raise SelfTPTError(f"{name} has weights of its own: leave the weights {pretrained!r} out")
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
        text = f"if {pretrained} holds weights of OpenAI or others trained with QuickGELU, name {known}-quickgelu"
        warnings.warn(text, SelfTPTWarning, stacklevel=4)
    # A file does not say its preprocessing: take what all published weights of the model agree on.
    cfgs = [open_clip.get_pretrained_cfg(known, tag) for tag in tags]
    agreed = {
        key: cfgs[0][key]
        for key in ("mean", "std", "interpolation", "resize_mode")
        if cfgs and all(key in cfg and cfg[key] == cfgs[0][key] for cfg in cfgs)
    }
    return _Source(known_name=known, checkpoint=Path(pretrained), preprocess=agreed)


def _recorded_names(name: str, pretrained: str | None, source: _Source) -> tuple[str, str | None]:
    """Name and weights as files record them: paths are absolute."""
    if source.folder and name != EMBEDDED and not name.startswith(FOLDER):
        name = os.path.abspath(name)
    if source.checkpoint and pretrained != RANDOM:
        pretrained = os.path.abspath(source.checkpoint)
    return name, pretrained


def _why(name: str, pretrained: str | None, error: Exception) -> str:
    """One line on why a model could not be loaded, and what to do."""
    what = f"{name} ({pretrained})" if pretrained else name
    chain = list(causes(error))
    if out_of_memory(error):
        return f"there is not enough memory to load {what}: free some, or choose a smaller model or another device"
    if name == EMBEDDED:
        return f"the model that comes with selftpt cannot be loaded, install selftpt again: {first_line(error)}"
    if any(isinstance(cause, ImportError) or "pip install" in str(cause) for cause in chain):
        return f"{name} needs a package that is not installed: pip install 'selftpt[hf]' ({first_line(error)})"
    for cause in chain:
        if isinstance(cause, hub.GatedRepoError):
            return f"{what} is only for users who accepted its terms: accept them on the hub and run `hf auth login`"
        if isinstance(cause, hub.RepositoryNotFoundError | hub.HFValidationError):
            return f"the hub has no repository for {what}, or it is private: check the name, or run `hf auth login`"
        if isinstance(cause, hub.EntryNotFoundError) and not isinstance(cause, hub.LocalEntryNotFoundError):
            return f"the repository of {what} is not a model of open_clip: {first_line(cause)}"
    if any(_network(cause) for cause in chain):
        return (
            f"{what} could not be downloaded: check the connection, or fetch it on another machine and give the "
            f"folder as the model, or the checkpoint file as the weights ({first_line(error)[:100]})"
        )
    return f"{what} cannot be loaded: {first_line(error)}"


def _network(error: BaseException) -> bool:
    kinds = (ConnectionError, TimeoutError, urllib.error.URLError, hub.HfHubHTTPError, hub.LocalEntryNotFoundError)
    return isinstance(error, kinds) or type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3"))


def _digest(clip: torch.nn.Module, config: Mapping[str, Any]) -> str:
    """A digest of the weights and of what else decides the features."""
    sha = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(clip.state_dict().items()):
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]
