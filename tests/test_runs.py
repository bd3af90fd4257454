"""Records of runs: any number of threads and processes write each record once, and records are checked when read."""

from __future__ import annotations

import errno
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.evaluation.records import from_line, to_line
from selftpt.evaluation.runs import Record, Runs, read_records
from selftpt.files import MAX_DEPTH
from selftpt.locks import lock

PART = {"top1": 50.0, "top5": 90.0, "ece": 3.5, "images": 12, "classes": 4}
RECORD: Record = {
    "key": "a",
    "protocol": "cross-dataset",
    "method": "coop",
    "dataset": "dtd",
    "seed": 1,
    "model": {"name": "x", "pretrained": None, "digest": "y"},
    "random_init": False,
    "source": {"dataset": "imagenet", "published": True, "shots": 16, "share": 1.0, "classes": 1000, "images": 16000},
    "data": {"split": "z", "published": True, "limit": None, "unreadable": 0},
    "settings": {"learn": {"lr": 0.1}},
    "changes": {},
    "results": {"test": PART},
    "seconds": {"adapt": 1.5, "predict": 2},
}


def changed(path: str, value: Any) -> Record:
    """Return the record with one value replaced, given by a dotted path."""
    record = json.loads(json.dumps(RECORD))
    *parents, name = path.split(".")
    place = record
    for parent in parents:
        place = place[parent]
    place[name] = value
    return record


