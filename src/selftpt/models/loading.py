"""A frozen vision-language model by name, from open_clip: two towers, tokenizer, preprocessing, temperature."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch

from selftpt.config import Precision
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.models.model import PRECISIONS, RANDOM, Model, ModelId

EMBEDDED = "selftpt-tiny"  # comes with the package: docs/embedded-model.md
EMBEDDED_FILES = Path(__file__).parents[1] / "embedded"


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

    name: a name of open_clip (`selftpt.list_models`), "hf-hub:ORG/REPO", or a folder with open_clip_config.json;
    without one, the small model that comes with selftpt.
    pretrained: the name of its weights, a checkpoint file, or "random" (for tests and speed: answers mean nothing).
    device: cpu, cuda, mps; the best there is by default.
    precision: of the image tower, fp32, bf16 or fp16; the text tower, which runs once a class list, stays in fp32.
    """
    if precision not in PRECISIONS:
        raise SelfTPTError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    device = device or best_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SelfTPTError(f"the device {device!r} cannot be used here: choose of cpu, cuda, mps") from error
    source, quick, preprocess = _resolve(name, pretrained)
    random = pretrained == RANDOM
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            clip = open_clip.create_model(
                source,
                None if random else pretrained,
                load_weights=not random,
                force_quick_gelu=quick,
                force_preprocess_cfg=preprocess,
                pretrained_text=False,
                require_pretrained=not random,
            )
            tokenizer = open_clip.get_tokenizer(source)
        except ImportError as error:
            raise SelfTPTError(f"{name} needs a package that is not installed: pip install 'selftpt[hf]'") from error
        except Exception as error:
            raise SelfTPTError(_why(name, pretrained, error)) from error
    if source.startswith("local-dir:") and not random:
        pretrained = None
    config = {"quick_gelu": quick, **(open_clip.get_model_config(source) or {})}
    if name != EMBEDDED and os.path.isdir(name):
        name = os.path.abspath(name)
    if pretrained and os.path.isfile(pretrained):
        pretrained = os.path.abspath(pretrained)
    id = ModelId(name, pretrained, _digest(clip, {**config, "preprocess": clip.visual.preprocess_cfg}))
    return Model(clip, tokenizer, id, config["embed_dim"], device, precision)


def _resolve(name: str, pretrained: str | None) -> tuple[str, bool, dict[str, Any]]:
    """open_clip's name for a model, whether its weights want QuickGELU whatever the name says, and preprocessing that
    open_clip would not find: that of a checkpoint file is the one all published weights of the model agree on.
    """
    if name == EMBEDDED:
        if pretrained not in (None, RANDOM):
            raise SelfTPTError(f"{EMBEDDED} has weights of its own: name a model that has the weights {pretrained!r}")
        return f"local-dir:{EMBEDDED_FILES}", False, {}
    if name.startswith(("hf-hub:", "local-dir:")):
        return name, False, {}
    if os.path.isdir(name):
        if not (Path(name) / "open_clip_config.json").is_file():
            raise SelfTPTError(f"the folder {name} has no open_clip_config.json: it is not a model of open_clip")
        return f"local-dir:{name}", False, {}
    known = name.replace("/", "-")
    if known not in open_clip.list_models():
        near = difflib.get_close_matches(known, list_models(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise SelfTPTError(f"no model is called {name!r}: {hint}`selftpt models` lists them")
    tags = open_clip.list_pretrained_tags_by_model(known)
    if pretrained is None:
        published = ", ".join(tags) or "none are published"
        raise SelfTPTError(f"{name} needs weights: name them ({published}) or give a checkpoint file")
    if pretrained == RANDOM or os.path.isfile(pretrained):
        if pretrained != RANDOM and f"{known}-quickgelu" in open_clip.list_models():
            text = f"if {pretrained} holds weights of OpenAI or others trained with QuickGELU, name {known}-quickgelu"
            warnings.warn(text, SelfTPTWarning, stacklevel=3)
        cfgs = [open_clip.get_pretrained_cfg(known, tag) for tag in tags]
        agreed = {
            key: cfgs[0][key]
            for key in ("mean", "std", "interpolation", "resize_mode")
            if cfgs and all(key in cfg and cfg[key] == cfgs[0][key] for cfg in cfgs)
        }
        return known, False, agreed
    if pretrained not in tags and not open_clip.get_pretrained_cfg(known, pretrained):
        raise SelfTPTError(
            f"{name} has no weights {pretrained!r}, and there is no such file: choose of {', '.join(tags) or 'none'}"
        )
    return known, bool(open_clip.get_pretrained_cfg(known, pretrained).get("quick_gelu")), {}


def _why(name: str, pretrained: str | None, error: Exception) -> str:
    """One line on why a model could not be loaded, and what to do."""
    first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    if pretrained == RANDOM:
        return f"{name} cannot be built: {first}"
    if name == EMBEDDED:
        return f"the model that comes with selftpt cannot be loaded, install selftpt again: {first}"
    if pretrained and os.path.isfile(pretrained):
        return f"{pretrained} does not hold weights of {name}: {first}"
    if os.path.isdir(name.removeprefix("local-dir:")):
        return f"the model in {name} cannot be loaded: {first}"
    weights = f"the weights {pretrained!r} of {name}" if pretrained else name
    return (
        f"{weights} could not be downloaded: check the connection, or fetch the checkpoint on another machine "
        f"and give the file in place of the weights' name ({first[:100]})"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """open_clip logs to the root logger and sets it up in passing: keep both from our users."""
    root = logging.getLogger()
    handlers, before = root.handlers[:], logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        root.handlers[:] = handlers


def _digest(clip: torch.nn.Module, config: Mapping[str, Any]) -> str:
    """A digest of the weights and of what else decides the features."""
    sha = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(clip.state_dict().items()):
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]
