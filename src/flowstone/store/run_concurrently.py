"""Runs independent calls of a store at the same time, if each call waits for a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from flowstone.store.base import Names

T = TypeVar("T")
_CONCURRENT_MAX = 16


def run_concurrently(store: Names, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run all calls, and return their results in order. The calls run concurrently if the store is `distant`, and
    otherwise one after the other.

    Once all calls have ended, raises the error of the first one, in order, that failed.
    """
    if len(calls) < 2 or not is_distant(store):
        return [call() for call in calls]
    from concurrent.futures import ThreadPoolExecutor  # imported here, as most stores need no threads

    with ThreadPoolExecutor(min(_CONCURRENT_MAX, len(calls)), thread_name_prefix="flowstone-fetch") as threads:
        futures = [threads.submit(call) for call in calls]
    return [future.result() for future in futures]


def is_distant(store: Names) -> bool:
    """Whether each call of a store waits for a server."""
    capabilities = getattr(store, "capabilities", None)
    return capabilities is not None and capabilities.distant
