"""The memory budget for staging, and the arena, the pool of blocks within this budget."""

from __future__ import annotations

import os

from flowstone._native import Arena, Device
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
    """The default memory budget: a quarter of the available memory, divided by the number of ranks on this node, which
    torchrun puts into the environment.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing = int(ranks) if ranks.isdigit() and int(ranks) > 0 else 1
    return max(BUDGET_BYTES_MIN, available_bytes() // ARENA_SHARE_OF_AVAILABLE // sharing)


def open_write_arena(store: Store, budget_bytes: int, *, is_far: bool = False) -> Arena:
    """The arena for saves into `store`, of at most `budget_bytes`. Address space is reserved, and no memory is touched
    yet.

    is_far  whether devices copy into the arena. Then its blocks are as long as the parts in which device memory is
            copied, if the budget allows that
    raises  BudgetError if the budget is smaller than two requests, or the system has no address space for it
    """
    settings = store.settings("write")
    request_bytes = settings.tuning.request_bytes
    if settings.origin == "tuned" and "request_bytes" not in settings.explicit and budget_bytes < 2 * request_bytes:
        request_bytes = WRITE_DEFAULTS.request_bytes  # as the budget is too small for the request size from the tuning
    block_bytes = request_bytes
    while is_far and block_bytes < DEVICE_WINDOW_BYTES and 2 * block_bytes * DEVICE_BLOCKS_MIN <= budget_bytes:
        block_bytes *= 2
    return _open_arena(budget_bytes, request_bytes, block_bytes)


def open_read_arena(store: Store, device: Device | None = None) -> Arena:
    """The arena for one load or check of a checkpoint in `store`; the caller closes it. It is on the NUMA node of
    `device`, if that is known.
    """
    request_bytes = store.settings("read").tuning.request_bytes
    arena = _open_arena(READ_ARENA_BYTES, request_bytes, request_bytes)
    if device is not None:
        from flowstone.stage.numa import node_of  # imported here: most processes have no GPU

        node = node_of(device.pci_address)[0]
        if node >= 0:
            arena.place(node)  # if the system refuses that node, it chooses one by itself
    return arena


def _open_arena(budget_bytes: int, request_bytes: int, block_bytes: int) -> Arena:
    """Open an arena whose blocks are at least as long as one request, so that a request fits into one block."""
    if budget_bytes < 2 * request_bytes:
        raise BudgetError(
            f"a budget of {budget_bytes} bytes cannot hold two requests of {request_bytes}",
            next="raise budget_bytes, or lower request_bytes in EngineOptions",
        )
    try:
        return Arena(budget_bytes=budget_bytes, block_bytes=block_bytes, background=True)
    except OSError as error:
        raise BudgetError(
            f"the operating system refused {budget_bytes} bytes of staging memory", reason=error.strerror,
            next="raise the limits on address space and threads (ulimit -v, -u, pids.max), or lower budget_bytes",
        ) from error
