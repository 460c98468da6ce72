"""Prepares staging memory for saves: touches its pages, and pins it for copies from devices."""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from flowstone._native import Arena
from flowstone.config import BLOCK_BYTES, CHUNK_BYTES, PACKED_BELOW_BYTES, POLL_S, TOUCHING_THREADS_MAX
from flowstone.log import log
from flowstone.stage.device import side_stream
from flowstone.stage.gather import reserve
from flowstone.stage.numa import node_of, placing_refused
from flowstone.table.pieces import Layout, Places

if TYPE_CHECKING:
    from flowstone.events.rare_events import Prepared


class Preparation:
    """Prepares the staging memory of saves (the arena) for copies from devices. The first device of a state decides
    where the memory is allocated.

    node         the NUMA node on which to allocate memory; -1: no node is requested
    node_reason  why no node is requested; "" if one is
    """

    def __init__(self) -> None:
        self.device, self.node, self.node_reason = "", -1, "no tensor is on a device"
        self._told = False

    def pin_for(self, arena: Arena, devices: Iterable[str]) -> None:
        """At the first call, pin the arena for the first of these devices, and place it on the device's NUMA node."""
        if self.device:
            return
        for device in sorted(devices):
            stream = side_stream(device)
            if stream is None:
                continue
            self.device = device
            self.node, self.node_reason = node_of(stream.native.pci_address)
            if self.node >= 0 and (errno := arena.place(self.node)):
                self.node, self.node_reason = -1, placing_refused(self.node, errno)
            arena.use(stream.native)
            return

    def reserve(self, layout: Layout, places: Places, *, digests: bool, times: int) -> None:
        """Allocate memory for what devices gather (samples and small tensors) and for digests, for `times` concurrent
        operations.
        """
        length = layout.pieces.lengths()
        is_strided = np.zeros(len(length), np.bool_)
        is_strided[list(places.strided)] = True
        for number, device in enumerate(places.devices):
            stream, mine = side_stream(device), places.device == number
            if stream is not None:
                reserve(stream.native, length[mine], is_strided[mine], digests=digests, times=times)

    def grow(self, arena: Arena, total_bytes: int) -> None:
        """Wait until `total_bytes` of the arena are touched and, for devices, pinned. An interrupt ends the wait, but
        not this work.
        """
        threads = max(1, min(TOUCHING_THREADS_MAX, len(os.sched_getaffinity(0))))
        arena.grow_at_once(total_bytes, threads=threads)
        while not arena.wait_grown(POLL_S):
            pass

    def report(self, arena: Arena, began: float | None = None) -> Prepared:
        """The event Prepared, about the arena's current state. If the system refused to pin memory, logs that once."""
        seconds = 0.0 if began is None else monotonic() - began
        refusal, touched = arena.refusal, arena.touched_bytes
        if refusal and not self._told:
            log.warning("%d of %d bytes of staging memory are not pinned, so that copies from %s are slower: %s",
                        touched - arena.pinned_bytes, touched, self.device, refusal)
        self._told = True
        from flowstone.events.rare_events import Prepared  # imported here: most processes report it once, or never

        return Prepared(touched, arena.pinned_bytes, refusal, self.node, self.node_reason, seconds)

    @property
    def is_unreported(self) -> bool:
        """Whether a device uses the arena, and `report` was not called yet."""
        return bool(self.device) and not self._told


def staging_bytes(layout: Layout, ranks: int) -> int:
    """An upper bound of the bytes that a save of these pieces writes into files. The layouts of other ranks are not
    known yet, so this rank is assumed to write an equal share of each tensor that it holds in full.
    """
    pieces, lengths = layout.pieces, layout.pieces.lengths().astype(np.int64)
    slots = np.where(lengths < PACKED_BELOW_BYTES, lengths, -(-lengths // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES)
    whole = np.ones(len(pieces), np.bool_)
    whole[pieces.parts] = False
    shared = int(slots[whole].sum())
    headers = CHUNK_BYTES + 256 * len(pieces)
    return headers + int(slots[~whole].sum()) + -(-shared // ranks)
