"""`selftpt info`: print versions, devices and the cache, for bug reports."""

from __future__ import annotations

import json
import os
import platform
import re
import warnings
from collections.abc import Callable
from importlib.metadata import distribution, requires, version
from pathlib import Path
from typing import Any

from selftpt.cli.options import Json
from selftpt.version import __version__

PACKAGES = ("torch", "torchvision", "open_clip_torch", "timm", "pillow", "numpy")


def command(as_json: Json = False) -> None:
    """Print versions, devices, the number of threads and the cache. Add the output to a bug report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect()
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, inner in value.items():
                print(f"  {key}: {_text(inner)}")
        else:
            print(f"{name}: {_text(value)}")


def collect() -> dict[str, Any]:
    """Collect what `selftpt info` prints. A value that cannot be determined is replaced by the error."""
    return {
        "selftpt": __version__,
        "python": platform.python_version(),
        "platform": _attempt(platform.platform),
        "packages": {package: _installed_version(package) for package in PACKAGES},
        "devices": _attempt(_devices),
        "threads": _attempt(_threads),
        "cache": _attempt(_cache),
        "extras": _attempt(_extras),
    }


def _attempt(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:  # the command must also work in a broken installation
        return f"error: {type(error).__name__}: {' '.join(str(error).split())}"


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except Exception:
        return None


def _devices() -> list[str]:
    import torch

    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _cache() -> dict[str, Any]:
    from selftpt.cli.options import CacheOptions
    from selftpt.files import cache_folder

    folder = cache_folder()
    return {"folder": str(folder), "mode": CacheOptions().cache_mode, "bytes": _size(folder)}


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(place, file)).st_size
            except OSError:  # deleted by another process
                continue
    return total


def _extras() -> dict[str, bool]:
    """Return for each optional extra whether all its packages are installed."""
    found: dict[str, bool] = {}
    extras = distribution("selftpt").metadata.get_all("Provides-Extra") or []
    for extra in extras:
        needed = [text for text in requires("selftpt") or [] if re.search(rf"""extra == ['"]{extra}['"]""", text)]
        packages = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in needed]
        found[str(extra)] = all(_installed_version(package) is not None for package in packages)
    return found


def _text(value: Any) -> str:
    if value is None:
        return "not installed"
    if isinstance(value, bool):
        return "installed" if value else "not installed"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
