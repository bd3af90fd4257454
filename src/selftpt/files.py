"""Files: safetensors with a JSON header and digests, written atomically and verified when they are read.

A file may come from anybody or have been damaged on the way: everything in it is checked before it is used, and what is
wrong with it is said in one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import stat
import typing
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from selftpt.errors import SelfTPTError, SelfTPTWarning

if TYPE_CHECKING:  # files without tensors do without torch
    from torch import Tensor

FORMAT = 2  # 1 has no digests
MAX_HEADER = 32 << 20  # bytes
MAX_DATA = 4 << 30  # bytes that are read into memory
MAX_DEPTH = 24  # of objects and lists inside each other in a header
DTYPES = {  # of safetensors: the name in torch, and bytes
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
}
# Control characters, and surrogates other than those of file names that are not UTF-8: not to be shown in a line.
CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udc7f\udd00-\udfff]")


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
        _check_file(path)
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
        _check_file(path)
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


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; refuse a folder, pipe, socket or device without waiting for it.

    Raises:
        SelfTPTError: There is no such file, it is no regular file, or it may not be read.
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
        raise SelfTPTError(f"{_shown(path)} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        why = getattr(error, "strerror", None) or error
    raise SelfTPTError(f"cannot read {_shown(path)}: {why}")


def set_aside(path: Path, why: object) -> None:
    """Rename a damaged file to `<name>.damaged`, in place of an older one, and warn; failure to rename is no error.

    Args:
        path: The file, which whoever calls this goes on without.
        why: One line that names the file and says what is wrong with it.
    """
    aside = path.with_name(f"{path.name}.damaged")
    try:
        os.replace(path, aside)
        done = f"set aside as {_shown(Path(aside.name))}"
    except OSError as error:
        done = f"it could not be set aside ({error.strerror or error})"
    warnings.warn(f"{why}: {done}", SelfTPTWarning, stacklevel=3)


def parse_json(text: str) -> Any:
    """Parse JSON of unknown origin.

    Raises:
        ValueError: It is not JSON, or it has NaN, an infinite number, an integer of more than 20 digits, an object
            with a repeated key, or more than `MAX_DEPTH` objects and lists inside each other.
    """
    try:
        value = json.loads(
            text, parse_constant=_finite, parse_float=_finite, parse_int=_integer, object_pairs_hook=_unique
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [value], 0
    while level := [
        part
        for whole in level
        if isinstance(whole, dict | list)
        for part in (whole.values() if isinstance(whole, dict) else whole)
    ]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
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
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key is repeated")
    return found


@dataclass(frozen=True)
class Schema:
    """What a kind of file has to hold: it is checked when a file is written and when it is read.

    Args:
        header: The type of each entry of the header, all of which are needed and no others allowed: `int`, `float`,
            `bool`, `str` (that can be shown in one line), `list` or `dict` of anything, `X | None`, or a mapping that
            is the schema of an object.
        tensors: The dimensions of each tensor, all of which are float32: `{"w": "E D", "b": "E"}`; a letter stands for
            the same size wherever it occurs. None allows any tensors.
        oldest: The oldest format that is read; format 1 has no digests.
    """

    header: Mapping[str, Any]
    tensors: Mapping[str, str] | None = None
    oldest: int = 1

    def check(self, header: Mapping[str, Any]) -> dict[str, int]:
        """Check a header with what it says of the tensors.

        Returns:
            The size of each dimension that `tensors` names.

        Raises:
            ValueError: The header does not follow the schema.
        """
        own = {key: value for key, value in header.items() if key not in ("format", "kind", "tensors")}
        _check_type(own, self.header, "the header")
        sizes: dict[str, int] = {}
        if self.tensors is None:
            return sizes
        if header["tensors"].keys() != self.tensors.keys():
            raise ValueError(f"its tensors must be {', '.join(self.tensors)}")
        for name, dimensions in self.tensors.items():
            dtype, shape = header["tensors"][name]["dtype"], header["tensors"][name]["shape"]
            letters = dimensions.split()
            fits = len(shape) == len(letters) and all(
                size > 0 and sizes.setdefault(letter, size) == size for letter, size in zip(letters, shape, strict=True)
            )
            if not fits:
                known = ", ".join(f"{letter} = {sizes[letter]}" for letter in letters if letter in sizes)
                told = f"{dimensions} with {known}" if known else dimensions
                raise ValueError(f"the shape of {name} must be {told}, not {shape}")
            if dtype != "F32":
                raise ValueError(f"{name} must be of float32, not of {DTYPES[dtype][0]}")
        return sizes


def _check_type(value: Any, kind: Any, where: str) -> None:
    """Raise ValueError unless a value of JSON has the type that a schema gives."""
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
    told = getattr(kind, "__name__", str(kind))
    raise ValueError(f"{where} must be {names.get(told, told)}, not {ascii(value)[:60]}")


def write_tensors(
    path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any], schema: Schema | None = None
) -> None:
    """Write tensors and a JSON header as one safetensors file, with digests of all its content.

    The metadata of the file has the header, which holds the data type, shape and SHA-256 digest of each tensor, under
    the key `selftpt` and the digest of the header under `sha256`.

    Raises:
        SelfTPTError: The content does not follow the schema, or the file cannot be written.
    """
    import torch

    names = {getattr(torch, name): code for code, (name, _) in DTYPES.items()}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = {name: tensor.reshape(-1).view(torch.uint8).numpy().data for name, tensor in plain.items()}
    told = {
        name: {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "sha256": _sha256(data[name])}
        for name, tensor in plain.items()
    }
    text = json.dumps({"format": FORMAT, "kind": kind, **header, "tensors": told})
    layout: dict[str, Any] = {"__metadata__": {"selftpt": text, "sha256": _sha256(text.encode())}}
    end = 0
    order = sorted(plain, key=lambda name: (-plain[name].element_size(), name))  # so that each is aligned
    for name in order:
        start, end = end, end + len(data[name])
        layout[name] = {"dtype": told[name]["dtype"], "shape": told[name]["shape"], "data_offsets": [start, end]}
    head = json.dumps(layout).encode()
    head += b" " * (-len(head) % 8)
    try:
        checked = parse_json(text)
        if len(head) > MAX_HEADER:
            raise ValueError(f"its header has {len(head)} bytes, more than {MAX_HEADER}")
        if schema:
            schema.check(checked)
            _check_finite(plain)
    except ValueError as error:
        raise SelfTPTError(f"cannot write {path}, which would not be a valid {kind} file: {error}") from error
    write_whole(path, b"".join([len(head).to_bytes(8, "little"), head, *(data[name] for name in order)]))


def read_tensors(
    path: Path, kind: str, schema: Schema | None = None, *, mapped: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and verify a file that `write_tensors` wrote.

    Args:
        path: The file.
        kind: The kind that it must be of.
        schema: What it must hold.
        mapped: Whether the tensors are mapped into memory, for files that need not fit. They are still verified, for
            which they are read once.

    Returns:
        The header, whose `tensors` are the data type, shape and digest of each (the digest is not in a file of format
        1, which has none), and the tensors.

    Raises:
        SelfTPTError: The file cannot be read, is damaged, or is not what it has to be.
    """
    with open_regular(path) as file, _one_line(path, kind):
        start, header, spans = _read_header(path, file, kind, schema)
        tensors = _read_data(file, start, header, spans, mapped)
        if schema:
            _check_finite(tensors)
    return header, tensors


