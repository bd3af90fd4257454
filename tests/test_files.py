"""Tests of `selftpt.files`: files are written atomically, and verified when they are read."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selftpt import files
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.files import (
    FORMAT,
    Schema,
    append_line,
    cache_folder,
    check_writable,
    digest,
    parse_json,
    read_file,
    read_header,
    read_tensors,
    set_aside,
    write_after,
    write_atomically,
    write_tensors,
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = tmp_path / "a.safetensors"
    write_tensors(file, "thing", {"t": torch.randn(20, 5), "u": torch.arange(7)}, {"names": ["cat", "dog"]})
    return file


def refused(path: Path, *words: str, kind: str = "thing") -> None:
    """Check that a file is refused with one line that names it."""
    with pytest.raises(SelfTPTError) as caught:
        read_tensors(path, kind)
    text = str(caught.value)
    assert "\n" not in text
    for word in (str(path), *words):
        assert word in text


def unwritable(path: Path, *words: str, content: bytes = b"new") -> None:
    with pytest.raises(SelfTPTError) as caught:
        write_atomically(path, content)
    text = str(caught.value)
    assert "\n" not in text
    for word in (f"cannot write {path}", *words):
        assert word in text


# Writing and reading


def test_tensors_and_header_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "a.safetensors"
    tensors = {
        "weights": torch.randn(3, 4),
        "across": torch.arange(6.0).view(2, 3).t(),
        "half": torch.randn(2).bfloat16(),
        "learned": torch.ones(2, requires_grad=True),
        "none": torch.empty(0, 5),
        "Größe": torch.tensor(7),
    }
    header = {"names": ["Éléphant", "猫", "a\nb", '"{}"'], "scale": 14.3, "origin": {"seed": 1, "none": None}}
    write_tensors(file, "thing", tensors, header)
    found, back = read_tensors(file, "thing")
    tensor_entries = found.pop("tensors")
    assert found == {"format": FORMAT, "kind": "thing", **header}
    assert {name: entry["shape"] for name, entry in tensor_entries.items()} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor.detach())
    assert read_file(file)[0] == read_header(file, "thing") == {**found, "tensors": tensor_entries}
    mapped = read_tensors(file, "thing", mapped=True)[1]
    assert all(torch.equal(mapped[name], back[name]) for name in tensors)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(st.characters(), max_size=20))
def test_any_text_round_trips_in_a_header(tmp_path: Path, name: str) -> None:
    """Also lone surrogates, which occur in file names that are not UTF-8."""
    write_tensors(tmp_path / "a", "thing", {"t": torch.zeros(1)}, {"name": name})
    assert read_file(tmp_path / "a")[0]["name"] == name


def test_file_name_that_is_not_utf8_round_trips_in_a_header(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    write_tensors(tmp_path / "a", "thing", {"t": torch.zeros(1)}, {"name": name})
    assert read_file(tmp_path / "a")[0]["name"] == name


def test_files_are_plain_safetensors_with_digests(tmp_path: Path) -> None:
    """The safetensors library reads them, and the digests can be verified with any SHA-256 implementation."""
    tensors = {"t": torch.arange(3), "half": torch.randn(3).half(), "byte": torch.arange(5).byte(), "u": torch.rand(2)}
    write_tensors(tmp_path / "a", "thing", tensors, {"more": 1})
    with safetensors.safe_open(tmp_path / "a", framework="pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"selftpt"}, "the library writes several keys in a random order"
    header_digest, text = metadata["selftpt"].split(" ", 1)
    assert header_digest == hashlib.sha256(text.encode()).hexdigest()
    header = json.loads(text)
    assert {key: header[key] for key in ("format", "kind", "more")} == {"format": FORMAT, "kind": "thing", "more": 1}
    loaded = safetensors.torch.load_file(tmp_path / "a")
    assert loaded.keys() == tensors.keys() == header["tensors"].keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert header["tensors"][name]["sha256"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_tensors_that_share_memory_round_trip(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    write_tensors(tmp_path / "a", "thing", {"whole": whole, "same": whole, "part": whole[2:4]}, {})
    found = read_file(tmp_path / "a")[1]
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["same"], whole)
    assert torch.equal(found["part"], whole[2:4])


def test_tensors_do_not_depend_on_the_file_unless_they_are_mapped(written: Path) -> None:
    def is_mapped() -> bool:
        return str(written) in Path("/proc/self/maps").read_text()

    expected = read_file(written)[1]
    mapped = read_tensors(written, "thing", mapped=True)[1]
    if Path("/proc/self/maps").exists():
        assert is_mapped()
    assert all(torch.equal(mapped[name], tensor) for name, tensor in expected.items())
    del mapped
    copies = {name: tensor.clone() for name, tensor in expected.items()}
    if Path("/proc/self/maps").exists():
        assert not is_mapped()
    written.write_bytes(b"")
    assert all(torch.equal(expected[name], copy) for name, copy in copies.items())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such paths")
def test_path_that_is_not_utf8_can_be_written_and_read(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"caf\xe9") / "a"
    write_tensors(file, "thing", {"t": torch.arange(3.0)}, {})
    assert read_header(file, "thing")["tensors"]["t"]["shape"] == [3]
    for mapped in (False, True):
        assert torch.equal(read_tensors(file, "thing", mapped=mapped)[1]["t"], torch.arange(3.0))


def test_new_file_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_atomically(file, b"old")
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_temporary_file_is_complete_and_in_the_target_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename is atomic only within a file system."""
    moved = []

    def replace(old: str, new: Path) -> None:
        moved.append((Path(old).parent, Path(old).read_bytes(), new))

    monkeypatch.setattr(os, "replace", replace)
    write_atomically(tmp_path / "a", b"new")
    assert moved == [(tmp_path, b"new", tmp_path / "a")]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", b"")
        (tmp_path / "b").touch()
    finally:
        assert os.umask(before) == 0o027
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_longest_possible_file_name_is_written(tmp_path: Path) -> None:
    file = tmp_path / ("x" * 255)
    check_writable(file)
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"


