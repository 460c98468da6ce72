"""FlowstoneStager copies a state into memory that is reused from save to save. It replaces torch's DefaultStager."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from flowstone._native import guarded_copy_refusal
from flowstone.adapters.dcp.staged_copies import StagedCopies
from flowstone.adapters.dcp.staged_state import StagedState
from flowstone.adapters.dcp.staging_memory import StagingMemory
from flowstone.config import BLOCK_BYTES, DEADLINE_S, whole_number
from flowstone.errors import ArgumentError, BudgetError, ClosedError
from flowstone.stage.fence import OptimizerFence

_BUFFERS_MAX = 2  # number of buffers: one is written to the disk while the next save is staged into the other
# Seconds to wait before a second buffer is allocated, as the previous save's thread may be about to release the first
# one.
_SECOND_BUFFER_WAIT_S = 0.02
_POLL_S = 0.002
_COLLECT_S = 0.5  # seconds of waiting until garbage is collected, which may free buffers in reference cycles


class FlowstoneStager:
    """Stages (copies) states for `dcp.async_save`. If the system allows it, `stage` only write-protects the state's
    memory. Then a thread copies the state. Until a page is copied, writes to it wait. On other systems `stage` copies
    everything. A save reuses the memory of an earlier save once there are no references to the tensors that were staged
    there. Other processes can map this memory.

    budget_bytes   host memory for staged states; None: the size of two states
    in_background  True: `stage` returns a Future immediately, and `async_save` returns an AsyncSaveResponse. Wait for
                   its `staging_completion` before you change the state
    optimizers     the optimizers that change the state. Their steps wait until the state may change
    guard          False: `stage` copies everything before it returns, and protects nothing
    deadline_s     how many seconds to wait for memory that an earlier save still uses

    A staged state never changes when the original does. A FlowstoneWriter creates its own stager. A stager is for one
    thread at a time. `close` releases the memory.
    """

    _synchronize_after_execute = False

    def __init__(
        self, *, budget_bytes: int | None = None, in_background: bool = False, optimizers: Iterable[object] = (),
        guard: bool = True, deadline_s: float = DEADLINE_S,
    ) -> None:
        self._budget_bytes = None if budget_bytes is None else whole_number("budget_bytes", budget_bytes)
        if self._budget_bytes is not None and self._budget_bytes < 1:
            raise ArgumentError(f"budget_bytes must be at least 1, got {budget_bytes}", next="leave it out")
        self._guard = guard and not in_background
        self._deadline_s, self._buffers, self._is_closed = deadline_s, list[StagingMemory](), False
        self._thread = ThreadPoolExecutor(1, "flowstone-stage") if in_background else None
        self._last: Future[dict[str, Any]] | None = None
        self._fence = OptimizerFence(self._await_copy)
        self._fence.guard(optimizers)

    @staticmethod
    def guard_refusal() -> str:
        """Why `stage` cannot write-protect memory on this system; "" if it can."""
        return guarded_copy_refusal()

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: Mapping[str, Any], **_: object) -> dict[str, Any] | Future[dict[str, Any]]:
        """Copy the state, with its tensors, into host memory. Returns the copy; with `in_background`, a Future of the
        copy.

        raises  BudgetError  there is not enough memory, or earlier saves use it for longer than `deadline_s`
                UnsupportedStateError  a tensor or an object cannot be copied; the error names it
        """
        if self._is_closed:
            raise ClosedError("this FlowstoneStager is closed", next="create another one")
        if self._thread is None:
            return self._staged(state_dict)
        self._last = self._thread.submit(self._staged, state_dict)
        return self._last

    def synchronize_staging(self) -> None:
        """Wait until the state may change."""
        if self._last is not None:
            self._last.result()

    def _await_copy(self) -> None:
        """Wait for the copy, before an optimizer's step. If the copy fails, the copy's Future raises the error; the
        step does not.
        """
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Release the memory, once no staged tensors are in use."""
        self._is_closed = True
        self._fence.remove_hooks()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._buffers.clear()

    def _staged(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        copies = StagedCopies()
        planned = {key: copies.plan(value, str(key)) for key, value in state_dict.items()}
        if not copies.tensors:
            return {key: make() for key, make in planned.items()}
        memory = self._buffer(max(copies.bytes, BLOCK_BYTES), pinned=copies.has_device_tensors)
        copies.run(memory, guard=self._guard)
        staged = {key: make() for key, make in planned.items()}
        if self._guard:
            return StagedState(staged, memory.wait)
        memory.wait()
        return staged

    def _buffer(self, size_bytes: int, *, pinned: bool) -> StagingMemory:
        """A free buffer of this size. Waits while earlier saves use all buffers."""
        if self._budget_bytes is not None and size_bytes > self._budget_bytes:
            raise BudgetError(
                "the state does not fit into budget_bytes", expected=f"{self._budget_bytes} bytes",
                found=f"{size_bytes} bytes", next="raise budget_bytes of FlowstoneStager",
            )
        begin, collected = time.monotonic(), False
        while True:
            waited = time.monotonic() - begin
            may_grow = not self._buffers or waited > _SECOND_BUFFER_WAIT_S
            memory = self._free_buffer(size_bytes, pinned=pinned, may_grow=may_grow)
            if memory is not None:
                return memory
            if waited > self._deadline_s:
                raise BudgetError(
                    f"earlier saves have used all staging memory for {waited:.0f} s",
                    needed=f"{size_bytes} bytes",
                    next="before you start save N, wait for the future of save N - 2; and keep no references to staged "
                    "states",
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
        buffers = [buffer for buffer in self._buffers if not buffer.is_free]
        used = sum(buffer.bytes for buffer in buffers)
        if len(buffers) == _BUFFERS_MAX or (self._budget_bytes is not None and used + size_bytes > self._budget_bytes):
            return None
        self._buffers = buffers  # this frees buffers that are too small, before a new one is allocated
        buffers.append(StagingMemory(size_bytes, pinned=pinned))
        return buffers[-1]
