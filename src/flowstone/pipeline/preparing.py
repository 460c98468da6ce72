"""What a save finds ready: memory of the arena that is touched and, for devices, pinned."""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import monotonic

import numpy as np

from flowstone import _native
from flowstone.config import BLOCK_BYTES, CHUNK_BYTES, PACKED_BELOW_BYTES, POLL_S, TOUCHING_THREADS_MAX
from flowstone.events import Prepared
from flowstone.log import log
from flowstone.stage.device import side_stream
from flowstone.stage.gather import reserve
from flowstone.stage.numa import node_of, placing_refused
from flowstone.table.pieces import Layout, Places


class Preparation:
    """The arena of saves, made ready for the devices that the state is on; the first of them decides.

    node, node_reason  the NUMA node that memory is asked for on; -1, and why, if on none
    """

    def __init__(self) -> None:
        self.device, self.node, self.node_reason = "", -1, "no tensor is on a device"
        self._told = False

    def use(self, arena: _native.Arena, devices: Iterable[str]) -> None:
        """Have the arena's memory pinned for the first of these, and lie near it; only the first time."""
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
        """Have the devices' memory for what they gather, and digest, at the begin of so many saves ready."""
        length = layout.pieces.lengths()
        is_strided = np.zeros(len(length), np.bool_)
        is_strided[list(places.apart)] = True
        for number, device in enumerate(places.devices):
            stream, mine = side_stream(device), places.device == number
            if stream is not None:
                reserve(stream.native, length[mine], is_strided[mine], digests=digests, times=times)

    def grow(self, arena: _native.Arena, total_bytes: int) -> None:
        """Wait until that many bytes of the arena are touched, and pinned. An interrupt ends the wait alone."""
        threads = max(1, min(TOUCHING_THREADS_MAX, len(os.sched_getaffinity(0))))
        arena.grow_at_once(total_bytes, threads=threads)
        while not arena.wait_grown(POLL_S):
            pass

    def report(self, arena: _native.Arena, began: float | None = None) -> Prepared:
        """How it is now. A refusal is logged, once."""
        seconds = 0.0 if began is None else monotonic() - began
        refusal, touched = arena.refusal, arena.touched_bytes
        if refusal and not self._told:
            log.warning("%d of %d bytes of staging memory are not pinned, so that copies from %s are slower: %s",
                        touched - arena.pinned_bytes, touched, self.device, refusal)
        self._told = True
        return Prepared(touched, arena.pinned_bytes, refusal, self.node, self.node_reason, seconds)

    @property
    def is_untold(self) -> bool:
        """Whether a device uses the arena, and nothing was reported yet."""
        return bool(self.device) and not self._told


def staging_bytes(layout: Layout, ranks: int) -> int:
    """What a save of these pieces needs at most, in bytes of files. Of tensors that a rank holds whole, where there are
    several, each rank is taken to write its part: the layouts of the others are not known yet.
    """
    pieces, lengths = layout.pieces, layout.pieces.lengths().astype(np.int64)
    slots = np.where(lengths < PACKED_BELOW_BYTES, lengths, -(-lengths // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES)
    whole = np.ones(len(pieces), np.bool_)
    whole[pieces.parts] = False
    shared = int(slots[whole].sum())
    headers = CHUNK_BYTES + 256 * len(pieces)
    return headers + int(slots[~whole].sum()) + -(-shared // ranks)
