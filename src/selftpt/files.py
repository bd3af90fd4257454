"""Files: safetensors with a JSON header and digests, written atomically and verified when they are read.

A file may be untrusted or damaged. Everything in it is checked before it is used, and every problem is reported as a
`SelfTPTError` of one line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import stat
import tempfile
import typing
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from selftpt.errors import SelfTPTError, SelfTPTWarning

if TYPE_CHECKING:  # torch takes seconds to import, and files without tensors do not need it
    from torch import Tensor

FORMAT = 2  # format 1 has no digests
MAX_HEADER = 32 << 20  # bytes
MAX_SIZE = 8 << 30  # bytes of a file that is read into memory
MAX_DEPTH = 24  # of nested objects and lists in a header
DTYPES = {  # safetensors code: torch name
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
}  # fmt: skip
# Characters that must not be printed: control characters and surrogates, except the surrogates with which Python
# represents file names that are not UTF-8.
CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udc7f\udd00-\udfff]")


def cache_folder() -> Path:
    """Return the folder for cached features and classifiers: $SELFTPT_CACHE, or `selftpt` in the user's cache folder.

    Without a home folder, as in some containers, it is a private folder in the folder for temporary files.

    Raises:
        SelfTPTError: The private folder cannot be created, belongs to another user, or can be accessed by others.
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
            f"cannot create the folder {folder}: {error.strerror}; set SELFTPT_CACHE to another folder"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or (user is not None and (found.st_uid != user or found.st_mode & 0o077)):
        raise SelfTPTError(f"{folder} is not a private folder of this user: set SELFTPT_CACHE to another folder")
    warnings.warn(
        f"there is no home folder: the cache is {folder}; set SELFTPT_CACHE to choose another folder",
        SelfTPTWarning,
        stacklevel=1,
    )
    return folder


def digest(*parts: object) -> str:
    """Return a digest of values that JSON can represent: 32 hexadecimal digits, the same on every machine."""
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Raise a `SelfTPTError` if `path` is a folder or a device, or if writing in this context fails."""
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "not a regular file"
            raise SelfTPTError(f"cannot write {path}: it is {what}; give the name of a file")
        yield
    except OSError as error:
        raise SelfTPTError(f"cannot write {path}: {error.strerror or error}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: an interruption leaves either the old or the new content."""
    with _write_errors(path):
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


@contextlib.contextmanager
def _updating(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to change it in place, and create it if necessary. On exit, the changes are flushed to the disk."""
    with _write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


def write_after(path: Path, kept: int, content: bytes) -> None:
    """Replace everything after the first `kept` bytes of a file with `content`."""
    with _updating(path) as file:
        file.truncate(kept)
        file.seek(0, os.SEEK_END)
        file.write(content)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, safely with other processes that append to it. An incomplete last line is removed."""
    with _updating(path) as file:
        with contextlib.suppress(ImportError):  # Windows has no fcntl
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # held until the file is closed
        file.truncate(file.seek(file.read().rfind(b"\n") + 1))
        file.write(line.encode() + b"\n")


def check_writable(path: Path) -> None:
    """Check that a file can be written, so that a long computation does not fail at its end.

    Raises:
        SelfTPTError: The file cannot be written.
    """
    with _write_errors(path):
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise SelfTPTError(f"cannot write {path}: {folder} is not a folder")
        if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            raise SelfTPTError(f"cannot write {path}: no permission to write in {folder}")


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. A pipe or device is rejected at once, without waiting for its data.

    Raises:
        SelfTPTError: The file does not exist, is not a regular file, or cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags)
        mode = os.fstat(handle).st_mode
        if stat.S_ISREG(mode):
            return os.fdopen(handle, "rb")
        os.close(handle)
        why: object = "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file"
    except FileNotFoundError as error:
        raise SelfTPTError(f"{_printable(path)} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        why = getattr(error, "strerror", None) or error
    raise SelfTPTError(f"cannot read {_printable(path)}: {why}")


def set_aside(path: Path, why: object) -> None:
    """Rename a damaged file to `<name>.damaged` and warn. If it cannot be renamed, the warning says so.

    Args:
        path: The file. An older file of the new name is replaced.
        why: One line that names the file and says what is wrong with it.
    """
    aside = path.with_name(f"{path.name}.damaged")
    try:
        os.replace(path, aside)
        done = f"set aside as {_printable(Path(aside.name))}"
    except OSError as error:
        done = f"it could not be set aside ({error.strerror or error})"
    warnings.warn(f"{why}: {done}", SelfTPTWarning, stacklevel=3)


def parse_json(text: str) -> Any:
    """Parse untrusted JSON.

    Raises:
        ValueError: The text is not JSON, or it has NaN, an infinite number, an integer of more than 20 digits, an
            object with a repeated key, or more than `MAX_DEPTH` nested objects and lists.
    """
    try:
        value = json.loads(
            text, parse_constant=_finite, parse_float=_finite, parse_int=_integer, object_pairs_hook=_unique
        )
        level = [value]
        for _ in range(MAX_DEPTH + 1):
            nested = [
                item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
            ]
            level = [item for items in nested for item in items]
        if level:
            raise RecursionError
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    return value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:40]!a} is repeated")
        found[key] = value
    return found