def write_lines(folder: Path, *lines: bytes) -> Path:
    (folder / "records.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def keys(folder: Path) -> list[str]:
    return [json.loads(line)["key"] for line in (folder / "records.jsonl").read_text().splitlines()]


def lock_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.lock"))


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process that runs `code` with `runs`, the `Runs` of the folder in its first argument."""
    head = "import sys, time; from pathlib import Path; from selftpt.evaluation.runs import Runs\n"
    head += "runs = Runs(Path(sys.argv[1]))\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def started(process: subprocess.Popen[str]) -> None:
    """Wait until a process has printed a line."""
    assert process.stdout is not None
    assert process.stdout.readline()


# Claims


def test_run_is_claimed_by_one_at_a_time(tmp_path: Path) -> None:
    first, second = Runs(tmp_path), Runs(tmp_path)
    with first.claim("a") as mine, second.claim("a") as taken, second.claim("b") as other:
        assert (mine, taken, other) == (True, False, True)
    assert lock_files(tmp_path) == []
    with second.claim("a") as mine:
        assert mine


def test_claim_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Runs(tmp_path).claim("a"):
        raise KeyboardInterrupt
    assert lock_files(tmp_path) == []
    with Runs(tmp_path).claim("a") as mine:
        assert mine


def test_recorded_run_is_not_claimed_again(tmp_path: Path) -> None:
    """Also if another process records it after this process has read the records."""
    early = Runs(tmp_path)
    Runs(tmp_path).add(RECORD)
    with early.claim("a") as mine:
        assert not mine
    assert early.done() == {"a"}


def test_record_of_a_known_key_is_not_added_again(tmp_path: Path) -> None:
    first, second = Runs(tmp_path), Runs(tmp_path)
    kept = first.add(RECORD)
    assert second.add({**RECORD, "seconds": {"adapt": 9}}) == kept
    assert first.add({**RECORD, "seconds": {"adapt": 9}}) == kept
    assert keys(tmp_path) == ["a"]


def test_leftover_lock_file_does_not_block(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    with runs.claim("a"):
        (left,) = lock_files(tmp_path)
    left.touch()
    with runs.claim("a") as mine:
        assert mine
    assert lock_files(tmp_path) == []


@pytest.mark.parametrize("shared", [True, False], ids=["one-object", "own-objects"])
def test_threads_record_each_run_once(tmp_path: Path, shared: bool) -> None:
    common, names = Runs(tmp_path), [str(number) for number in range(12)]
    working: set[str] = set()
    errors: list[BaseException] = []
    barrier = threading.Barrier(6)

    def work() -> None:
        try:
            runs = common if shared else Runs(tmp_path)
            barrier.wait()
            for name in names:
                with runs.claim(name) as mine:
                    if mine:
                        assert name not in working, "claimed twice at once"
                        working.add(name)
                        time.sleep(0.002)
                        runs.add({**RECORD, "key": name})
                        working.remove(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(keys(tmp_path), key=int) == names
    assert lock_files(tmp_path) == []


def test_threads_exclude_each_other_while_lock_files_are_deleted(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with lock(tmp_path / "x.lock") as held:
                assert held
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert lock_files(tmp_path) == []


def test_processes_record_each_run_once(tmp_path: Path) -> None:
    """Each of two processes takes the runs that the other has not claimed; without claims, both would do all runs."""
    code = """
print("ready", flush=True)
sys.stdin.readline()
for key in "abcdefghij":
    with runs.claim(key) as mine:
        if mine:
            time.sleep(0.02)
            print(key, flush=True)
            runs.add({**eval(sys.argv[2]), "key": key})
"""
    processes = [start(code, tmp_path, RECORD) for _ in range(2)]
    for process in processes:
        started(process)
    answers = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        answers.append(process.communicate()[0].split())
        assert process.returncode == 0
    assert sorted(answers[0] + answers[1]) == sorted(keys(tmp_path)) == list("abcdefghij")
    assert lock_files(tmp_path) == []


def test_claim_of_a_killed_process_is_released(tmp_path: Path) -> None:
    code = "with runs.claim('a') as mine:\n    print(mine, flush=True)\n    time.sleep(600)"
    process = start(code, tmp_path)
    started(process)
    runs = Runs(tmp_path)
    with runs.claim("a") as mine:
        assert not mine
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with runs.claim("a") as mine:
        assert mine
        runs.add(RECORD)
    assert keys(tmp_path) == ["a"]
    assert lock_files(tmp_path) == []


def test_records_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    code = "from selftpt.locks import lock\nwith lock(runs.folder / '.records.jsonl.lock'):\n"
    process = start(code + "    print(1, flush=True); time.sleep(600)", tmp_path)
    started(process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    Runs(tmp_path).add(RECORD)
    assert keys(tmp_path) == ["a"]


def test_folder_that_cannot_hold_locks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SelfTPTError, match="cannot lock"), lock(tmp_path / "file" / "x.lock"):
        pass


def test_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The existence of a file is not used as a lock instead, because it could outlive its owner."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(SelfTPTError, match=r"cannot lock .*: Function not implemented"), Runs(tmp_path).claim("a"):
        pass


# Records


def test_record_has_the_digest_of_its_content(tmp_path: Path) -> None:
    record = Runs(tmp_path).add(RECORD)
    content = {**RECORD, "format": 2}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert record == {**content, "digest": hashlib.sha256(canonical.encode()).hexdigest()}
    assert read_records(tmp_path) == [record]


def test_changed_record_is_refused_by_its_digest(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.add(RECORD)
    runs.add({**RECORD, "key": "b"})
    content = runs.file.read_text().replace('"top1": 50.0', '"top1": 51.0')
    runs.file.write_text(content)
    with pytest.raises(SelfTPTError, match=r"records.jsonl, line 1 is damaged .*digest"):
        Runs(tmp_path)


def test_record_without_its_digest_is_refused(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.add(RECORD)
    runs.file.write_text(
        runs.file.read_text().replace('"digest": "', '"digesu": "').replace('"digesu": "y"', '"digest": "y"')
    )
    with pytest.raises(SelfTPTError, match=r"records.jsonl, line 1 is damaged .*digest"):
        Runs(tmp_path)


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They have no digest, and former key names."""
    old = {key: value for key, value in RECORD.items() if key != "random_init"} | {"meaningless": True}
    old["results"] = {"test": {**{key: value for key, value in PART.items() if key != "images"}, "pictures": 12}}
    old["source"] = {"dataset": "imagenet", "pictures": 16000}
    write_lines(tmp_path, json.dumps(old).encode())
    (record,) = read_records(tmp_path)
    assert record["random_init"] is True
    assert record["results"]["test"]["images"] == 12
    assert record["source"] == {"dataset": "imagenet", "images": 16000}
    assert not {"meaningless", "pictures"} & record.keys()


NESTED = b'{"settings": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "not an object"),
        (b"null", "not an object"),
        (b"\xff{}", "byte 1 is not UTF-8"),
        (json.dumps(changed("method", "é"), ensure_ascii=False).encode("latin-1"), "is not UTF-8"),
        (json.dumps(RECORD).encode("utf-16"), "is not UTF-8"),
        (NESTED, "nested more than 24 deep"),
        (b"[" * 100_000, "nested more than 24 deep"),
        (
            json.dumps(changed("settings.x", 0)).encode().replace(b'"x": 0', b'"x": ' + b"9" * 30),
            "an integer of 30 digits",
        ),
        (
            json.dumps(changed("settings.x", 0)).encode().replace(b'"x": 0', b'"x": ' + b"9" * 5000),
            "an integer of 5000 digits",
        ),
        (
            json.dumps(changed("settings.x", 0)).encode().replace(b'"x": 0', b'"x": 1e999'),
            "1e999 is not a finite number",
        ),
        (json.dumps(changed("settings.x", float("nan"))).encode(), "NaN is not a finite number"),
        (json.dumps(changed("results.test.top1", float("inf"))).encode(), "Infinity is not a finite number"),
        (json.dumps(RECORD).encode().replace(b'"seed": 1', b'"seed": 1, "seed": 2'), "the key 'seed' is repeated"),
        (b'{"%s": 1, "%s": 2}' % (b"\\n" * 500, b"\\n" * 500), "is repeated"),
        (json.dumps(changed("dataset", "\ud800")).encode(), "is not text"),
        (json.dumps({**RECORD, "digest": "0" * 64}).encode(), "not what its digest says"),
        (json.dumps({**RECORD, "digest": None}).encode(), "not what its digest says"),
        *(
            (json.dumps(changed(path, value)).encode(), why)
            for path, value, why in [
                ("key", 5, "key is not a string"),
                ("method", "", "method is not a string"),
                ("dataset", None, "dataset is not a string"),
                ("protocol", "few-shot", "unknown protocol 'few-shot'"),
                ("seed", -1, "seed is not an integer"),
                ("seed", True, "seed is not an integer"),
                ("model", [], "model is not an object"),
                ("model", {"name": "x"}, "no model.digest"),
                ("model.pretrained", 5, "model.pretrained is not a string"),
                ("source", "imagenet", "source is not an object"),
                ("source", {}, "no source.dataset"),
                ("source.share", 2, "source.share is not a number above 0"),
                ("source.shots", 0, "source.shots is not an integer"),
                ("data.limit", 1.5, "data.limit is not an integer"),
                ("data.published", "yes", "data.published is not true or false"),
                ("settings", [], "settings is not an object"),
                ("changes", 3, "changes is not an object"),
                ("results", None, "results is not an object"),
                ("results.test", 3, "results.test is not an object"),
                ("results.test.top1", 101, "results.test.top1 is not a number from 0 to 100"),
                ("results.test.top1", "50", "results.test.top1 is not a number"),
                ("results.test.top1", True, "results.test.top1 is not a number"),
                ("results.test.images", 1.5, "results.test.images is not an integer"),
                ("results.valid", {"images": "12"}, "results.valid.images is not an integer"),
                ("results.val\n", 5, r"results.val\n is not an object"),
                ("results.harmonic", None, "results.harmonic is not a number"),
                ("results.harmonic", 50, "results.harmonic without"),
                ("seconds", [1], "seconds is not an object"),
                ("seconds.adapt", -1, "seconds.adapt is not a number"),
                ("random_init", 1, "random_init is not true or false"),
            ]
        ),
    ],
)
def test_damaged_line_is_refused_in_one_line(tmp_path: Path, line: bytes, why: str) -> None:
    write_lines(tmp_path, json.dumps(RECORD).encode(), line, json.dumps(RECORD).encode())
    with pytest.raises(SelfTPTError) as error:
        Runs(tmp_path)
    text = str(error.value)
    assert text.startswith(f"{tmp_path / 'records.jsonl'}, line 2 is damaged (")
    assert why in text
    assert len(text.splitlines()) == 1
    assert len(text) < 250 + len(str(tmp_path))


