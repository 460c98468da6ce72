"""The memory budget for staging, and the one pool that takes it."""

from __future__ import annotations

import os

from flowstone import _native
from flowstone.config import (
    ARENA_SHARE_OF_AVAILABLE,
    BUDGET_BYTES_MIN,
    DEVICE_BLOCKS_MIN,
    DEVICE_WINDOW_BYTES,
    READ_ARENA_BYTES,
    WRITE_DEFAULTS,
)
from flowstone.errors import BudgetError
from flowstone.store.base import Store
from flowstone.store.mount import available_bytes


def default_budget_bytes() -> int:
    """A quarter of the available memory, divided by the number of ranks on this node, as torchrun gives it."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing = int(ranks) if ranks.isdigit() and int(ranks) > 0 else 1
    return max(BUDGET_BYTES_MIN, available_bytes() // ARENA_SHARE_OF_AVAILABLE // sharing)


def open_write_arena(store: Store, budget_bytes: int, *, is_far: bool = False) -> _native.Arena:
    """The pool for saves into `store`, of at most `budget_bytes`. Maps address space, touches no page.

    is_far  devices copy into it: its blocks are as long as their windows, where the budget holds enough of them
    raises  BudgetError if the budget is smaller than two requests, or the system has no address space for it
    """
    settings = store.settings("write")
    request_bytes = settings.tuning.request_bytes
    if settings.origin == "tuned" and "request_bytes" not in settings.explicit and budget_bytes < 2 * request_bytes:
        request_bytes = WRITE_DEFAULTS.request_bytes  # a tuned request size must not make a sufficient budget too small
    block_bytes = request_bytes
    while is_far and block_bytes < DEVICE_WINDOW_BYTES and 2 * block_bytes * DEVICE_BLOCKS_MIN <= budget_bytes:
        block_bytes *= 2
    return _open_arena(budget_bytes, request_bytes, block_bytes)


def open_read_arena(store: Store, device: _native.Device | None = None) -> _native.Arena:
    """The pool for one load or check of a checkpoint in `store`; the caller closes it. It lies near `device`, if the
    system tells where that is.
    """
    request_bytes = store.settings("read").tuning.request_bytes
    arena = _open_arena(READ_ARENA_BYTES, request_bytes, request_bytes)
    if device is not None:
        from flowstone.stage.numa import node_of  # imported here: most processes have no GPU

        node = node_of(device.pci_address)[0]
        if node >= 0:
            arena.place(node)  # if that is refused, it lies where the system puts it
    return arena


def _open_arena(budget_bytes: int, request_bytes: int, block_bytes: int) -> _native.Arena:
    """With blocks of one request or more, so that the engine can fill each with one."""
    if budget_bytes < 2 * request_bytes:
        raise BudgetError(
            f"a budget of {budget_bytes} bytes cannot hold two requests of {request_bytes}",
            next="raise budget_bytes, or lower request_bytes in EngineOptions",
        )
    try:
        return _native.Arena(budget_bytes=budget_bytes, block_bytes=block_bytes, background=True)
    except OSError as error:
        raise BudgetError(
            f"the operating system refused {budget_bytes} bytes of staging memory", reason=error.strerror,
            next="raise the limits on address space and threads (ulimit -v, -u, pids.max), or lower budget_bytes",
        ) from error
