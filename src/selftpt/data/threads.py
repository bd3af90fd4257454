"""Parallel work in threads, with results in order."""

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
    """Apply a function to items in threads, and yield the results in the order of the items.

    Args:
        work: The function.
        items: The items. They are read as the work proceeds.
        ahead: The number of results that are computed in advance.
        threads: The number of threads; by default that of the processors, at most 8.
    """
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
