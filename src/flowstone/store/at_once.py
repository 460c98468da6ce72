"""Calls of a store that do not depend on each other: at once where each waits for a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from flowstone.store.base import Names

T = TypeVar("T")
_AT_ONCE_MAX = 16


def at_once(store: Names, calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all calls, in their order: one after the other, or, of a store that is `distant`, at once.

    Raises what the first of them, in their order, has raised, once all have ended.
    """
    if len(calls) < 2 or not is_distant(store):
        return [call() for call in calls]
    from concurrent.futures import ThreadPoolExecutor  # imported here: most stores are near

    with ThreadPoolExecutor(min(_AT_ONCE_MAX, len(calls)), thread_name_prefix="flowstone-fetch") as threads:
        begun = [threads.submit(call) for call in calls]
    return [each.result() for each in begun]


def is_distant(store: Names) -> bool:
    """Whether each call of a store waits for a server."""
    capabilities = getattr(store, "capabilities", None)
    return capabilities is not None and capabilities.distant