@dataclass(frozen=True)
class Schema:
    """Required content of a kind of file, which is checked when a file is written and when it is read.

    Attributes:
        header: The type of each entry of the header: `int`, `float`, `bool`, `str` (without control characters), `list`
            or `dict` of anything, `X | None`, or a mapping that is the schema of an object. All entries are required,
            and no others are allowed.
        tensors: The dimensions of each tensor: `{"w": "E D", "b": "E"}`. A letter stands for the same size wherever it
            occurs. Tensors are float32, or int64 where the dimensions start with `I64`. The name `*` allows
            additional tensors. None allows any tensors.
        oldest: The oldest format that can be read; format 1 has no digests.
    """

    header: Mapping[str, Any]
    tensors: Mapping[str, str] | None = None
    oldest: int = 1

    def check(self, header: Mapping[str, Any]) -> dict[str, int]:
        """Check a header, including the shapes and data types of the tensors.

        Returns:
            The size of each dimension in `tensors`, by its letter.

        Raises:
            ValueError: The header does not follow the schema.
        """
        own = {key: value for key, value in header.items() if key not in ("format", "kind", "tensors")}
        _check_type(own, self.header, "the header")
        sizes: dict[str, int] = {}
        if self.tensors is None:
            return sizes
        listed = {name: dimensions for name, dimensions in self.tensors.items() if name != "*"}
        found = header["tensors"].keys()
        if not listed.keys() <= found or (found != listed.keys() and "*" not in self.tensors):
            raise ValueError(f"its tensors must be {', '.join(listed)}")
        for name, dimensions in listed.items():
            dtype, shape = header["tensors"][name]["dtype"], header["tensors"][name]["shape"]
            letters = dimensions.removeprefix("I64 ").split()
            wanted = "I64" if dimensions.startswith("I64 ") else "F32"
            fits = len(shape) == len(letters) and all(
                size > 0 and sizes.setdefault(letter, size) == size for letter, size in zip(letters, shape, strict=True)
            )
            if not fits:
                known = ", ".join(f"{letter} = {sizes[letter]}" for letter in letters if letter in sizes)
                expected = f"{dimensions} with {known}" if known else dimensions
                raise ValueError(f"the shape of {name} must be {expected}, not {shape}")
            if dtype != wanted:
                raise ValueError(f"{name} must be of {DTYPES[wanted]}, not of {DTYPES[dtype]}")
        return sizes


def _check_type(value: Any, kind: Any, where: str) -> None:
    """Raise a ValueError unless a JSON value has the type that a schema gives."""
    if isinstance(kind, Mapping):
        _check_type(value, dict, where)
        if missing := kind.keys() - value.keys():
            raise ValueError(f"{where} has no {min(missing)}")
        if unknown := value.keys() - kind.keys():
            raise ValueError(f"{where} has an unknown entry, {ascii(min(unknown))[:60]}")
        for key, part in kind.items():
            _check_type(value[key], part, key)
        return
    for option in typing.get_args(kind) or (kind,):
        if option is float and type(value) in (int, float):
            return
        if type(value) is option and (option is not str or not CONTROL.search(value)):
            return
    names = {"str": "a string in one line", "dict": "an object", "int": "an integer", "float": "a number"}
    expected = getattr(kind, "__name__", str(kind))
    raise ValueError(f"{where} must be {names.get(expected, expected)}, not {ascii(value)[:60]}")


