"""Mutation fuzz of what selftpt reads: `python -m tests.fuzz --kind files --n 5000 --seed 1`, or `--kind images`.

A worker process uses every mutated file; the parent watches its time and what it writes to stderr, and judges its
answer. A case is repeated with its seed and number: `--n 1 --seed 1 --first 1234 --keep folder` also keeps its file.
What is mutated, how it is used and which answers are right is said by the modules `tests.fuzz_files` and
`tests.fuzz_images`, which have three functions each: `work`, `cases` and `judge`.
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

SECONDS = 60  # for one case, on a busy machine
KINDS = ("files", "images")

Answer = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A mutated file: what was done to it, the file name that the worker is given, and what `judge` needs to know."""

    name: str
    file: str
    data: bytes
    expected: Any = None


class Target(Protocol):
    """A module that says what is fuzzed."""

    def work(self, folder: Path) -> Callable[[Path], Answer]:
        """In the worker: what uses a file; an answer has its `outcome`, in a word."""

    def cases(self, folder: Path) -> Callable[[random.Random], Case]:
        """In the parent, after the worker has started with the same folder: what makes a case."""

    def judge(self, case: Case, path: Path, answer: Answer, said: str) -> str | None:
        """What is wrong with the answer to a file, or with what was written to stderr; None if nothing is."""


@dataclass(frozen=True)
class Report:
    """What a campaign found; `failures` has one line per failed case."""

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


# Mutations of any file: each takes a file and changes it, with others at hand


def place(rng: random.Random, data: bytes) -> int:
    """Mostly in the header or near the end."""
    end = len(data)
    return min(
        rng.choice([rng.randrange(32), rng.randrange(128), end - 1 - rng.randrange(min(end, 300)), rng.randrange(end)]),
        end - 1,
    )


def flip(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        changed[place(rng, data)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    return data[: rng.randrange(len(data))]


def repeat(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    start, length = place(rng, data), rng.randrange(1, 400)
    return data[:start] + data[start : start + length] * rng.choice([2, 3, 1000]) + data[start + length :]


def remove(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    start = place(rng, data)
    return data[:start] + data[start + rng.randrange(1, 200) :]


def noise(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    """A valid start, then anything."""
    return data[: rng.choice([4, 8, 16, 32, 64])] + rng.randbytes(rng.randrange(3000))


def join(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Two files in one: one after the other, or the start of one with the rest of the other."""
    other, at = rng.choice(others), rng.choice([4, 12, 16, 30, 100])
    return data + other if rng.random() < 0.5 else data[:at] + other[at:]


def same(_: random.Random, data: bytes, __: list[bytes]) -> bytes:
    return data


# The worker


def memory(name: str) -> float:
    """A line of /proc/self/status in MB; 0 where there is none."""
    try:
        found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) / 1024 if found else 0


@contextlib.contextmanager
def measured(answer: Answer) -> Any:
    """Add to an answer how much more memory was used at most, in MB."""
    before = memory("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    yield
    answer["mb"] = memory("VmHWM") - before


def work(target: Target, folder: Path) -> None:
    """Answer every path on stdin with a line of JSON on stdout."""
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
    """The process that uses the files, started again after one that it does not survive."""

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
        """A line, empty if the process ended, None if it did not answer in time."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else None

    def ask(self, path: Path) -> tuple[Answer, str]:
        """The answer to one file and what was written to stderr."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n".encode())
        self.process.stdin.flush()
        line = self.answer(SECONDS)
        said = self.errors.read_bytes()[self.read :].decode(errors="replace")
        self.read += len(said.encode())
        if line:
            return json.loads(line), said
        text = f"no answer in {SECONDS} seconds" if line is None else "the process ended"
        self.stop()
        self.start()
        return {"outcome": "failed", "text": text}, said

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def run(kind: str, n: int, seed: int, first: int = 0, keep: Path | None = None) -> Report:
    """Run a campaign.

    Args:
        kind: `files` or `images`.
        n: The number of cases.
        seed: Decides the cases together with their numbers.
        first: The number of the first case.
        keep: Folder in which the files of failed cases are kept.
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
                answer, said = worker.ask(path)
                wrong = target.judge(case, path, answer, said)
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
