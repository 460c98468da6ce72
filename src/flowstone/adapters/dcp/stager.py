"""FlowstoneStager: copies a state into memory that is kept from save to save, in the place of DefaultStager."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from flowstone import _native
from flowstone.adapters.dcp.staged_copies import StagedCopies
from flowstone.adapters.dcp.staged_state import StagedState
from flowstone.adapters.dcp.staging_memory import StagingMemory
from flowstone.config import BLOCK_BYTES, DEADLINE_S, whole_number
from flowstone.errors import ArgumentError, BudgetError, ClosedError
from flowstone.stage.fence import Fence

_BUFFERS_MAX = 2  # one is written to the disk while the next save is staged into the other
_PATIENCE_S = 0.02  # before a second one is made: the thread of the save before may be about to let go of the first
_POLL_S = 0.002
_COLLECT_S = 0.5  # of waiting, until what only the garbage collector can free is freed


class FlowstoneStager:
    """Stages for `dcp.async_save`. Where the system lets it, `stage` only protects the state's memory against writes: a
    thread copies it, and a write to what is not copied yet waits for that. Elsewhere `stage` copies all. The memory of
    one save is used again by a later one, once nothing holds its staged tensors any more; other processes map it.

    budget_bytes  of host memory for staged states; None: as much as two of them take
    in_background  `stage` returns a Future at once, so that `async_save` returns an AsyncSaveResponse: wait for its
                   `staging_completion` before anything of the state changes
    optimizers     that change the state: their steps wait by themselves until it may change
    guard          False: `stage` copies all before it returns, and protects nothing
    deadline_s    how long to wait for memory that an earlier save still uses

    What was staged does not change with the state, in whatever executor it is written. A FlowstoneWriter stages by one
    of its own. Calls from one thread at a time. `close` gives the memory back.
    """

    _synchronize_after_execute = False

    def __init__(
        self, *, budget_bytes: int | None = None, in_background: bool = False, optimizers: Iterable[object] = (),
        guard: bool = True, deadline_s: float = DEADLINE_S,
    ) -> None:
        self._budget_bytes = None if budget_bytes is None else whole_number("budget_bytes", budget_bytes)
        if self._budget_bytes is not None and self._budget_bytes < 1:
            raise ArgumentError(f"budget_bytes {budget_bytes} is no room at all", next="leave it out")
        self._guard = guard and not in_background
        self._deadline_s, self._buffers, self._is_closed = deadline_s, list[StagingMemory](), False
        self._thread = ThreadPoolExecutor(1, "flowstone-stage") if in_background else None
        self._last: Future[dict[str, Any]] | None = None
        self._fence = Fence(self._let_change)
        self._fence.guard(optimizers)

    @staticmethod
    def guard_refusal() -> str:
        """Why `stage` can protect no memory here; empty where it can."""
        return _native.guarded_copy_refusal()

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: Mapping[str, Any], **_: object) -> dict[str, Any] | Future[dict[str, Any]]:
        """A copy of the state, whose tensors lie in host memory; a Future of it, if in the background.

        raises  BudgetError  there is no memory for it, or an earlier save holds all of it until the deadline
                UnsupportedStateError  a tensor or an object that cannot be copied, by name
        """
        if self._is_closed:
            raise ClosedError("this FlowstoneStager is closed", next="make another one")
        if self._thread is None:
            return self._staged(state_dict)
        self._last = self._thread.submit(self._staged, state_dict)
        return self._last

    def synchronize_staging(self) -> None:
        """Wait until the state may change."""
        if self._last is not None:
            self._last.result()

    def _let_change(self) -> None:
        """What has failed is told by the futures, not by a step."""
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Give the memory back, once nothing uses what was staged."""
        self._is_closed = True
        self._fence.lift()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._buffers.clear()

    def _staged(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        copies = StagedCopies()
        planned = {key: copies.plan(value, str(key)) for key, value in state_dict.items()}
        if not copies.tensors:
            return {key: make() for key, make in planned.items()}
        memory = self._buffer(max(copies.bytes, BLOCK_BYTES), pinned=copies.is_far)
        copies.run(memory, guard=self._guard)
        staged = {key: make() for key, make in planned.items()}
        if self._guard:
            return StagedState(staged, memory.wait)
        memory.wait()
        return staged

    def _buffer(self, size_bytes: int, *, pinned: bool) -> StagingMemory:
        """Memory that nothing uses. Waits for what an earlier save does use."""
        if self._budget_bytes is not None and size_bytes > self._budget_bytes:
            raise BudgetError(
                "a staged state does not fit into its budget", expected=f"{self._budget_bytes} bytes",
                found=f"{size_bytes} bytes", next="raise budget_bytes of FlowstoneStager",
            )
        begin, collected = time.monotonic(), False
        while True:
            waited = time.monotonic() - begin
            may_grow = not self._buffers or waited > _PATIENCE_S
            found = self._free_buffer(size_bytes, pinned=pinned, may_grow=may_grow)
            if found is not None:
                return found
            if waited > self._deadline_s:
                raise BudgetError(
                    f"earlier saves hold all staging memory since {waited:.0f} s", needed=f"{size_bytes} bytes",
                    next="wait for the future of the save before the last, and let go of staged states",
                )
            if waited > _COLLECT_S and not collected:
                gc.collect()
                collected = True
            time.sleep(_POLL_S)

    def _free_buffer(self, size_bytes: int, *, pinned: bool, may_grow: bool) -> StagingMemory | None:
        for buffer in self._buffers:
            if buffer.is_free and buffer.bytes >= size_bytes and buffer.is_pinned == pinned:
                return buffer
        if not may_grow:
            return None
        kept = [buffer for buffer in self._buffers if not buffer.is_free]
        used = sum(buffer.bytes for buffer in kept)
        if len(kept) == _BUFFERS_MAX or (self._budget_bytes is not None and used + size_bytes > self._budget_bytes):
            return None
        self._buffers = kept  # those that are too small go before the new one comes
        kept.append(StagingMemory(size_bytes, pinned=pinned))
        return kept[-1]
