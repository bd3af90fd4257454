"""Locks between processes: files that the operating system unlocks when their holder ends, however it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from selftpt.errors import SelfTPTError


@contextlib.contextmanager
def lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file `path`, which is deleted afterwards.

    Every call opens the file anew, so threads of one process exclude each other as processes do. The lock is the
    operating system's (`flock`; its counterpart on Windows): it is released when its holder is killed, and a lock file
    that was left behind blocks nobody.

    Args:
        path: The lock file; its folder is created.
        wait: Whether to wait until the lock is free.

    Yields:
        Whether the lock is held; always true with `wait`.

    Raises:
        SelfTPTError: If the file cannot be created, or its file system has no locks.
    """
    # The fallback of filelock is a file whose existence is the lock: after a crash it could block others.
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
            # Deleted while it is held: whoever opened it before finds it unlinked and opens a new one.
            with contextlib.suppress(OSError):  # Windows does not delete an open file
                path.unlink()
            held.release()