# Errors while writing


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(("module", "step"), [(os, "fsync"), (os, "replace")])
def test_failed_write_leaves_the_folder_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str, exists: bool
) -> None:
    file = tmp_path / "a"
    if exists:
        file.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, step, full)
    unwritable(file, "No space left on device")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([b"old"] if exists else [])


def test_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"old")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_file_size_limit_leaves_the_old_file(tmp_path: Path) -> None:
    """A real error in the middle of a write: the process may write files of at most one kilobyte."""
    pytest.importorskip("resource")
    file = tmp_path / "a"
    file.write_bytes(b"old")
    code = (
        "import resource, sys, pathlib, selftpt.files as files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        "try:\n"
        "    files.write_atomically(pathlib.Path(sys.argv[1]), bytes(5000))\n"
        "except files.SelfTPTError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"cannot write {file}: {os.strerror(errno.EFBIG)}"
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_invalid_output_paths_are_refused(tmp_path: Path) -> None:
    """A folder, a path below a file, a long name or a pipe is refused by `check_writable` and by writing."""
    plain, pipe = tmp_path / "plain.txt", tmp_path / "pipe"
    plain.write_bytes(b"old")
    os.mkfifo(pipe)
    (tmp_path / "folder").mkdir()
    for path, word in (
        (tmp_path / "folder", "a folder"),
        (plain / "x.safetensors", ""),
        (plain / "deep" / "x.safetensors", ""),
        (tmp_path / ("x" * 256), "too long"),
        (pipe, "not a regular file"),
    ):
        unwritable(path, word)
        with pytest.raises(SelfTPTError, match="cannot write") as caught:
            check_writable(path)
        assert str(path) in str(caught.value)
        assert word in str(caught.value)
    with pytest.raises(SelfTPTError, match=r"plain\.txt is not a folder"):
        check_writable(plain / "deep" / "x.safetensors")
    assert plain.read_bytes() == b"old"
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe", "plain.txt"]


def test_check_writable_accepts_valid_paths_and_creates_nothing(tmp_path: Path) -> None:
    """Existing files, new files and files in new folders are valid."""
    (tmp_path / "there").write_bytes(b"old")
    check_writable(tmp_path / "there")
    check_writable(tmp_path / "new")
    check_writable(tmp_path / "new" / "folder" / "file")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_check_writable_refuses_paths_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder or the existing file is not writable."""
    file = tmp_path / "a"
    file.touch()
    for locked in (tmp_path, file):
        monkeypatch.setattr(os, "access", lambda path, mode, locked=locked: path != locked or mode != os.W_OK)
        with pytest.raises(SelfTPTError, match="no permission"):
            check_writable(file)
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path and mode == os.W_OK)
    check_writable(tmp_path / "new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    unwritable(tmp_path / "a", "Permission denied")
    with pytest.raises(SelfTPTError, match="no permission"):
        check_writable(tmp_path / "a")


# Files that are refused


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 40, 100, 200, 400, 600, -8, -1])
def test_truncated_file_is_refused(written: Path, length: int) -> None:
    data = written.read_bytes()
    assert len(data) > 600
    written.write_bytes(data[:length])
    refused(written, "truncated")


def test_file_with_trailing_bytes_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes() + b"more")
    refused(written, "damaged")


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none", "does not exist")
    refused(tmp_path, "it is a folder")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    """Neither files of `pickle` nor of `torch.save` run code."""
    mark, plain, torch_file = tmp_path / "mark", tmp_path / "a.pkl", tmp_path / "a.pt"
    plain.write_bytes(pickle.dumps(Evil(mark)))
    torch.save(Evil(mark), torch_file)
    for file in (plain, torch_file):
        refused(file, "not a selftpt file")
    assert not mark.exists()
    pickle.loads(plain.read_bytes())
    assert mark.exists(), "loading this pickle runs no code, so the test proves nothing"


@pytest.mark.parametrize("text", ["", "hello there, this is some text", "\0" * 50, "PK\x03\x04" * 20])
def test_file_that_is_not_safetensors_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    refused(tmp_path / "a", "not a selftpt file")


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"selftpt": "no json"},
        {"selftpt": "[1, 2]"},
        {"selftpt": "null"},
        {"selftpt": '{"format": 1}'},
        {"selftpt": '{"kind": "thing"}'},
    ],
)
def test_safetensors_file_of_another_program_is_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    safetensors.torch.save_file({"t": torch.zeros(3)}, tmp_path / "a", metadata)
    refused(tmp_path / "a", "not a selftpt file")


def test_file_with_unprintable_kind_is_refused(tmp_path: Path) -> None:
    for kind in ("a\nb", "\ud800", "\x1b"):
        write_tensors(tmp_path / "a", kind, {}, {})
        refused(tmp_path / "a", "not a selftpt file")


def test_file_of_another_kind_is_refused(written: Path) -> None:
    refused(written, "holds a thing, not a prompt", kind="prompt")


def test_file_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """The message names the format even if the kind is also wrong."""
    write_tensors(tmp_path / "a", "thing", {"t": torch.zeros(3)}, {"format": FORMAT + 1})
    for kind in ("thing", "prompt"):
        refused(tmp_path / "a", f"has format {FORMAT + 1}", f"reads formats up to {FORMAT}", "newer", kind=kind)


# Damaged and untrusted files


def safetensors_bytes(layout: str | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    head = (layout if isinstance(layout, str) else json.dumps(layout)).encode()
    head += b" " * (-len(head) % 8)
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


def with_valid_digest(header: str, layout: dict[str, Any] | None = None, data: bytes = b"") -> bytes:
    """Return a file with this header and its digest."""
    return safetensors_bytes({"__metadata__": {"selftpt": with_digest(header)}, **(layout or {})}, data)


def with_digest(header: str) -> str:
    """Return the header after its digest and a space, as in the metadata of a file."""
    return f"{hashlib.sha256(header.encode()).hexdigest()} {header}"


def test_flipped_bit_is_refused_or_does_not_change_the_content(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_tensors(file, "thing", {"t": torch.arange(3.0), "u": torch.arange(2)}, {"name": "b"})
    data, (header, tensors) = file.read_bytes(), read_file(file)
    refusals = []
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << 3 * at % 8
        file.write_bytes(changed)
        try:
            found, others = read_file(file)
        except SelfTPTError as error:
            refusals.append(str(error))
        else:  # the bit was in white space
            assert found == header
            assert all(torch.equal(others[name], tensor) for name, tensor in tensors.items())
    assert len(refusals) > 0.99 * len(data)
    assert all(text.isprintable() for text in refusals)


def test_header_is_verified_without_the_tensors(written: Path) -> None:
    data = bytearray(written.read_bytes())
    data[-3] ^= 1
    written.write_bytes(data)
    assert read_header(written, "thing")["names"] == ["cat", "dog"]
    refused(written, "its tensor 't' does not match its digest")
    with pytest.raises(SelfTPTError, match="does not match its digest"):
        read_tensors(written, "thing", mapped=True)
    written.write_bytes(bytes(data).replace(b"cat", b"rat"))
    with pytest.raises(SelfTPTError, match="its header does not match its digest"):
        read_header(written, "thing")


def test_format_1_is_read_without_digests(tmp_path: Path) -> None:
    """Files of format 1 were written by the safetensors library."""
    file = tmp_path / "a"
    tensors = {"t": torch.randn(2, 3), "n": torch.arange(3)}
    safetensors.torch.save_file(tensors, file, {"selftpt": '{"format": 1, "kind": "thing", "more": 2}'})
    header, found = read_tensors(file, "thing", Schema({"more": int}))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert header["tensors"] == {"t": {"dtype": "F32", "shape": [2, 3]}, "n": {"dtype": "I64", "shape": [3]}}
    with pytest.raises(SelfTPTError, match="format 1, which has no digests: create it again"):
        read_tensors(file, "thing", Schema({"more": int}, oldest=2))


@pytest.mark.parametrize("change", ["format", "digest", "both"])
def test_file_without_its_digest_is_not_read_as_format_1(written: Path, change: str) -> None:
    data = written.read_bytes()
    if change != "digest":
        data = data.replace(b'\\"format\\": 2', b'\\"format\\": 1')
    if change != "format":  # white space keeps the length of the header
        start, stop = data.index(b'"selftpt":"') + 11, data.index(b"{\\")
        length = int.from_bytes(data[:8], "little")
        head = data[8:start] + data[stop : 8 + length]
        data = data[:8] + head.ljust(length) + data[8 + length :]
    assert data != written.read_bytes()
    written.write_bytes(data)
    refused(written, "damaged (it has no digest)")


PART = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DIGEST = hashlib.sha256(bytes(8)).hexdigest()
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def described(layout: dict[str, Any], data: bytes) -> bytes:
    """Return a file whose header agrees with its layout, with valid digests."""
    tensors = {}
    for name, entry in layout.items():
        try:
            start, stop = entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            start, stop = 0, 0
        entry_in_header = {key: entry[key] for key in ("dtype", "shape") if key in entry}
        tensors[name] = {**entry_in_header, "sha256": hashlib.sha256(data[start:stop]).hexdigest()}
    return with_valid_digest(json.dumps({"format": 2, "kind": "thing", "tensors": tensors}), layout, data)


@pytest.mark.parametrize(
    "layout",
    [
        {"t": {**PART, "shape": [3]}},
        {"t": {**PART, "shape": [-2]}},
        {"t": {**PART, "shape": [True, 2]}},
        {"t": {**PART, "shape": [2.0]}},
        {"t": {**PART, "shape": [1] * 17 + [2]}},
        {"t": PART, "u": {**EMPTY, "shape": [2**62, 2**62, 0]}},
        {"t": PART, "u": {**EMPTY, "shape": [0, 2**62, 2**62]}},
        {"t": PART, "u": {**EMPTY, "shape": [2**63, 0]}},
        {"t": {**PART, "dtype": "F33"}},
        {"t": {**PART, "dtype": "BOOL", "shape": [8]}},
        {"t": {**PART, "dtype": "C64", "shape": [1]}},
        {"t": {**PART, "dtype": "F8_E4M3", "shape": [8]}},
        {"t": {**PART, "dtype": ["F32"]}},
        {"t": {**PART, "data_offsets": [0, 8, 8]}},
        {"t": {**PART, "data_offsets": [8, 16]}},
        {"t": {**PART, "data_offsets": [0, 2**63]}},
        {"t": {"dtype": "F32", "shape": [2]}},
        {"t": {}},
        {"t": PART, "u": PART},
        {"t": {**PART, "shape": [1], "data_offsets": [0, 4]}},
        {"t": {**PART, "shape": [1], "data_offsets": [4, 8]}},
    ],
)  # fmt: skip
def test_invalid_layouts_are_refused(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Overlaps, gaps, wrong sizes, unknown data types and overflows are refused even with valid digests."""
    (tmp_path / "a").write_bytes(described({"t": PART, "u": EMPTY}, bytes(8)))
    read_file(tmp_path / "a")
    (tmp_path / "a").write_bytes(described(layout, bytes(8)))
    refused(tmp_path / "a", "damaged")
    with pytest.raises(SelfTPTError, match="damaged"):
        read_header(tmp_path / "a", "thing")


@pytest.mark.parametrize("mapped", [False, True])
def test_unaligned_tensors_are_read(tmp_path: Path, mapped: bool) -> None:
    layout = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "t": {**PART, "data_offsets": [1, 9]},
    }
    data = b"\x07" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "a").write_bytes(described(layout, data))
    tensors = read_tensors(tmp_path / "a", "thing", Schema({}), mapped=mapped)[1]
    assert tensors["a"].tolist() == [7]
    assert tensors["t"].tolist() == [1.5, -2.0]
    assert (tensors["t"] * 2).tolist() == [3.0, -4.0]


