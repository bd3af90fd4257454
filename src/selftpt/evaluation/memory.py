"""The most memory that was used, by the GPU where there is one, else by the process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak(device: torch.device) -> None:
    """Count from now on; where the system cannot, the count is of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            RESET.write_text("5")


def peak_megabytes(device: torch.device) -> float:
    """The peak since `forget_peak`, in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
