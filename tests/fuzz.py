"""Mutation fuzzing of the files that selftpt reads: `python -m tests.fuzz --kind files --n 5000 --seed 1`.

`--kind` is `files` or `images`. A worker process uses every mutated file. The parent process limits its time, reads its
stderr and judges its answer. Seed and number reproduce a case: `--n 1 --seed 1 --first 1234`. `--keep folder` keeps the
files of failed cases. The modules `tests.fuzz_files` and `tests.fuzz_images` define what is mutated, how a file is used
and which answers are correct, in the functions `cases`, `work` and `judge`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

SECONDS = 60  # time limit of one case, generous for a busy machine
KINDS = ("files", "images")

Answer = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A mutated file.

    Attributes:
        name: Description of the mutations.
        file: End of the file name that the worker receives.
        data: Content of the file.
        expected: Information for `judge`.
    """

    name: str
    file: str
    data: bytes
    expected: Any = None


class Target(Protocol):
    """Interface of a module that defines what is fuzzed."""

    def work(self, folder: Path) -> Callable[[Path], Answer]:
        """Return the function with which the worker uses a file; its answer has a one-word `outcome`."""

    def cases(self, folder: Path) -> Callable[[random.Random], Case]:
        """Return the function with which the parent makes a case; the worker has already started in the same folder."""

    def judge(self, case: Case, path: Path, answer: Answer, stderr: str) -> str | None:
        """Return what is wrong with the answer to a file or with its stderr output, or None."""


@dataclass(frozen=True)
class Report:
    """Result of a campaign; `failures` has one line per failed case."""

    cases: int
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    peak_mb: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        peaks = ", ".join(f"{peak:.0f} MB for {outcome}" for outcome, peak in self.peak_mb.items())
        head = f"{self.cases} files, seed {self.seed}: {outcomes}; peak memory {peaks}; {len(self.failures)} failures"
        return "\n".join([head, *self.failures])


# Mutations of any file: functions of a random generator, the file and the other valid files


def position(rng: random.Random, data: bytes) -> int:
    """Return a random position, mostly in the header or near the end."""
    end = len(data)
    return min(
        rng.choice([rng.randrange(32), rng.randrange(128), end - 1 - rng.randrange(min(end, 300)), rng.randrange(end)]),
        end - 1,
    )


def flip(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        changed[position(rng, data)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    return data[: rng.randrange(len(data))]


def repeat(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    start, length = position(rng, data), rng.randrange(1, 400)
    return data[:start] + data[start : start + length] * rng.choice([2, 3, 1000]) + data[start + length :]


def remove(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    start = position(rng, data)
    return data[:start] + data[start + rng.randrange(1, 200) :]


def noise(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    """Keep the start of a file and append random bytes."""
    return data[: rng.choice([4, 8, 16, 32, 64])] + rng.randbytes(rng.randrange(3000))


def join(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Append another file, or replace everything after the start by that of another file."""
    other, at = rng.choice(others), rng.choice([4, 12, 16, 30, 100])
    return data + other if rng.random() < 0.5 else data[:at] + other[at:]


def same(_: random.Random, data: bytes, __: list[bytes]) -> bytes:
    return data


# The worker


def memory(name: str) -> float:
    """Return a value of /proc/self/status in MB, or 0 if it is not available."""
    try:
        found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) / 1024 if found else 0


@contextlib.contextmanager
def measured(answer: Answer) -> Any:
    """Add the peak of additional memory in MB to an answer."""
    before = memory("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    yield
    answer["mb"] = memory("VmHWM") - before


def work(target: Target, folder: Path) -> None:
    """Answer every path on stdin with one line of JSON on stdout."""
    import torch

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, hard))
    use = target.work(folder)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(use(Path(line.rstrip("\n")))), file=answers, flush=True)


class Worker:
    """The process that uses the files; it is restarted after a crash or a timeout."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.errors = kind, folder, folder / "stderr"
        self.start()

    def start(self) -> None:
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz", "--kind", self.kind, "--worker", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        if self.answer(600) != b"ready\n":
            raise RuntimeError(f"the worker does not start: {self.errors.read_text()}")
        self.read = self.errors.stat().st_size

    def answer(self, seconds: float) -> bytes | None:
        """Return a line; it is empty if the process ended, and None if it did not answer in time."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else None

    def ask(self, path: Path) -> tuple[Answer, str]:
        """Return the answer to one file and what was written to stderr."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n".encode())
        self.process.stdin.flush()
        line = self.answer(SECONDS)
        stderr = self.errors.read_bytes()[self.read :].decode(errors="replace")
        self.read += len(stderr.encode())
        if line:
            return json.loads(line), stderr
        text = f"no answer in {SECONDS} seconds" if line is None else "the process ended"
        self.stop()
        self.start()
        return {"outcome": "failed", "text": text}, stderr

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def run(kind: str, n: int, seed: int, first: int = 0, keep: Path | None = None) -> Report:
    """Run a campaign.

    Args:
        kind: `files` or `images`.
        n: Number of cases.
        seed: Seed, which determines each case together with its number.
        first: Number of the first case.
        keep: Folder for the files of failed cases.
    """
    report, target = Report(n, seed), load(kind)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        worker = Worker(kind, folder)
        make = target.cases(folder)
        try:
            for index in range(first, first + n):
                case = make(random.Random(f"{seed} {index}"))
                path = folder / f"{index}.{case.file}"
                path.write_bytes(case.data)
                answer, stderr = worker.ask(path)
                wrong = target.judge(case, path, answer, stderr)
                outcome = "failed" if wrong else answer["outcome"]
                report.outcomes[outcome] += 1
                report.peak_mb[outcome] = max(report.peak_mb.get(outcome, 0), answer.get("mb", 0))
                if wrong:
                    report.failures.append(f"case {index} ({case.name}): {wrong}")
                    if keep:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{seed}-{index}.{case.file}").write_bytes(case.data)
                path.unlink()
        finally:
            worker.stop()
    return report


def load(kind: str) -> Target:
    target: Any = importlib.import_module(f"tests.fuzz_{kind}")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--keep", type=Path, help="folder for the files of failed cases")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(load(options.kind), options.worker)
        return
    report = run(options.kind, options.n, options.seed, options.first, options.keep)
    print(report)
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