@pytest.mark.parametrize(
    "tensors",
    [
        None,
        [],
        "t",
        {},
        {"t": None},
        {"t": {"dtype": "F32", "shape": [2]}},
        {"t": {"dtype": "F32", "shape": [2], "sha256": None}},
        {"t": {"dtype": "F32", "shape": [2], "sha256": DIGEST, "more": 1}},
        {"t": {"dtype": "F32", "shape": [1, 2], "sha256": DIGEST}},
        {"t": {"dtype": "I32", "shape": [2], "sha256": DIGEST}},
        {"t": {"dtype": "F32", "shape": [2], "sha256": DIGEST}, "u": {}},
        {"u": {"dtype": "F32", "shape": [2], "sha256": DIGEST}},
    ],
)
def test_headers_that_do_not_describe_the_tensors_are_refused(tmp_path: Path, tensors: Any) -> None:
    file = tmp_path / "a"

    def write(tensors: Any) -> None:
        file.write_bytes(
            with_valid_digest(json.dumps({"format": 2, "kind": "thing", "tensors": tensors}), {"t": PART}, bytes(8))
        )

    write({"t": {"dtype": "F32", "shape": [2], "sha256": DIGEST}})
    read_file(file)
    write(tensors)
    refused(file, "damaged")
    with pytest.raises(SelfTPTError, match="damaged"):
        read_header(file, "thing")


