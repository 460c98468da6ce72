"""The save half of the conductor: what a save is made of, and the captures that go on beside training.

    state --Described--> plan --WritePlan--> stage --Staged--> store --Receipt--> commit --Manifest-->
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone._version import __version__
from flowstone.commit import publish
from flowstone.commit.contents import Objects, encode_objects
from flowstone.config import CAPTURE_SHARE_OF_LEISURE, CHUNK_BYTES, FIRST_ARENA_BYTES, Tuning
from flowstone.errors import StateChangedError
from flowstone.events import Captured, Fenced
from flowstone.format.manifest import Manifest, SegmentRow
from flowstone.pieces import Layout
from flowstone.plan.write import WritePlan, index_file, plan_writes
from flowstone.saves import Save
from flowstone.stage.capture import Staged, start_capture
from flowstone.state import Described
from flowstone.store.base import Pace, Receipt, Store, Writing

Waiter: TypeAlias = Literal["nobody", "optimizers", "caller"]
"""Who will wait for the capture before changing what is captured lazily."""


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A layout with the plan that was made for it; kept for the next save."""

    layout: Layout
    waiter: Waiter
    plan: WritePlan


@dataclass(slots=True, eq=False)
class Flight:
    """A save under way.

    arena_bytes  what would hold all of it
    started      in seconds of the monotonic clock
    blocked_s    what the caller of `save` waited
    """

    save: Save
    draft: publish.Draft
    staged: Staged
    plan: WritePlan
    objects: bytes
    arena_bytes: int
    started: float
    blocked_s: float

    @property
    def writing(self) -> Writing:
        return self.staged.writing

    @property
    def outlasts_save(self) -> bool:
        """Whether sources are still read when `save` returns."""
        return self.plan.lazy_bytes > 0 or bool(self.staged.streams)

    def release_sources(self) -> None:
        """Wait until the caller may change the state, on the host or by its current stream of a device."""
        if not self.staged.streams:
            self.save.captured.result()  # which hurries
            return
        self.writing.hurry()
        self.writing.wait_queued()
        for stream in self.staged.streams:
            stream.lead()

    def captured(self) -> Captured:
        """Everything has been captured: the sources are let go of."""
        self.staged = replace(self.staged, sources=())
        seconds = time.monotonic() - self.started
        return Captured(self.save.step, self.blocked_s, seconds, self.plan.bytes - self.plan.lazy_bytes)


class Captures:
    """Captures that go on beside training. Their leisure, from `save` on, ends with the fence."""

    def __init__(self, cap: int | None) -> None:
        """`cap` is what saves may write, in bytes per second; None for what the device gives."""
        self._cap = cap
        self._flights: list[Flight] = []  # replaced, never changed: `hurry` may come from any thread
        self._left_alone: float | None = None  # since when the last save leaves training alone
        self._leisures_s: deque[float] = deque(maxlen=4)
        self.arena_bytes = 0  # that would hold all of the last save

    def add(self, flight: Flight) -> None:
        self._flights = [*(other for other in self._flights if not other.save.captured.done()), flight]
        self._left_alone = time.monotonic()
        self.arena_bytes = flight.arena_bytes

    def pace(self, plan: WritePlan, tuning: Tuning) -> Pace:
        """Lazy capture is to be done when the fence comes, and no sooner: training has the machine.

        It comes when it has come lately, at the soonest. As long as nobody knows when, only memory is kept free.
        """
        blocks = tuning.queue_depth + tuning.workers
        leisure_s = CAPTURE_SHARE_OF_LEISURE * min(self._leisures_s, default=0.0)
        return Pace(blocks, int(plan.bytes / leisure_s) + 1 if leisure_s else None, self._cap)

    def hurry(self) -> None:
        """Somebody waits for what is not captured yet. Any thread."""
        for flight in self._flights:
            flight.writing.hurry()

    def fence(self) -> Fenced | None:
        """Wait until the state may change; None when it might."""
        started = time.monotonic()
        if self._left_alone is not None:
            self._leisures_s.append(started - self._left_alone)
            self._left_alone = None
        self._flights = waiting = [flight for flight in self._flights if not flight.save.captured.done()]
        if not waiting:
            return None
        for flight in waiting:
            flight.release_sources()
        self._flights = []
        return Fenced(waiting[-1].save.step, time.monotonic() - started)