def read_header(path: Path, kind: str, schema: Schema | None = None) -> dict[str, Any]:
    """The verified header of a file, as `read_tensors` returns it; the tensors are not read."""
    with open_regular(path) as file, _one_line(path, kind):
        return _read_header(path, file, kind, schema)[1]


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file of any kind, verified by its digests."""
    with open_regular(path) as file, _one_line(path):
        start, header, spans = _read_header(path, file)
        return header, _read_data(file, start, header, spans)


class _DamagedError(ValueError):
    """Content that is not what was written, as opposed to a file that never was valid."""


@contextlib.contextmanager
def _one_line(path: Path, kind: str = "selftpt") -> Iterator[None]:
    """Say in one line what is wrong with a file."""
    try:
        yield
    except _DamagedError as error:
        raise SelfTPTError(f"{_shown(path)} is damaged ({error}): make it again or take a copy") from error
    except ValueError as error:
        raise SelfTPTError(f"{_shown(path)} is not a valid {kind} file: {error}") from error
    except OSError as error:
        raise SelfTPTError(f"cannot read {_shown(path)}: {error.strerror or error}") from error
    except MemoryError as error:
        raise SelfTPTError(f"cannot read {_shown(path)}: it does not fit into memory") from error


Span = tuple[int, int]  # where the bytes of a tensor are in the data of a file


def _read_header(
    path: Path, file: IO[bytes], kind: str | None = None, schema: Schema | None = None
) -> tuple[int, dict[str, Any], dict[str, Span]]:
    """Where the data of a file begins, its verified header, and where each tensor is in the data."""
    size = os.fstat(file.fileno()).st_size
    try:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(MAX_HEADER, size - 8):
            raise ValueError("the header is longer than the file")
        layout = parse_json(file.read(length).decode())
        metadata = layout.pop("__metadata__")
        text = metadata["selftpt"]
        header = parse_json(text)
        format, found_kind = header["format"], header["kind"]
        if type(format) is not int or type(found_kind) is not str or CONTROL.search(found_kind):
            raise ValueError("no format or kind")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SelfTPTError(f"{_shown(path)} is not a file of selftpt, or it was cut short or damaged") from error
    if not 1 <= format <= FORMAT:
        raise SelfTPTError(
            f"{_shown(path)} has format {format}, and this selftpt reads {FORMAT}: "
            "use the version that wrote it, or a newer one"
        )
    if metadata.keys() != ({"selftpt"} if format == 1 else {"selftpt", "sha256"}) or ("tensors" in header) != (
        format > 1
    ):
        raise _DamagedError("it has no digest")
    if format > 1 and metadata["sha256"] != _sha256(text.encode()):
        raise _DamagedError("its header does not match its digest")
    told, spans = _spans(layout, size - 8 - length)
    if format == 1:
        header["tensors"] = told
    elif not isinstance(header["tensors"], dict) or told != {
        name: _without_digest(entry) for name, entry in header["tensors"].items()
    }:
        raise _DamagedError("its tensors are not those of its header")
    if kind is not None and found_kind != kind:
        raise SelfTPTError(f"{_shown(path)} holds a {found_kind[:60]}, not a {kind}")
    if schema:
        if format < schema.oldest:
            raise ValueError(f"it has format {format}, which has no digests: make it again")
        schema.check(header)
    return 8 + length, header, spans


def _without_digest(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
        raise _DamagedError("a tensor has no digest")
    return {key: value for key, value in entry.items() if key != "sha256"}


def _spans(layout: Mapping[str, Any], size: int) -> tuple[dict[str, dict[str, Any]], dict[str, Span]]:
    """Data type, shape and place of each tensor, as the layout has them; together they fill `size` bytes."""
    told, spans = {}, {}
    for name, entry in layout.items():
        try:
            _check_type(entry, {"dtype": str, "shape": list, "data_offsets": list}, "a tensor")
            dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)) or len(shape) > 16:
                raise ValueError("sizes must be positive integers")
            width = DTYPES[dtype][1]
            # Without the zeros, as no library can hold a shape whose other sizes overflow.
            if math.prod(number or 1 for number in shape) * width >= 2**62 or start % width:
                raise ValueError("too large, or not aligned")
            if math.prod(shape) * width != stop - start:
                raise ValueError("its shape is not that of its data")
        except (ValueError, KeyError) as error:
            raise _DamagedError(f"its tensor {ascii(name)[:60]} cannot be read") from error
        told[name], spans[name] = {"dtype": dtype, "shape": shape}, (start, stop)
    end = 0
    for start, stop in sorted(spans.values()):
        if start != end:
            raise _DamagedError("its tensors overlap or leave gaps")
        end = stop
    if end != size:
        what = "it was cut short" if size < end else "something was added to it"
        raise _DamagedError(f"{what}: it has {size} bytes of data instead of {end}")
    return told, spans


def _read_data(
    file: IO[bytes], start: int, header: Mapping[str, Any], spans: Mapping[str, Span], mapped: bool = False
) -> dict[str, Tensor]:
    """The tensors of a file, verified by the digests of its header."""
    import torch

    size = max((stop for _, stop in spans.values()), default=0)
    data: bytearray | mmap.mmap
    if mapped:
        data = mmap.mmap(file.fileno(), start + size, access=mmap.ACCESS_COPY)
    elif size > MAX_DATA:
        raise ValueError(f"its tensors have {size} bytes, more than {MAX_DATA}")
    else:
        file.seek(start)
        data, start = bytearray(size), 0
        if file.readinto(data) != size:  # type: ignore[attr-defined]
            raise _DamagedError("it was cut short while it was read")
    tensors = {}
    for name, (begin, end) in spans.items():
        entry = header["tensors"][name]
        if "sha256" in entry and _sha256(memoryview(data)[start + begin : start + end]) != entry["sha256"]:
            raise _DamagedError(f"its tensor {ascii(name)[:60]} does not match its digest")
        dtype_name, width = DTYPES[entry["dtype"]]
        dtype, count = getattr(torch, dtype_name), (end - begin) // width
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin) if count else None
        tensors[name] = torch.empty(entry["shape"], dtype=dtype) if flat is None else flat.view(entry["shape"])
    return tensors


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{ascii(name)[:60]} has values that are not finite")


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _shown(path: Path) -> str:
    """A path in one line."""
    return ascii(str(path)) if CONTROL.search(str(path)) else str(path)
