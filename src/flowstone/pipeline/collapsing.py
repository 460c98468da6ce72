"""Collapses memory that is captured after `save` returns into huge pages, in which a watch costs next to nothing."""

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
from flowstone.events import Event
from flowstone.log import log
from flowstone.pipeline.futures import Save
from flowstone.save_events import PagesCollapsed
from flowstone.state import Described
from flowstone.table.pieces import Places

_ENDS_S = 60.0  # a stopped pass ends after its current huge page, unless the system does not return from making it


class HostMemory(msgspec.Struct, frozen=True, eq=False):
    """Runs of host memory: their addresses, and their lengths in bytes. Keeps no memory alive."""

    address: NDArray[np.uint64]
    length: NDArray[np.uint64]

    @classmethod
    def of(cls, places: Places, length: NDArray[np.uint64], chosen: NDArray[np.bool_]) -> HostMemory:
        """The memory of those `chosen` pieces that are one run of host bytes."""
        mine = chosen & places.host_runs & (length > 0)
        return cls(places.address[mine], length[mine].astype(np.uint64, copy=False))

    def seen_in(self, addresses: NDArray[np.uint64]) -> HostMemory:
        seen = np.isin(self.address, addresses)
        return HostMemory(self.address[seen], self.length[seen])


class Collapsing:
    """The collapse passes of one Checkpointer, one at a time, each on a native thread (native/collapse.h).

    A pass runs until the next save begins. None begins while a save is captured: memory that is watched is refused. A
    later pass checks memory that is in huge pages already in microseconds.
    """

    def __init__(self, options: EngineOptions, emit: Callable[[Event], None]) -> None:
        self._is_on, self._emit = options.collapse and options.watch != "samples", emit
        self._lock = Lock()  # `prepare` and the writer's thread begin passes
        self._pass: _native.Collapse | None = None
        self._step: int | None = None  # after which it began
        self._newest: Save | None = None  # that has begun
        self._seen = np.zeros(0, np.uint64)  # addresses at the save before
        self._skips = self._skips_next = 0  # saves after which no pass begins, as the last one made nothing

    def begin(self, step: int | None, memory: HostMemory, *, stays: bool) -> None:
        """Begin a pass over memory that a save (None: `prepare`) has found. Any thread. Returns at once.

        stays  whether the memory outlives this save; False: only what the save before had at the same address does
        """
        with self._lock:
            self._report()
            if not self._is_on:
                return
            wanted = memory if stays else memory.seen_in(self._seen)
            self._seen = memory.address
            if int(wanted.length.sum()) < COLLAPSE_BYTES_MIN:
                return
            if refusal := _native.collapse_refusal():
                self._is_on = False
                self._emit(PagesCollapsed(step, int(wanted.length.sum()), 0, 0, 0.0, refusal))
                return
            newest = self._newest
            if newest is not None and not newest.captured.done():
                return  # a pass begins after that one
            if self._skips > 0:
                self._skips -= 1
                return
            with suppress(OSError):  # the system refuses a thread now; the next save asks again
                self._pass, self._step = _native.Collapse(wanted.address, wanted.length, share=COLLAPSE_SHARE), step
            if self._newest is not newest:  # it has begun meanwhile, perhaps before there was a pass to stop
                self._report()

    def prepare(self, described: Described) -> None:
        """Begin a pass over the memory that saves of this state will capture late, if optimizers wait for them."""
        if described.optimizers:
            lazy = np.array(described.layout.lazy, np.bool_)
            self.begin(None, HostMemory.of(described.places, described.layout.pieces.lengths(), lazy), stays=True)

    def pause(self, save: Save | None = None) -> None:
        """Stop the pass, as a save begins. Returns at once. Any thread."""
        if save is not None:
            self._newest = save
        current = self._pass
        if current is not None:
            current.stop()

    def end(self) -> None:
        """Begin no more passes, and report the last one."""
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
            reason = f"the system has not returned from making one huge page for {_ENDS_S:g} s, and no more are made"
            log.warning("fs-collapse, a background thread, is left running: %s; saves go on in small pages", reason)
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
    """Why some of the memory is in small pages; "" if none is."""
    refused = f"were refused huge pages ({os.strerror(ended.error)})"
    counts = {
        "share 2 MiB with other memory": ended.edge_bytes, refused: ended.refused_bytes,
        "are not in memory, or are shared with other processes": ended.scattered_bytes,
        "were not reached": ended.left_bytes,
    }
    return ", ".join(f"{count} bytes {what}" for what, count in counts.items() if count)
