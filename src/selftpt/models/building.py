"""Builds models and tokenizers and loads weights with lower-level functions of open_clip.

`open_clip.create_model` and `open_clip.get_tokenizer` log with the root logger, which installs a handler on it, and
draw initial values from the global random state. The functions used here do neither.
"""

from __future__ import annotations

import errno
import pickle
import re
import threading
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict
from math import isqrt
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from open_clip.convert import convert_state_dict
from open_clip.model import convert_to_custom_text_state_dict
from open_clip.tokenizer import DEFAULT_CONTEXT_LENGTH, HFTokenizer, SigLipTokenizer, SimpleTokenizer
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from selftpt.errors import SelfTPTError

_BUILDING = threading.Lock()  # timm and transformers set global variables while they build a model

# The checkpoint files of a folder, in the order in which open_clip prefers them.
_CHECKPOINT_NAMES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.pth",
    "model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.pth",
    "model.pth",
)


class SeededRandomOps(TorchDispatchMode):
    """Context manager in which random operations of the current thread use their own generator.

    The values are those after `torch.manual_seed(seed)`. The global random state is neither read nor changed. Tensors
    that open_clip leaves uninitialised, such as a projection of CoCa's decoder, are zero.

    Args:
        seed: The seed of the generator.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            if all(argument.name != "generator" for argument in func._schema.arguments):
                func = func.overloadpacket.generator
            kwargs["generator"] = self.generator
        result = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.empty and result.is_floating_point():
            result.zero_()
        return result


def build_model(config: Mapping[str, Any], preprocess: Mapping[str, Any]) -> Any:
    """Build an open_clip model with random weights, which are the same every time.

    Args:
        config: open_clip's `model_cfg`; it is not changed.
        preprocess: The entries of `preprocess_cfg` that differ from open_clip's defaults.

    Returns:
        An `open_clip.CLIP`, `CustomTextCLIP` or `CoCa`.
    """
    parts = deepcopy(dict(config))
    if "timm_model_name" in parts["vision_cfg"]:
        parts["vision_cfg"]["timm_model_pretrained"] = False
    hf_text = "hf_model_name" in parts["text_cfg"]
    if hf_text:
        parts["text_cfg"]["hf_model_pretrained"] = False
    kind: Any = open_clip.CLIP
    if parts.pop("custom_text", False) or hf_text:
        kind = open_clip.CoCa if "multimodal_cfg" in parts else open_clip.CustomTextCLIP
    with _BUILDING, SeededRandomOps(0):
        model = kind(**parts)
    preprocess = merge_preprocess_dict(asdict(PreprocessCfg()), dict(preprocess))
    open_clip.set_model_preprocess_cfg(model, {**preprocess, "size": model.visual.image_size})
    return model


def build_tokenizer(config: Mapping[str, Any], known_name: str | None, folder: Path | None) -> Any:
    """Build the tokenizer of an open_clip model.

    Args:
        config: open_clip's `model_cfg`.
        known_name: open_clip's name of the model, if it has one; it identifies some SigLIP models.
        folder: The folder of a local model, which contains the files of its tokenizer.

    Returns:
        The open_clip tokenizer.

    Raises:
        SelfTPTError: The configuration requires code from its repository.
    """
    text = config["text_cfg"]
    length = text.get("context_length", DEFAULT_CONTEXT_LENGTH)
    options = text.get("tokenizer_kwargs", {})
    if options.get("trust_remote_code"):
        raise SelfTPTError(
            "the model's configuration requires code of its repository, which selftpt never runs: choose another model"
        )
    lower = (known_name or "").lower()
    with _BUILDING:
        if name := text.get("hf_tokenizer_name"):
            mode = text.get("tokenizer_mode")
            return HFTokenizer(folder or name, context_length=length, tokenizer_mode=mode, **options)
        if "siglip" in lower:
            variant = "gemma" if "siglip2" in lower else "mc4" if "i18n" in lower else "c4-en"
            return SigLipTokenizer(variant, context_length=length)
        return SimpleTokenizer(context_length=length, **options)


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint file in the folder of a model, chosen as open_clip does.

    Raises:
        SelfTPTError: The folder has no checkpoint file.
    """
    found = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pth"))
    if not found:
        raise SelfTPTError(f"the folder {folder} has no weights: put open_clip_model.safetensors into it")
    by_name = {path.name: path for path in found}
    named = [by_name[name] for name in _CHECKPOINT_NAMES if name in by_name]
    return (named or sorted(found, key=lambda path: path.suffix != ".safetensors"))[0]


