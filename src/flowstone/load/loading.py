"""A load that is ready to read, and the functions that plan, read, finish and report it.

conductor.py calls them in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from threading import Event
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from flowstone.events.phases import LoadProgress
from flowstone.format.codec import QUANTIZED
from flowstone.load.read_ahead import ReadAhead
from flowstone.plan.match import Match, rename
from flowstone.plan.read import ReadPlan
from flowstone.reading.checkpoint import Checkpoint
from flowstone.reading.compare import LoadRequest, compare
from flowstone.rules.load_rules import Rename, Rule
from flowstone.session.load_outcome import LoadReport, VerifiedRead
from flowstone.stage.arena import open_read_arena
from flowstone.stage.bounce import ReadDestinations, choose_destinations, fill_with_zeros
from flowstone.stage.scatter import ReadResult, ReadTargets, raise_damage, scatter
from flowstone.state import Restoration
from flowstone.store.base import Store
from flowstone.table.chunks import distinct, spread
from flowstone.table.pieces import Memory, Pieces

if TYPE_CHECKING:
    from flowstone.layouts.arrange import Arrangement
    from flowstone.node_reads.node_reads import NodeReads


class ArrangedLoad(msgspec.Struct, frozen=True, eq=False):
    """A load with layout rules. `zeros`: the memory of the state's tensors that is padding, to be filled with zeros."""

    arrangement: Arrangement
    zeros: tuple[Memory, ...]


class PlannedLoad(msgspec.Struct, frozen=True, eq=False):
    """A load that is ready to read: state and checkpoint agree.

    rules         the Rename, Skip, Init and Cast rules
    names         names of the state's tensors that are read
    destinations  the stored tensors, or regions of them, that are read, and the memory into which they are read
    node_reads    reads shared by the ranks of a node; None: each rank reads all that it needs
    ahead         the read-ahead of the checkpoint; None: there is none
    held          resources that are closed once all bytes are read
    """

    checkpoint: Checkpoint
    rules: Sequence[Rule]
    restoration: Restoration
    matched: Match
    names: tuple[str, ...]
    destinations: ReadDestinations
    arranged: ArrangedLoad | None = None
    node_reads: NodeReads | None = None
    ahead: ReadAhead | None = None
    held: ExitStack = msgspec.field(default_factory=ExitStack)

    @property
    def pieces(self) -> Pieces:
        return self.destinations.pieces

    @property
    def plan(self) -> ReadPlan:
        return self.destinations.plan


def plan_load(
    needed: LoadRequest, elsewhere: Container[str] = (), unwanted: Container[str] | None = None, *, verify_first: bool
) -> PlannedLoad:
    """Compare state and checkpoint, as far as possible without tensors' bytes, and plan the read. Changes nothing.

    elsewhere  stored tensors that another rank needs. A tensor that no rank needs is reported as unexpected
    unwanted   stored objects that no rank needs; None: the objects that this rank does not need
    raises     MismatchError that lists all differences that no rule allows; BudgetError if buffers do not fit in memory
    """
    checkpoint, rules, restoration = needed.checkpoint, needed.rules, needed.restoration
    index = checkpoint.index
    matched = compare(needed, elsewhere, unwanted)
    pieces, rows = restoration.pieces.take(matched.positions), matched.rows
    places = restoration.places.take(matched.positions)
    arranged, names = None, pieces.names
    if needed.arrangement is not None:
        lowered = needed.arrangement.stored_reads(pieces, places, rows)
        pieces, places, rows = lowered.pieces, lowered.places, lowered.rows
        arranged = ArrangedLoad(needed.arrangement, lowered.zeros)
    destinations = choose_destinations(index, pieces, places, rows, verify_first=verify_first)
    return PlannedLoad(checkpoint, rules, restoration, matched, names, destinations, arranged)


def progress_reporter(
    step: int, total: int, emit: Callable[[LoadProgress], None], show: Callable[[int, int], None]
) -> Callable[[int], None]:
    """A function that reports how many of `total` bytes are done: as an event, and on a terminal."""

    def progress(done: int) -> None:
        emit(LoadProgress(step, done, total))
        show(min(done, total), total)

    return progress


