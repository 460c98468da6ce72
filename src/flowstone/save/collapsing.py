"""Collapses into huge pages the memory that is captured lazily (after `save` returns): the kernel can watch huge pages
for writes at almost no cost.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import COLLAPSE_BYTES_MIN, COLLAPSE_SHARE, COLLAPSE_SKIPS_MAX, EngineOptions
from flowstone.events.phases import Event
from flowstone.events.rare_events import PagesCollapsed
from flowstone.log import log
from flowstone.session.futures import Save
from flowstone.state import StateDescription
from flowstone.table.pieces import Places

_ENDS_S = 60.0  # longest wait for a pass that was told to stop; it stops after the huge page that it is making


class HostMemory(msgspec.Struct, frozen=True, eq=False):
    """Contiguous ranges of host memory: their addresses, and their lengths in bytes. Keeps no memory alive."""

    address: NDArray[np.uint64]
    length: NDArray[np.uint64]

    @classmethod
    def of(cls, places: Places, length: NDArray[np.uint64], chosen: NDArray[np.bool_]) -> HostMemory:
        """The memory of those `chosen` tensors, or parts of tensors, that are contiguous in host memory."""
        mine = chosen & places.host_runs & (length > 0)
        return cls(places.address[mine], length[mine].astype(np.uint64, copy=False))

    def seen_in(self, addresses: NDArray[np.uint64]) -> HostMemory:
        seen = np.isin(self.address, addresses)
        return HostMemory(self.address[seen], self.length[seen])


class PageCollapser:
    """Collapses the memory of one Checkpointer's state into huge pages, in passes over that memory. One pass runs at a
    time, on a native thread (native/watch/collapse.h).

    A pass runs at most until the next save begins. No pass begins during a capture, because the system refuses to
    collapse watched memory. A later pass takes microseconds for memory that is already in huge pages.
    """

    def __init__(self, options: EngineOptions, emit: Callable[[Event], None]) -> None:
        self._is_on, self._emit = options.collapse and options.watch != "samples", emit
        self._lock = Lock()  # `prepare` and the writer's thread begin passes
        self._pass: _native.Collapse | None = None
        self._step: int | None = None  # the save after which the pass began
        self._newest: Save | None = None  # newest save that has begun
        self._seen = np.zeros(0, np.uint64)  # addresses of the memory that the previous save captured lazily
        self._skips = self._skips_next = 0  # how many saves begin no pass, because the last one made no huge page

    def begin(self, step: int | None, memory: HostMemory, *, outlives_save: bool) -> None:
        """Begin a pass over memory that save `step` (None: `prepare`) captures lazily. Waits at most 60 s until the
        previous pass has stopped, but not for the new one. Can be called on any thread.

        outlives_save  whether this memory exists after the save. False: only memory that the previous save had at the
                       same address is collapsed
        """
        with self._lock:
            self._report()
            if not self._is_on:
                return
            chosen = memory if outlives_save else memory.seen_in(self._seen)
            self._seen = memory.address
            if int(chosen.length.sum()) < COLLAPSE_BYTES_MIN:
                return
            if refusal := _native.collapse_refusal():
                self._is_on = False
                self._emit(PagesCollapsed(step, int(chosen.length.sum()), 0, 0, 0.0, refusal))
                return
            newest = self._newest
            if newest is not None and not newest.captured.done():
                return  # a save has begun; a pass begins after it
            if self._skips > 0:
                self._skips -= 1
                return
            with suppress(OSError):  # the system refused to start a thread; the next save tries again
                self._pass, self._step = _native.Collapse(chosen.address, chosen.length, share=COLLAPSE_SHARE), step
            if self._newest is not newest:  # a save has begun meanwhile, perhaps before there was a pass to stop
                self._report()

    def prepare(self, described: StateDescription) -> None:
        """Begin a pass over the memory that saves of this state will capture lazily."""
        if described.optimizers:
            lazy = np.array(described.layout.lazy, np.bool_)
            memory = HostMemory.of(described.places, described.layout.pieces.lengths(), lazy)
            self.begin(None, memory, outlives_save=True)

    def pause(self, save: Save | None = None) -> None:
        """Stop the current pass, because a save begins. Returns without waiting for the pass. Can be called on any
        thread.
        """
        if save is not None:
            self._newest = save
        current = self._pass
        if current is not None:
            current.stop()

    def end(self) -> None:
        """Begin no further pass. Wait for the current one to stop, and report it."""
        self._is_on = False
        with self._lock:
            self._report()

    def _report(self) -> None:
        """End the current pass, and emit its result."""
        ended, self._pass = self._pass, None
        if ended is None:
            return
        ended.stop()
        if not ended.wait(_ENDS_S):
            self._is_on = False
            reason = f"the system has not finished a huge page in {_ENDS_S:g} s"
            log.warning(
                "the thread fs-collapse, which makes huge pages, cannot be stopped: %s; saves continue with small "
                "pages", reason,
            )
            self._emit(PagesCollapsed(self._step, ended.wanted_bytes, 0, 0, 0.0, reason))
            return
        if ended.refused_bytes and not ended.collapsed_bytes:
            self._skips = self._skips_next = min(2 * self._skips_next + 1, COLLAPSE_SKIPS_MAX)
        elif ended.collapsed_bytes:
            self._skips_next = 0
        self._emit(PagesCollapsed(
            self._step, ended.wanted_bytes, ended.huge_bytes, ended.collapsed_bytes, ended.processor_s, _reason(ended)
        ))


def _reason(ended: _native.Collapse) -> str:
    """A text that says why some of the memory is still in small pages; "" if all is in huge pages."""
    refused = f"were refused huge pages ({os.strerror(ended.error)})"
    counts = {
        "share 2 MiB with other memory": ended.edge_bytes, refused: ended.refused_bytes,
        "are not in memory, or are shared with other processes": ended.scattered_bytes,
        "were not reached": ended.left_bytes,
    }
    return ", ".join(f"{count} bytes {why}" for why, count in counts.items() if count)
