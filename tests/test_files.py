"""Files of ours: whole or not at all, and nothing else is taken for one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.files import (
    FORMAT,
    cache_folder,
    check_writable,
    digest,
    read_file,
    read_header,
    read_tensors,
    write_tensors,
    write_whole,
)


def refused(path: Path, *words: str, kind: str = "thing") -> None:
    """Refused in one line that names the file."""
    with pytest.raises(SelfTPTError) as caught:
        read_tensors(path, kind)
    text = str(caught.value)
    assert "\n" not in text
    for word in (str(path), *words):
        assert word in text


def unwritable(path: Path, *words: str, content: bytes = b"new") -> None:
    with pytest.raises(SelfTPTError) as caught:
        write_whole(path, content)
    text = str(caught.value)
    assert "\n" not in text
    for word in (f"cannot write {path}", *words):
        assert word in text


# Written and read


def test_tensors_and_header_come_back(tmp_path: Path) -> None:
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
    told = found.pop("tensors")
    assert found == {"format": FORMAT, "kind": "thing", **header}
    assert {name: entry["shape"] for name, entry in told.items()} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor.detach())
    assert read_file(file)[0] == read_header(file, "thing") == {**found, "tensors": told}
    mapped = read_tensors(file, "thing", mapped=True)[1]
    assert all(torch.equal(mapped[name], back[name]) for name in tensors)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(st.characters(), max_size=20))
def test_any_text_in_a_header(tmp_path: Path, name: str) -> None:
    """Half characters too: names of files that are not UTF-8 have them."""
    write_tensors(tmp_path / "a", "thing", {"t": torch.zeros(1)}, {"name": name})
    assert read_file(tmp_path / "a")[0]["name"] == name


def test_half_characters(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    write_tensors(tmp_path / "a", "thing", {"t": torch.zeros(1)}, {"name": name})
    assert read_file(tmp_path / "a")[0]["name"] == name


def test_files_are_plain_safetensors_with_digests(tmp_path: Path) -> None:
    """The library reads them, and anybody can verify them with it and a hash function."""
    tensors = {"t": torch.arange(3), "half": torch.randn(3).half(), "byte": torch.arange(5).byte(), "u": torch.rand(2)}
    write_tensors(tmp_path / "a", "thing", tensors, {"more": 1})
    with safetensors.safe_open(tmp_path / "a", framework="pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"selftpt", "sha256"}
    assert metadata["sha256"] == hashlib.sha256(metadata["selftpt"].encode()).hexdigest()
    header = json.loads(metadata["selftpt"])
    assert {key: header[key] for key in ("format", "kind", "more")} == {"format": FORMAT, "kind": "thing", "more": 1}
    loaded = safetensors.torch.load_file(tmp_path / "a")
    assert loaded.keys() == tensors.keys() == header["tensors"].keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert header["tensors"][name]["sha256"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_the_new_file_takes_the_place_of_the_old(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_whole(file, b"old")
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_it_is_written_beside_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For only within a file system is a file moved at once; and whole, before it is moved."""
    moved = []

    def replace(old: str, new: Path) -> None:
        moved.append((Path(old).parent, Path(old).read_bytes(), new))

    monkeypatch.setattr(os, "replace", replace)
    write_whole(tmp_path / "a", b"new")
    assert moved == [(tmp_path, b"new", tmp_path / "a")]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", b"")
        (tmp_path / "b").touch()
    finally:
        assert os.umask(before) == 0o027
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_the_longest_of_names(tmp_path: Path) -> None:
    file = tmp_path / ("x" * 255)
    check_writable(file)
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"