def write_tensors(
    path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any], schema: Schema | None = None
) -> None:
    """Write tensors and a JSON header to a safetensors file, with digests of all its content.

    The metadata of the file has one key, `selftpt`. Its value is the SHA-256 digest of the header, a space, and the
    header, which contains the data type, shape and digest of each tensor. Equal content gives equal bytes.

    Args:
        path: The file.
        kind: The kind of file, such as "prompt".
        tensors: The tensors by name.
        header: Further entries of the header.
        schema: What the file must contain.

    Raises:
        SelfTPTError: The content does not follow the schema, or the file cannot be written.
    """
    import torch
    from safetensors.torch import save

    # Copies, because safetensors rejects tensors that share memory.
    copies = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    described = {name: _describe(tensor) for name, tensor in copies.items()}
    text = json.dumps({"format": FORMAT, "kind": kind, **header, "tensors": described})
    try:
        checked = parse_json(text)
        if schema:
            schema.check(checked)
            _check_finite(copies)
        content = save(copies, {"selftpt": f"{sha256(text.encode()).hexdigest()} {text}"})
        if (length := int.from_bytes(content[:8], "little")) > MAX_HEADER:
            raise ValueError(f"its header has {length} bytes, more than {MAX_HEADER}")
        if len(content) > MAX_SIZE:
            raise ValueError(f"it has {len(content)} bytes, more than {MAX_SIZE}")
    except ValueError as error:
        raise SelfTPTError(f"cannot write {path}: it would not be a valid {kind} file: {error}") from error
    write_atomically(path, content)


