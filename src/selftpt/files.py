"""Files of ours: safetensors with a JSON header, written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from selftpt.errors import SelfTPTError, SelfTPTWarning

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1


def cache_folder() -> Path:
    """The folder for features and adapted classifiers: $SELFTPT_CACHE, or selftpt in the user's cache folder.

    A user without a home folder, as in some containers, gets a private folder among the temporary files.

    Raises:
        SelfTPTError: The private folder exists and belongs to someone else, or others may write to it.
    """
    if chosen := os.environ.get("SELFTPT_CACHE"):
        return Path(chosen)
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent) / "selftpt"
    try:
        return Path.home() / ".cache" / "selftpt"
    except RuntimeError:
        pass
    user = os.getuid() if hasattr(os, "getuid") else None
    folder = Path(tempfile.gettempdir()) / ("selftpt" if user is None else f"selftpt-{user}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise SelfTPTError(
            f"cannot make the folder {folder}: {error.strerror}; set SELFTPT_CACHE to another"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or (user is not None and (found.st_uid != user or found.st_mode & 0o077)):
        raise SelfTPTError(f"{folder} is not a private folder of this user: set SELFTPT_CACHE to one that is")
    warnings.warn(
        f"there is no home folder: the cache is {folder}; set SELFTPT_CACHE to choose another",
        SelfTPTWarning,
        stacklevel=1,
    )
    return folder


def digest(*parts: object) -> str:
    """A short name for what is told by `parts`: the same for equal parts, on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is either the old one or the new one, whatever happens."""
    try:
        _check_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name[:32]}.{secrets.token_hex(4)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise SelfTPTError(f"cannot write {path}: {error.strerror or error}") from error


def write_after(path: Path, kept: int, content: bytes) -> None:
    """Write after the first `kept` bytes of a file; whatever stood there before goes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            file.truncate(kept)
            file.seek(0, os.SEEK_END)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SelfTPTError(f"cannot write {path}: {error.strerror or error}") from error


def append_line(path: Path, line: str) -> None:
    """Add a line to a file that other processes may add to as well; what a killed one left half-written goes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            with contextlib.suppress(ImportError):  # Windows has no such lock
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.seek(whole)
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SelfTPTError(f"cannot write {path}: {error.strerror or error}") from error


def check_writable(path: Path) -> None:
    """Refuse, before any work, an output that could not be written after it."""
    try:
        _check_file(path)
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise SelfTPTError(f"cannot write {path}: {folder} is not a folder")
        if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            raise SelfTPTError(f"cannot write {path}: no permission to write in {folder}")
    except OSError as error:
        raise SelfTPTError(f"cannot write {path}: {error.strerror or error}") from error


def _check_file(path: Path) -> None:
    """Refuse to put a file in the place of a folder, or of a device such as /dev/null."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no ordinary file"
        raise SelfTPTError(f"cannot write {path}: it is {what}; give the name of a file")


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a JSON header as one safetensors file."""
    import safetensors.torch  # and torch with it, which files without tensors do without

    whole = {"format": FORMAT, "kind": kind, **header}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, safetensors.torch.save(plain, {"selftpt": json.dumps(whole)}))


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file of ours of the given kind."""
    header, tensors = read_file(path)
    if header["kind"] != kind:
        raise SelfTPTError(f"{path} holds a {header['kind']}, not a {kind}")
    return header, tensors


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file of ours of any kind."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["selftpt"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if not isinstance(header, dict) or not {"format", "kind"} <= header.keys():
            raise ValueError("not a header of ours")
    except FileNotFoundError as error:
        raise SelfTPTError(f"{path} does not exist") from error
    except OSError as error:
        why = "it is a folder" if path.is_dir() else error.strerror or error
        raise SelfTPTError(f"cannot read {path}: {why}") from error
    except (SafetensorError, KeyError, ValueError) as error:
        raise SelfTPTError(f"{path} is not a file of selftpt, or it was cut short or damaged") from error
    if header["format"] != FORMAT:
        raise SelfTPTError(
            f"{path} has format {header['format']}, and this selftpt reads {FORMAT}: "
            "use the version that wrote it, or a newer one"
        )
    return header, tensors