def read(loading: PlannedLoad, store: Store, begun: Event, on_progress: Callable[[int], None]) -> ReadResult:
    """Read the bytes into their destinations; returns when all are read. The result's `written` lists the pieces whose
    memory in the state has changed. Damage is reported in the result, and not raised.

    begun        set before the first byte of the state may change
    on_progress  called with the number of bytes that were read so far
    """
    index, paths = loading.checkpoint.index, loading.checkpoint.segment_paths
    destinations, meanwhile = loading.destinations, loading.restoration.count_as_written
    done_bytes = 0
    with loading.held as stack:
        for stream in destinations.streams.values():
            stream.wait_current()
        ahead, ordered = loading.ahead, None
        if ahead is not None:
            ordered = None if destinations.streams else ahead.in_read_order(index, destinations.rounds[0].plan)
        if ahead is not None and ordered is None:
            ahead.close()  # its bytes are not used
        if ordered is None or len(destinations.rounds) > 1:
            arena = open_read_arena(store, destinations.device)
            stack.callback(arena.close)

        def read_round(number: int, fill: ReadTargets) -> ReadResult:
            nonlocal done_bytes
            before, done_bytes = done_bytes, done_bytes + fill.plan.bytes

            def progress(now: int) -> None:
                on_progress(before + now)

            if number > 0:
                return scatter(store, paths, fill, arena, progress)
            if ahead is not None and ordered is not None:
                return ahead.scatter(replace(fill, plan=ordered), progress, meanwhile)
            if loading.node_reads is None:
                return scatter(store, paths, fill, arena, progress, meanwhile)
            return loading.node_reads.run(store, paths, fill, arena, progress)

        begun.set()  # if anything fails after this line, the state may have changed
        return destinations.run(index, read_round)


def finish(loading: PlannedLoad, scattered: ReadResult) -> None:
    """Fill padding with zeros, then restore values that are not tensors. Raises DamagedError if the result of the read
    reports damage.
    """
    checkpoint = loading.checkpoint
    refusal = f"cannot load {checkpoint.path}"
    raise_damage(scattered, checkpoint.index, loading.pieces, checkpoint.segment_paths, refusal)
    for padding in () if loading.arranged is None else loading.arranged.zeros:
        fill_with_zeros(padding)
    loading.restoration.finish()


def verified_read(loading: PlannedLoad, stamps: Mapping[str, str | None]) -> VerifiedRead | None:
    """Describes the chunks that a successful load has verified, to which later saves may refer. None if no save can
    refer to them. `stamps`: see VerifiedRead.
    """
    if not stamps:
        return None
    chunks, plan, manifest = loading.checkpoint.index.chunks, loading.plan, loading.checkpoint.manifest
    read = np.zeros(int(chunks.first[-1]), np.bool_)
    read[spread(chunks.first[plan.piece] + plan.first, plan.last - plan.first)] = True
    return VerifiedRead(manifest.step, manifest.id, np.packbits(read), stamps)


def report(loading: PlannedLoad, scattered: ReadResult, seconds: float) -> LoadReport:
    """The report of a finished load."""
    matched, arranged, lossy = loading.matched, loading.arranged, _lossy(loading)
    return LoadReport(
        step=loading.checkpoint.step, path=loading.checkpoint.path,
        matched=loading.names, initialised=matched.initialised,
        skipped=matched.skipped, cast=matched.cast,
        renamed=_renamed_pairs(loading.checkpoint.index.rows(), loading.rules, arranged),
        rearranged=() if arranged is None else arranged.arrangement.rearranged(loading.names),
        notes=tuple(loading.restoration.notes), bytes=scattered.bytes, seconds=seconds,
        shared_bytes=scattered.shared_bytes,
        lossy=lossy, bounds=(loading.checkpoint.manifest.lossy or ()) if lossy else (),
    )


def _lossy(loading: PlannedLoad) -> tuple[str, ...]:
    """Stored names of the tensors that the state needs and that have a quantized chunk."""
    checkpoint = loading.checkpoint
    if not checkpoint.manifest.lossy:
        return ()
    index, chunks = checkpoint.index, checkpoint.index.chunks
    pieces = np.repeat(index.pieces.tensor, np.diff(chunks.first))[chunks.codecs() == QUANTIZED.id]
    skipped = set(loading.matched.skipped)
    names = (index.tensors.names[tensor] for tensor in distinct(pieces).tolist())
    return tuple(name for name in names if name not in skipped)


def _renamed_pairs(
    names: Mapping[str, int], rules: Sequence[Rule], arranged: ArrangedLoad | None
) -> tuple[tuple[str, str], ...]:
    if not any(isinstance(rule, Rename) for rule in rules):
        return ()
    pairs = ((name, rename(name, rules)) for name in names)
    return tuple(
        (old, new) for old, new in pairs
        if old != new and (arranged is None or arranged.arrangement.is_unchanged(new))
    )