def read_tensors(
    path: Path, kind: str | None, schema: Schema | None = None, *, mapped: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and verify a file that `write_tensors` wrote.

    Args:
        path: The file.
        kind: The kind of file that is required; None allows any.
        schema: What the file must contain.
        mapped: Whether to memory-map the tensors, so that the file may be larger than memory. They are still verified,
            which reads them once. A file whose path is not UTF-8 cannot be mapped and is read instead.

    Returns:
        The header and the tensors. `header["tensors"]` has the data type, shape and digest of each tensor; files of
        format 1 have no digests.

    Raises:
        SelfTPTError: The file cannot be read, is damaged, or does not have the required kind or content.
    """
    with open_regular(path) as file, _read_errors(path, kind):
        header = _read_header(path, file, kind, schema)
        tensors = _read_data(path, file, header, mapped)
        if schema:
            _check_finite(tensors)
    return header, tensors


def read_header(path: Path, kind: str, schema: Schema | None = None) -> dict[str, Any]:
    """Read and verify the header of a file, as `read_tensors` does, without reading the tensors."""
    with open_regular(path) as file, _read_errors(path, kind):
        return _read_header(path, file, kind, schema)


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and verify the header and the tensors of a file of any kind."""
    return read_tensors(path, None)


def verify_file(path: Path) -> dict[str, Any]:
    """Read the header of a file of any kind, and verify the whole file by its digests, without importing torch.

    Returns:
        The header, as `read_tensors` returns it.

    Raises:
        SelfTPTError: The file cannot be read or is damaged.
    """
    with open_regular(path) as file, _read_errors(path, None):
        header = _read_header(path, file, None, None)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        layout = parse_json(file.read(length).decode())
        for name, entry in header["tensors"].items():
            place = layout.get(name, {})
            if any(place.get(key) != entry[key] for key in ("dtype", "shape")):
                raise _damaged(path, "it changed while it was read")
            begin, end = place["data_offsets"]
            file.seek(8 + length + begin)
            if "sha256" in entry and _digest_of(file, end - begin) != entry["sha256"]:
                raise _damaged(path, f"its tensor {ascii(name)[:60]} does not match its digest")
    return header


def _digest_of(file: IO[bytes], count: int) -> str:
    """Return the SHA-256 digest of the next `count` bytes of a file."""
    sha = sha256()
    while count and (part := file.read(min(count, 1 << 20))):
        sha.update(part)
        count -= len(part)
    return sha.hexdigest()


@contextlib.contextmanager
def _read_errors(path: Path, kind: str | None) -> Iterator[None]:
    """Turn errors of reading a file into a `SelfTPTError` of one line."""
    try:
        yield
    except SafetensorError as error:
        raise _damaged(path, "it changed while it was read") from error
    except ValueError as error:
        raise SelfTPTError(f"{_printable(path)} is not a valid {kind or 'selftpt'} file: {error}") from error
    except OSError as error:
        raise SelfTPTError(f"cannot read {_printable(path)}: {error.strerror or error}") from error
    except MemoryError as error:
        raise SelfTPTError(f"cannot read {_printable(path)}: it does not fit into memory") from error


def _damaged(path: Path, why: str) -> SelfTPTError:
    return SelfTPTError(f"{_printable(path)} is damaged ({why}): create it again or restore a copy")


def _read_header(path: Path, file: IO[bytes], kind: str | None, schema: Schema | None) -> dict[str, Any]:
    """Read and verify the header of a file."""
    try:
        if not 0 < int.from_bytes(file.read(8), "little") <= MAX_HEADER:
            raise ValueError("no header")
        with safe_open(path, framework="numpy") as opened:  # unlike "pt", it opens paths that are not UTF-8
            header_digest, brace, rest = opened.metadata()["selftpt"].partition("{")
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            layout = {name: {"dtype": s.get_dtype(), "shape": s.get_shape()} for name, s in slices.items()}
        header: dict[str, Any] = parse_json(text := brace + rest)
        format, found_kind = header["format"], header["kind"]
        if type(format) is not int or type(found_kind) is not str or CONTROL.search(found_kind):
            raise ValueError("no format or kind")
        if header_digest and format == FORMAT:
            for name, entry in layout.items():
                entry["sha256"] = str(header["tensors"][name]["sha256"])
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise SelfTPTError(
            f"{_printable(path)} is not a selftpt file, or is truncated or damaged: create it again or restore a copy"
        ) from error
    if not 1 <= format <= FORMAT:
        raise SelfTPTError(
            f"{_printable(path)} has format {format}, and this version of selftpt reads formats up to {FORMAT}: "
            "use the version that wrote it, or a newer one"
        )
    if not (format > 1) == bool(header_digest) == ("tensors" in header):
        raise _damaged(path, "it has no digest")
    if header_digest and header_digest != f"{sha256(text.encode()).hexdigest()} ":
        raise _damaged(path, "its header does not match its digest")
    for name, entry in layout.items():
        # A size of 0 counts as 1, because torch cannot represent a shape whose other sizes overflow.
        elements = math.prod(size or 1 for size in entry["shape"])
        if entry["dtype"] not in DTYPES or len(entry["shape"]) > 16 or elements >= 2**60:
            raise _damaged(path, f"its tensor {ascii(name)[:60]} cannot be read")
    if header.setdefault("tensors", layout) != layout:
        raise _damaged(path, "its tensors are not those of its header")
    if "meaningless" in header:  # the key of earlier versions
        header["random_init"] = header.pop("meaningless")
    if kind is not None and found_kind != kind:
        raise SelfTPTError(f"{_printable(path)} holds a {found_kind[:60]}, not a {kind}")
    if schema:
        if format < schema.oldest:
            raise ValueError(f"it has format {format}, which has no digests: create it again")
        schema.check(header)
    return header


def _read_data(path: Path, file: IO[bytes], header: Mapping[str, Any], mapped: bool) -> dict[str, Tensor]:
    """Read the tensors of a file and verify them by its header."""
    from safetensors.torch import load

    expected = header["tensors"]
    if mapped and str(path).encode(errors="replace").decode() == str(path):  # safetensors maps only UTF-8 paths
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in expected}
    elif (size := os.fstat(file.fileno()).st_size) > MAX_SIZE:
        raise ValueError(f"it has {size} bytes, more than {MAX_SIZE}")
    else:
        file.seek(0)
        tensors = load(file.read())
    for name, entry in expected.items():
        if name not in tensors or not entry.items() <= _describe(tensors[name]).items():
            raise _damaged(path, f"its tensor {ascii(name)[:60]} does not match its digest")
    return {name: tensors[name] for name in expected}


def _describe(tensor: Tensor) -> dict[str, Any]:
    """Return the entry of a tensor in a header."""
    import torch

    codes = {getattr(torch, name): code for code, name in DTYPES.items()}
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    return {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "sha256": sha256(data).hexdigest()}


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{ascii(name)[:60]} has values that are not finite")


def _printable(path: Path) -> str:
    """Return a path for a message, escaped if it contains characters that must not be printed."""
    return ascii(str(path)) if CONTROL.search(str(path)) else str(path)