def test_header_size_is_limited(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = int.from_bytes(written.read_bytes()[:8], "little")
    monkeypatch.setattr(files, "MAX_HEADER", length)
    read_file(written)
    monkeypatch.setattr(files, "MAX_HEADER", length - 1)
    refused(written, "not a selftpt file")


@pytest.mark.parametrize("length", [0, 1, 1 << 25, 1 << 40, (1 << 64) - 1])
def test_invalid_header_length_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "a").write_bytes(safetensors_bytes({"__metadata__": {}}, length=length))
    refused(tmp_path / "a", "not a selftpt file")


@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", "9" * 30, "9" * 6000, '{"a": 1, "a": 2}', "[" * 10**5 + "]" * 10**5,
     "[" * 30 + "]" * 30, '"a'],
)  # fmt: skip
def test_invalid_or_unusual_json_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_json(f'{{"value": {value}}}')
    header = '{"format": 2, "kind": "thing", "tensors": {}'
    (tmp_path / "a").write_bytes(with_valid_digest(f"{header}}}"))
    read_file(tmp_path / "a")
    (tmp_path / "a").write_bytes(with_valid_digest(f'{header}, "value": {value}}}'))
    refused(tmp_path / "a", "not a selftpt file")
    metadata = json.dumps({"selftpt": with_digest(f"{header}}}")})
    (tmp_path / "a").write_bytes(safetensors_bytes(f'{{"__metadata__": {metadata}, "value": {value}}}'))
    refused(tmp_path / "a", "not a selftpt file")


