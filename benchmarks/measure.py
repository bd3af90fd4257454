"""Helpers of the benchmarks: interleaved timing, and the peak memory of a job in a process of its own."""

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
    """Time jobs in rounds; in each round every job runs once, in turn.

    A first round is not counted. A short job is repeated within a round until two seconds have passed, and its mean
    time counts.

    Returns:
        For each job, its seconds in each round.
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
    """Return the median over rounds of the ratio of two jobs' seconds.

    Ratios are computed within a round, because the speed of a machine changes from minute to minute.
    """
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def extra_memory(job: Callable[[], object]) -> float:
    """Return the peak memory of a job above the memory in use before it, in MB (10^6 bytes). Linux only."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    job()
    return (status("VmHWM") - before) / 1e6


def in_own_process(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script in a new process, and return the JSON object on the last line of its output."""
    process = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed: {process.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result