def plan_save(
    described: Described, known: Planned | None, *, fence: Literal["auto", "manual"], rank: int
) -> Planned:
    """The plan for what is `described`: the `known` one itself when nothing differs that it depends on."""
    optimizers: Waiter = "optimizers" if described.optimizers else "nobody"
    waiter: Waiter = "caller" if fence == "manual" else optimizers
    layout = described.layout
    if known is not None and known.layout is layout and known.waiter == waiter:
        return known
    lazy = {"nobody": (), "optimizers": layout.lazy, "caller": (True,) * len(layout.pieces)}[waiter]
    return Planned(layout, waiter, plan_writes(layout.pieces, aliases=layout.aliases, lazy=lazy, rank=rank))


def start(
    store: Store, save: Save, plan: WritePlan, described: Described, arena: _native.Arena, pace: Pace, started: float
) -> Flight:
    """Start a save. Blocks until what is not lazy is captured; what fails up to then leaves no draft."""
    draft = publish.begin(store, save.step)
    try:
        staged = start_capture(store, draft.directory, plan, described.places, arena, pace)
        arena_bytes = _arena_bytes(plan, staged, arena)
        arena.grow(min(arena_bytes, FIRST_ARENA_BYTES))
        objects = _encode_while_captured(staged, plan, described)
    except BaseException:
        publish.discard(store, draft)
        raise
    return Flight(save, draft, staged, plan, objects, arena_bytes, started, time.monotonic() - started)


def _arena_bytes(plan: WritePlan, staged: Staged, arena: _native.Arena) -> int:
    """What would hold all of a save. With bytes from a device, a block keeps room for the rest of a chunk."""
    if not staged.streams:
        return plan.file_bytes
    return plan.file_bytes * arena.block_bytes // (arena.block_bytes - CHUNK_BYTES)


def _encode_while_captured(staged: Staged, plan: WritePlan, described: Described) -> bytes:
    """objects.json, encoded while bytes move; returns once what is not lazy may change."""
    writing = staged.writing
    try:
        per_rank = {name: [value] for name, value in described.per_rank.items()}
        objects = encode_objects(Objects(dict(described.objects), per_rank))
        if plan.lazy_bytes or staged.streams:
            writing.wait_early()
        else:
            writing.wait_captured()
        for stream in staged.streams:
            stream.lead()
    except BaseException:
        writing.cancel()
        writing.receipt()
        raise
    return objects


def give_up(flight: Flight, store: Store) -> None:
    """End a save that was started and cannot be finished."""
    flight.writing.cancel()
    flight.writing.receipt()
    publish.discard(store, flight.draft)


def receipt_of(flight: Flight) -> Receipt:
    """Blocks until the segments are durable. Raises what went wrong; StateChangedError with the tensors' names."""
    receipt = flight.writing.receipt()
    flight.save.captured.result()  # told before anything that follows from it
    if isinstance(receipt.error, StateChangedError):
        raise _with_names(receipt.error, flight.plan, flight.staged.offsets)
    if receipt.error is not None:
        raise receipt.error
    return receipt


def commit(flight: Flight, receipt: Receipt, store: Store, store_id: str) -> Manifest:
    """Publish a save whose segments are durable. So is the checkpoint when this returns."""
    plan = flight.plan
    segments = [
        SegmentRow(at, None, file.name, file.bytes, file.header_bytes, header)
        for at, (file, header) in enumerate(zip(plan.segments, flight.staged.headers, strict=True))
    ]
    return publish.publish(
        store, flight.draft, store_id=store_id, segments=segments,
        index=index_file(plan, flight.staged.offsets, receipt.digests), totals=plan.frame.totals,
        objects=flight.objects, receipt=receipt, writer=f"flowstone {__version__}", ranks=1,
    )


def _with_names(error: StateChangedError, plan: WritePlan, offsets: NDArray[np.uint64]) -> StateChangedError:
    """The error with the tensors whose bytes had changed."""
    hit = (offsets < error.offset + error.length) & (offsets + plan.length > error.offset)
    inside = [number for number, segment in enumerate(plan.segments) if error.path.endswith(f"/{segment.name}")]
    names = tuple(plan.pieces.names[at] for at in np.flatnonzero(hit & np.isin(plan.segment, inside)).tolist())
    return StateChangedError(
        f"{', '.join(names)} changed before it was captured", path=error.path, offset=error.offset,
        length=error.length, names=names,
        next="change parameters in an optimizer that is in the state, or call fence() before you change them",
    )
