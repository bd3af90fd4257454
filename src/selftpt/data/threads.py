"""Work in threads, results in order."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], ahead: int, threads: int | None = None
) -> Iterator[Result]:
    """`work` of each item, in order, by threads that keep up to `ahead` results ready."""
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        waiting: collections.deque[Future[Result]] = collections.deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
