"""What the benchmarks share: interleaved timing, and the memory of one job in a process of its own."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def interleaved(jobs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each job in rounds in which all take turns; a round before them is not counted.

    A short job is done again until it has taken two seconds, and its mean is taken.
    """
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            gc.collect()
            begin, count = time.perf_counter(), 0
            while count == 0 or time.perf_counter() - begin < 2:
                job()
                count += 1
            seconds[name].append((time.perf_counter() - begin) / count)
    return {name: times[1:] for name, times in seconds.items()}


def ratio(over: list[float], under: list[float]) -> float:
    """The median over rounds of the ratio within a round: a machine's speed changes from minute to minute."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def extra_memory(job: Callable[[], object]) -> float:
    """Megabytes (10^6) that a job needs at its peak above what is held before it. Linux only."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    job()
    return (status("VmHWM") - before) / 1e6


def in_own_process(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script again with other arguments; the JSON object on its last line."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
