"""Locks between processes: lock files that the operating system releases when the process that holds them ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from selftpt.errors import SelfTPTError


@contextlib.contextmanager
def lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file `path`, which is deleted afterwards.

    Every call opens the file again, so the lock also works between threads of one process. The operating system holds
    the lock (`flock`, or its counterpart on Windows) and releases it when the process ends, even if it is killed. A
    lock file that remains after that blocks nobody.

    Args:
        path: The lock file; its folder is created.
        wait: Whether to wait until the lock is free.

    Yields:
        Whether the lock is held; always true with `wait`.

    Raises:
        SelfTPTError: The file cannot be created, or its file system does not support locks.
    """
    # filelock's fallback uses the existence of a file as the lock, which would block other processes after a crash.
    held = FileLock(path, timeout=-1 if wait else 0, poll_interval=0.01, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(Timeout):
            held.acquire()
    except OSError as error:
        raise SelfTPTError(f"cannot lock {path}: {error.strerror or error}") from error
    try:
        yield held.is_locked
    finally:
        if held.is_locked:
            # Deleted while it is held: a process that opened it before notices this and opens a new file.
            with contextlib.suppress(OSError):  # Windows cannot delete an open file
                path.unlink()
            held.release()