# Failures while writing


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(("module", "step"), [(os, "fsync"), (os, "replace")])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str, there: bool
) -> None:
    file = tmp_path / "a"
    if there:
        file.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, step, full)
    unwritable(file, "No space left on device")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([b"old"] if there else [])


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"old")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_limit_of_the_system_leaves_the_old_file(tmp_path: Path) -> None:
    """A real failure half way: files of this process may have a kilobyte."""
    pytest.importorskip("resource")
    file = tmp_path / "a"
    file.write_bytes(b"old")
    code = (
        "import resource, sys, pathlib, selftpt.files as files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        "try:\n"
        "    files.write_whole(pathlib.Path(sys.argv[1]), bytes(5000))\n"
        "except files.SelfTPTError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"cannot write {file}: {os.strerror(errno.EFBIG)}"
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    """A folder, a path below a file, a name too long, a device: refused before the work, and when writing."""
    plain, pipe = tmp_path / "plain.txt", tmp_path / "pipe"
    plain.write_bytes(b"old")
    os.mkfifo(pipe)
    (tmp_path / "folder").mkdir()
    for path, word in (
        (tmp_path / "folder", "a folder"),
        (plain / "x.safetensors", ""),
        (plain / "deep" / "x.safetensors", ""),
        (tmp_path / ("x" * 256), "too long"),
        (pipe, "no ordinary file"),
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


def test_outputs_that_can_be(tmp_path: Path) -> None:
    """Nothing is made by asking."""
    (tmp_path / "there").write_bytes(b"old")
    check_writable(tmp_path / "there")
    check_writable(tmp_path / "new")
    check_writable(tmp_path / "new" / "folder" / "file")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_outputs_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the folder, or of the file that is there."""
    file = tmp_path / "a"
    file.touch()
    for locked in (tmp_path, file):
        monkeypatch.setattr(os, "access", lambda path, mode, locked=locked: path != locked or mode != os.W_OK)
        with pytest.raises(SelfTPTError, match="no permission"):
            check_writable(file)
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path and mode == os.W_OK)
    check_writable(tmp_path / "new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_locked_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    unwritable(tmp_path / "a", "Permission denied")
    with pytest.raises(SelfTPTError, match="no permission"):
        check_writable(tmp_path / "a")


# Other files


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = tmp_path / "a.safetensors"
    write_tensors(file, "thing", {"t": torch.randn(20, 5), "u": torch.arange(7)}, {"names": ["cat", "dog"]})
    return file


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 40, 100, 200, 400, 600, -8, -1])
def test_cut_short(written: Path, length: int) -> None:
    data = written.read_bytes()
    assert len(data) > 600
    written.write_bytes(data[:length])
    refused(written, "cut short")


def test_too_long(written: Path) -> None:
    written.write_bytes(written.read_bytes() + b"more")
    refused(written, "damaged")


def test_missing_and_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none", "does not exist")
    refused(tmp_path, "it is a folder")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_no_pickle_is_ever_loaded(tmp_path: Path) -> None:
    """Neither of Python nor of PyTorch: what they would run is not run."""
    mark, plain, torch_file = tmp_path / "mark", tmp_path / "a.pkl", tmp_path / "a.pt"
    plain.write_bytes(pickle.dumps(Evil(mark)))
    torch.save(Evil(mark), torch_file)
    for file in (plain, torch_file):
        refused(file, "not a file of selftpt")
    assert not mark.exists()
    pickle.loads(plain.read_bytes())
    assert mark.exists(), "this pickle would have done nothing anyway"


@pytest.mark.parametrize("text", ["", "hello there, this is some text", "\0" * 50, "PK\x03\x04" * 20])
def test_not_safetensors(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    refused(tmp_path / "a", "not a file of selftpt")


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
def test_safetensors_of_others(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    safetensors.torch.save_file({"t": torch.zeros(3)}, tmp_path / "a", metadata)
    refused(tmp_path / "a", "not a file of selftpt")


def test_of_another_kind(written: Path) -> None:
    refused(written, "holds a thing, not a prompt", kind="prompt")


def test_of_a_newer_format(tmp_path: Path) -> None:
    """Refused by that, and not as a file of another kind."""
    write_tensors(tmp_path / "a", "thing", {"t": torch.zeros(3)}, {"format": FORMAT + 1})
    for kind in ("thing", "prompt"):
        refused(tmp_path / "a", f"has format {FORMAT + 1}", f"reads {FORMAT}", "newer", kind=kind)


# Names


def test_digests() -> None:
    """Told by value, whatever the order of keys; another for every other value."""
    assert digest("a", {"x": 1, "y": [2]}) == digest("a", {"y": (2,), "x": 1})
    parts: list[tuple[object, ...]] = [(), ("a",), ("a", "b"), ("ab",), (["a", "b"],), (1,), ("1",), (1.5,), (None,)]
    assert len({digest(*part) for part in parts}) == len(parts)
    assert digest("crops", 1, "é") == "5b428b78ec3bc4e41faa74b317e29ff5"
    assert len(digest(os.fsdecode(b"\xff"))) == 32


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    expected.rename(tmp_path / "selftpt-12345")  # it belongs to another user
    with pytest.raises(SelfTPTError, match="not a private folder of this user"):
        cache_folder()


def test_a_link_is_no_private_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