@given(st.data())
def test_mutated_line_is_refused_or_has_the_same_content(data: st.DataObject) -> None:
    """Bytes are replaced, inserted or deleted at one position."""
    line = to_line(RECORD).encode()
    start = data.draw(st.integers(0, len(line)))
    stop = data.draw(st.integers(start, min(start + 4, len(line))))
    mutated = line[:start] + data.draw(st.binary(max_size=4)) + line[stop:]
    try:
        record = from_line(mutated)
    except ValueError:
        return
    # The change is in white space, or gives another notation of the same value.
    assert {key: value for key, value in record.items() if key in RECORD} == RECORD


def test_nesting_up_to_the_limit_is_read(tmp_path: Path) -> None:
    def nested(depth: int) -> Any:
        return {"a": nested(depth - 1)} if depth else 1

    record = Runs(tmp_path).add(changed("settings", nested(MAX_DEPTH - 1)))
    assert read_records(tmp_path) == [record]
    with pytest.raises(SelfTPTError, match="cannot be recorded: it is nested"):
        Runs(tmp_path).add({**changed("settings", nested(MAX_DEPTH)), "key": "b"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, 1.5, -1, object()])
def test_record_that_could_not_be_read_is_not_written(tmp_path: Path, value: Any) -> None:
    record = {**RECORD, "seed": value}
    with pytest.raises(SelfTPTError, match="this run cannot be recorded"):
        Runs(tmp_path).add(record)
    assert not (tmp_path / "records.jsonl").exists()


def test_carriage_return_does_not_end_a_line(tmp_path: Path) -> None:
    """A line that is split there would be left out as a truncated last line."""
    write_lines(tmp_path, b"{\r" + json.dumps(RECORD).encode()[1:], json.dumps({**RECORD, "key": "b"}).encode() + b"\r")
    assert [record["key"] for record in read_records(tmp_path)] == ["a", "b"]


def test_line_being_written_is_left_out_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Only a line that was truncated before the folder was opened gives a warning."""
    runs = Runs(tmp_path)
    runs.add(RECORD)
    with runs.file.open("a") as file:
        file.write('{"key": "b"')
    assert runs.done() == {"a"}
    assert not recwarn.list
    with pytest.warns(SelfTPTWarning, match="skipped line 2"):
        Runs(tmp_path)