def load_weights(model: Any, file: Path, name: str) -> None:
    """Load the weights of a checkpoint file into an open_clip model.

    Args:
        model: The model, whose weights are replaced.
        file: A .safetensors file, a .npz file of big_vision, or a file of `torch.save`, of which only tensors are
            unpickled.
        name: The name of the model in error messages.

    Raises:
        SelfTPTError: The file is damaged, contains objects other than tensors, or contains the weights of another
            architecture.
    """
    try:
        if file.suffix in (".npz", ".npy"):
            open_clip.load_checkpoint(model, str(file))
            return
        state = _as_open_clip(_read_state(file), model)
    except Exception as error:
        if out_of_memory(error):
            raise
        raise SelfTPTError(f"{file} cannot be read as weights of {name}: {_unreadable(error)}") from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        mismatch = _first_mismatch(model.state_dict(), state) or str(error).splitlines()[0]
        raise SelfTPTError(
            f"{file} does not contain weights of {name}: {mismatch}; choose the model that the weights belong to"
        ) from error


def _read_state(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        checkpoint: Any = load_file(file)
    else:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    state = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, dict) else checkpoint
    if not isinstance(state, dict) or not state or not all(isinstance(key, str) for key in state):
        raise ValueError("it contains no state dict")
    if next(iter(state)).startswith("module"):  # saved by DistributedDataParallel
        state = {key.removeprefix("module."): tensor for key, tensor in state.items()}
    return dict(state)


def _unreadable(error: Exception) -> str:
    if "TorchScript" in str(error):
        return "it is a TorchScript archive; save its state dict: torch.save(torch.jit.load(FILE).state_dict(), NEW)"
    if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
        return "it contains pickled objects, and only tensors are loaded; save only its state dict"
    return f"it is damaged or not a checkpoint; download it again ({first_line(error)})"


def _as_open_clip(state: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Convert a state dict of another library or an earlier version of open_clip to the names of this version."""
    state = convert_state_dict(model, state)
    if "positional_embedding" in state and not hasattr(model, "positional_embedding"):
        state = convert_to_custom_text_state_dict(state)
    if model.logit_bias is not None:
        state.setdefault("logit_bias", torch.zeros_like(model.logit_bias))
    for key in ("logit_scale", "logit_bias"):
        if key in state and getattr(model, key) is not None and state[key].numel() == 1:
            state[key] = state[key].reshape(getattr(model, key).shape)
    state.pop("text.transformer.embeddings.position_ids", None)  # no longer part of transformers' models
    _resize_positions(state, model)
    return state


def _resize_positions(state: dict[str, Tensor], model: Any) -> None:
    """Interpolate positional embeddings that were trained at another image size or context length."""
    image = state.get("visual.positional_embedding")
    if image is not None and hasattr(model.visual, "grid_size"):
        rows, columns = model.visual.grid_size
        if len(image) != 1 + rows * columns:
            side = isqrt(len(image) - 1)
            grid = image[1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
            grid = F.interpolate(grid, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
            state["visual.positional_embedding"] = torch.cat([image[:1], grid[0].flatten(1).t()])
    module, key = (model, "") if hasattr(model, "positional_embedding") else (model.text, "text.")
    key += "positional_embedding"
    wanted = getattr(module, "positional_embedding", None)
    if key in state and wanted is not None and len(state[key]) != len(wanted):
        resized = F.interpolate(state[key].t()[None], len(wanted), mode="linear", align_corners=False)
        state[key] = resized[0].t()


def _first_mismatch(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str | None:
    for key, tensor in wanted.items():
        if key not in state:
            return f"it has no tensor {key}"
        if state[key].shape != tensor.shape:
            return f"{key} has the shape {list(state[key].shape)} instead of {list(tensor.shape)}"
    return next((f"the model has no tensor {key}" for key in state if key not in wanted), None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, shortened to 200 characters."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of the cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error was caused by a lack of memory, on the host or on a GPU."""
    return any(
        isinstance(cause, MemoryError | torch.OutOfMemoryError)
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or (isinstance(cause, RuntimeError) and re.search("out of memory|allocate memory", str(cause)) is not None)
        for cause in causes(error)
    )