def test_ordinary_json_is_accepted() -> None:
    value = {"a": [1, -2.5e-3, True, None, "é\n\ud800"], "b": {"c": {}}, "n": 2**63, "t": 1_700_000_000_000_000_000}
    assert parse_json(json.dumps(value)) == value


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A named pipe does not block."""
    pipe, link, address = tmp_path / "pipe", tmp_path / "link", tmp_path / "socket"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        for path in (pipe, link, Path("/dev/zero"), address):
            refused(path, "cannot read")
    with pytest.raises(SelfTPTError, match=r"cannot read .*null"):
        read_file(Path("a\0b"))
    with pytest.raises(SelfTPTError, match="does not exist") as caught:
        read_file(tmp_path / "a\nb")
    assert str(caught.value).isprintable()


def test_file_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The file is sparse: 8 GB that take no space on the disk."""
    size = 1 << 33
    tensor_entries = {"t": {"dtype": "F32", "shape": [size // 4], "sha256": "0" * 64}}
    layout = {"t": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    file = tmp_path / "a"
    file.write_bytes(with_valid_digest(json.dumps({"format": 2, "kind": "thing", "tensors": tensor_entries}), layout))
    os.truncate(file, file.stat().st_size + size)
    refused(file, f"{file.stat().st_size} bytes")


def test_file_truncated_while_it_is_read_is_refused(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original_fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda handle: [os.truncate(written, 400), original_fstat(handle)][1])
    refused(written, "truncated")
    monkeypatch.undo()
    read_header_of_file = files._read_header

    def cut(path: Path, *rest: Any) -> Any:
        found = read_header_of_file(path, *rest)
        os.truncate(path, path.stat().st_size - 8)
        return found

    monkeypatch.setattr(files, "_read_header", cut)
    write_tensors(written, "thing", {"t": torch.zeros(5000)}, {})
    refused(written, "changed while it was read")


THING = Schema(
    {"name": str, "size": int, "scale": float, "more": str | None, "model": {"name": str}, "any": dict, "list": list},
    {"w": "E D", "b": "E"},
)
HEADER = {"name": "a", "size": 1, "scale": 1.5, "more": None, "model": {"name": "m"}, "any": {"x": [1]}, "list": []}
TENSORS = {"w": torch.ones(2, 3), "b": torch.zeros(2)}


@pytest.mark.parametrize(
    ("header", "tensors", "words"),
    [
        ({"name": 1}, {}, "name must be a string"),
        ({"name": "a\nb"}, {}, "name must be a string in one line"),
        ({"name": "a\ud800"}, {}, "name must be a string in one line"),
        ({"size": True}, {}, "size must be an integer, not True"),
        ({"size": 1.0}, {}, "size must be an integer"),
        ({"scale": "1"}, {}, "scale must be a number"),
        ({"scale": False}, {}, "scale must be a number"),
        ({"more": 3}, {}, "more must be"),
        ({"model": "m"}, {}, "model must be an object"),
        ({"model": {"name": None}}, {}, "name must be a string"),
        ({"model": {}}, {}, "model has no name"),
        ({"model": {"name": "m", "x": 1}}, {}, "model has an unknown entry, 'x'"),
        ({"any": []}, {}, "any must be an object"),
        ({"other": 1}, {}, "the header has an unknown entry, 'other'"),
        ({}, {"w": torch.ones(2, 3, 1)}, "the shape of w must be E D, not [2, 3, 1]"),
        ({}, {"b": torch.zeros(3)}, "the shape of b must be E with E = 2, not [3]"),
        ({}, {"w": torch.ones(2, 0)}, "the shape of w must be"),
        ({}, {"w": torch.ones(2, 3).half()}, "w must be of float32, not of float16"),
        ({}, {"x": torch.zeros(1)}, "its tensors must be w, b"),
        ({}, {"b": torch.tensor([0.0, math.nan])}, "'b' has values that are not finite"),
        ({}, {"w": torch.full((2, 3), math.inf)}, "'w' has values that are not finite"),
    ],
)
def test_content_that_violates_its_schema_is_neither_written_nor_read(
    tmp_path: Path, header: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    file = tmp_path / "a"
    with pytest.raises(SelfTPTError, match="cannot write") as caught:
        write_tensors(file, "thing", {**TENSORS, **tensors}, {**HEADER, **header}, THING)
    assert words in str(caught.value)
    assert not file.exists()
    write_tensors(file, "thing", {**TENSORS, **tensors}, {**HEADER, **header})
    with pytest.raises(SelfTPTError) as caught:
        read_tensors(file, "thing", THING)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_content_that_follows_its_schema_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for changes in ({}, {"scale": 3}, {"more": "x"}):
        write_tensors(file, "thing", TENSORS, {**HEADER, **changes}, THING)
        found, tensors = read_tensors(file, "thing", THING)
        assert {**found, **HEADER, **changes} == found
        assert torch.equal(tensors["w"], TENSORS["w"])
        assert THING.check(found) == {"E": 2, "D": 3}


def test_header_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(30):
        deep = [deep]
    for value in (math.nan, -math.inf, deep, 10**30, "x" * (33 << 20)):
        with pytest.raises(SelfTPTError, match="would not be a valid thing file"):
            write_tensors(tmp_path / "a", "thing", {}, {"value": value})
    assert not list(tmp_path.iterdir())


def test_equal_content_gives_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tensors(tmp_path / name, "thing", TENSORS, HEADER)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_equal_content_gives_equal_files_in_other_processes(tmp_path: Path) -> None:
    code = (
        "import sys, torch, pathlib, selftpt.files as files\n"
        "tensors = {name: torch.arange(float(at)) for at, name in enumerate('zyxabc')}\n"
        "header = {'names': ['b', 'a'], 'origin': {'z': 1, 'a': 2}}\n"
        "files.write_tensors(pathlib.Path(sys.argv[1]), 'thing', tensors, header)\n"
    )
    contents = set()
    for seed in ("1", "2"):
        file = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, str(file)], env=environment, check=True)
        contents.add(file.read_bytes())
    assert len(contents) == 1


def test_set_aside_renames_a_file_with_a_warning(tmp_path: Path) -> None:
    """An older `.damaged` file is replaced."""
    file, aside = tmp_path / "a.x", tmp_path / "a.x.damaged"
    for content in ("first", "second"):
        file.write_text(content)
        with pytest.warns(SelfTPTWarning, match=r"it is broken: set aside as a\.x\.damaged"):
            set_aside(file, "it is broken")
        assert [path.read_text() for path in tmp_path.iterdir()] == [content]
    aside.unlink()
    (aside / "full").mkdir(parents=True)
    for path in (file, tmp_path / "none"):
        file.write_text("third")
        with pytest.warns(SelfTPTWarning, match="it is broken: it could not be set aside"):
            set_aside(path, "it is broken")
    assert file.read_text() == "third"


def test_appending_to_a_pipe_is_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait for a reader."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SelfTPTError, match="not a regular file"):
        append_line(tmp_path / "pipe", "{}")
    with pytest.raises(SelfTPTError, match="not a regular file"):
        write_after(tmp_path / "pipe", 0, b"")


# Digests and the cache folder


def test_digest_depends_on_values_and_not_on_key_order() -> None:
    """Different values give different digests."""
    assert digest("a", {"x": 1, "y": [2]}) == digest("a", {"y": (2,), "x": 1})
    parts: list[tuple[object, ...]] = [(), ("a",), ("a", "b"), ("ab",), (["a", "b"],), (1,), ("1",), (1.5,), (None,)]
    assert len({digest(*part) for part in parts}) == len(parts)
    # Caches of earlier versions depend on this value.
    assert digest("crops", 1, "é") == "5b428b78ec3bc4e41faa74b317e29ff5"
    assert len(digest(os.fsdecode(b"\xff"))) == 32


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("SELFTPT_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "selftpt"
    monkeypatch.delenv("SELFTPT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "selftpt"


def test_without_a_home_the_cache_is_a_private_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SELFTPT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    expected = tmp_path / f"selftpt-{os.getuid()}"
    for _ in range(2):
        with pytest.warns(SelfTPTWarning, match="no home folder"):
            assert cache_folder() == expected
    assert expected.stat().st_mode & 0o777 == 0o700
    expected.chmod(0o770)
    with pytest.raises(SelfTPTError, match="not a private folder of this user: set SELFTPT_CACHE"):
        cache_folder()
    expected.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    expected.rename(tmp_path / "selftpt-12345")  # now the folder belongs to another user
    with pytest.raises(SelfTPTError, match="not a private folder of this user"):
        cache_folder()


def test_symbolic_link_is_not_accepted_as_private_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SELFTPT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / f"selftpt-{os.getuid()}").symlink_to(tmp_path / "target")
    with pytest.raises(SelfTPTError, match="not a private folder"):
        cache_folder()
