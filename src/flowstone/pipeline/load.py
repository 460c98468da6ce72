"""THE ORDER of a load: everything is compared before a byte moves, then read, then finished.

    Manifest --> plan --ReadPlan--> store --bytes--> stage --> the caller's memory

`Loads.load` is the whole order, on the thread that calls `load`. The engine's threads (docs/ARCHITECTURE.md, Threads)
move and verify bytes while `read` waits for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from threading import Event
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from flowstone.checkpoint import Checkpoint
from flowstone.commit import catalog
from flowstone.commit.entries import is_journal, step_directory
from flowstone.commit.locations import check_no_checkpoint, check_store, find_checkpoint, stores_below
from flowstone.commit.manifests import inside
from flowstone.errors import FlowstoneError, NoCheckpointError, StorageError, is_absence, is_damage
from flowstone.events import FellBack, Loaded, LoadProgress
from flowstone.format.codec import QUANTIZED
from flowstone.format.manifest import Manifest
from flowstone.format.segment import is_of_rank
from flowstone.log import log
from flowstone.pipeline.compare import Wanted, compare, want
from flowstone.pipeline.interest import Interest, learn_interest
from flowstone.pipeline.load_outcome import LoadReport, VerifiedRead
from flowstone.pipeline.read_ahead import ReadAhead, read_ahead
from flowstone.pipeline.shared import Shared
from flowstone.plan.match import Match, rename
from flowstone.plan.read import ReadPlan
from flowstone.rules import Rename, Rule
from flowstone.runtime.progress import terminal_progress
from flowstone.stage.arena import open_read_arena
from flowstone.stage.bounce import Destinations, choose_destinations, fill_with_zeros
from flowstone.stage.scatter import Fill, Scattered, raise_damage, scatter
from flowstone.state import Restoration
from flowstone.store.at_once import at_once, is_distant
from flowstone.store.base import Store
from flowstone.table.chunks import distinct, spread
from flowstone.table.pieces import Memory, Pieces
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.commit.journals import Chain
    from flowstone.layout_rules import LoadRule
    from flowstone.plan.arrange import Arrangement
    from flowstone.stage.node_reads import NodeReads
    from flowstone.store.asks_ahead import Ahead


class Arranged(msgspec.Struct, frozen=True, eq=False):
    """A load by rules about layouts. `zeros`: the padding in the state's tensors."""

    arrangement: Arrangement
    zeros: tuple[Memory, ...]


class Loading(msgspec.Struct, frozen=True, eq=False):
    """A load that is ready to read: state and checkpoint agree.

    rules         about names and differences
    names         of the state's tensors that are read
    destinations  the pieces to be read (with rules about layouts, boxes of what is stored), and where they go
    node_reads    how ranks of a node read for each other; None: each reads for itself
    ahead         what is read already; None: nothing
    held          closed once all is read
    """

    checkpoint: Checkpoint
    rules: Sequence[Rule]
    restoration: Restoration
    matched: Match
    names: tuple[str, ...]
    destinations: Destinations
    arranged: Arranged | None = None
    node_reads: NodeReads | None = None
    ahead: ReadAhead | None = None
    held: ExitStack = msgspec.field(default_factory=ExitStack)

    @property
    def wanted(self) -> Pieces:
        return self.destinations.wanted

    @property
    def plan(self) -> ReadPlan:
        return self.destinations.plan


class Opening(msgspec.Struct, frozen=True):
    """A step that is about to be loaded.

    manifest  its, if it is read already
    ahead     the store in which some of its files are on their way; None: nothing is
    """

    step: int
    manifest: Manifest | None = None
    ahead: Ahead | None = None


class Loads:
    """The loads of one Checkpointer, by a group of N ranks, N at least 1."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._store, self._options, self._group = shared.store, shared.options, shared.group
        self._emit, self._frozen, self._outcome = shared.emit, shared.frozen, shared.outcome

    def newest(self) -> Checkpoint | None:
        """The newest committed checkpoint; None if there is none yet."""
        read: dict[int, Manifest] = {}  # on rank 0, which decides: another writer may remove that step meanwhile

        def look() -> list[int]:
            check_no_checkpoint(self._store)
            newest = catalog.newest(self._store)
            if newest is None:
                if below := stores_below(self._store):
                    log.warning("there is no checkpoint in %s; stores are in %s", self._store.location, below)
                return []
            read[newest.step] = newest
            chain = leads_to(self._store, None)
            return [newest.step, newest.step if chain is None else chain.newest]

        found = self._group.decide("which step is the newest", look)
        if not found:
            return None
        step, leads = found
        return Checkpoint(self._store, step_directory(step), self._options, read.get(step)).with_journal(leads)

    def load_newest(
        self, step: int | None, state: Mapping[str, object], rules: Sequence[LoadRule], *, verify_first: bool,
        fallback: bool,
    ) -> LoadReport:
        """Load the newest step, or `step`; with `fallback`, the newest at or below it that is not damaged."""
        with ExitStack() as asked:
            return self._load_newest(step, state, rules, asked, verify_first=verify_first, fallback=fallback)

    def _load_newest(
        self, step: int | None, state: Mapping[str, object], rules: Sequence[LoadRule], asked: ExitStack, *,
        verify_first: bool, fallback: bool,
    ) -> LoadReport:
        """`asked` closes what was asked for ahead."""
        chains: list[Chain | None] = [None]  # on rank 0
        lost: list[str] = []  # the same
        openings: dict[int, Opening] = {}  # on rank 0

        def look() -> list[int]:
            if is_distant(self._store) and not fallback:  # it has no journals
                from flowstone.pipeline.opening import open_step  # imported here: most stores are directories

                held = asked if self._group.size == 1 else None  # of several ranks, each wants a part
                _, found = at_once(
                    self._store, [lambda: check_store(self._store), lambda: open_step(self._store, step, held)]
                )
                assert found is not None, "it is the second call's"
                manifest, ahead = found
                openings[manifest.step] = Opening(manifest.step, manifest, ahead)
                return [-1, manifest.step]
            check_store(self._store)
            chains[0] = chain = leads_to(self._store, step)
            lost[:] = [] if step is not None else self._lost_steps(chain)
            newest = find_checkpoint(self._store, step) if chain is None else chain.base
            return [
                -1 if chain is None else chain.newest,
                *([s for s in reversed(catalog.steps(self._store)) if s <= newest] if fallback else [newest]),
            ]

        passed: list[str] = []
        leads_to_step, *candidates = self._group.decide("which step to load", look)
        for candidate in candidates:
            try:
                opening = openings.get(candidate)
                report = self.load(candidate, state, rules, verify_first=verify_first, opening=opening)
            except FlowstoneError as error:
                if step is None and self._outcome.unfinished is None and self._is_gone(candidate, error):
                    return self.load_newest(step, state, rules, verify_first=verify_first, fallback=fallback)
                if candidate == candidates[-1] or not is_damage(error):
                    raise
                log.warning("cannot load step %d, trying an older one: %s", candidate, error)
                self._emit(FellBack(candidate, str(error)))
                passed.append(skipped_step_note(candidate, error))
            else:
                report = dataclasses.replace(report, notes=(*report.notes, *passed, *lost))
                if candidate != candidates[0]:
                    self._outcome.superseded_above = candidate
                elif leads_to_step >= 0:
                    from flowstone.pipeline.replaying import go_on  # imported here: only journals need it

                    return go_on(
                        self._shared, report, state, chains[0], newest=leads_to_step, rules=rules, fallback=fallback
                    )
                return report
        raise NoCheckpointError(f"no checkpoint in {self._store.location}", next="check the path")

    def _lost_steps(self, chain: Chain | None) -> list[str]:
        """A note on steps of the journals that the newest one does not lead to, as something before them is damaged."""
        if not self._store.capabilities.appends or not any(map(is_journal, self._store.names())):
            return []
        from flowstone.commit.verify_journals import lost_steps  # imported here: most stores have no journals

        try:
            found = lost_steps(self._store, chain)
        except FlowstoneError:
            return []  # safe: what is loaded does not depend on it, and `flowstone verify` tells what is wrong
        if not found:
            return []
        log.warning(
            "durable steps behind the newest that can be loaded are lost: %s/%s. `flowstone verify` tells all of them; "
            "keep a copy of the journal before the next whole checkpoint removes it", self._store.location, found,
        )
        return [f"durable steps behind this one are lost: {found}"]

    def _is_gone(self, step: int, error: FlowstoneError) -> bool:
        """Whether a load of `step` failed because another writer has removed that step; the same answer on all ranks.
        """
        if not (is_damage(error) or is_absence(error)):
            return False
        found = self._group.decide(f"whether step {step} is still there", lambda: catalog.steps(self._store))
        return step not in found and bool(found)

    def load(
        self, step: int, state: Mapping[str, object], rules: Sequence[LoadRule], *, verify_first: bool,
        opening: Opening | None = None,
    ) -> LoadReport:
        """THE ORDER: want, agree, plan, agree, read, finish, agree. Raises what `Checkpointer.load` does.

        opening  of that step, if it has begun
        """
        spans = Spans("load", step, self._group.rank)
        with ExitStack() as held:
            wanted, interest, ahead, store = self._want(opening or Opening(step), state, rules, held)
            spans.lap("wanted")
            ready = self._plan(wanted, interest, verify_first=verify_first)
            ready = self._share_reads(replace(ready, ahead=ahead, held=held.pop_all()))
        spans.lap("planned")
        # Set before the first byte can change: from here on only a load that succeeds makes the state whole again,
        # unless it is certain that no byte has changed on any rank.
        unfinished_before = self._outcome.unfinished
        self._outcome.unfinished = f"the load of step {step} did not finish"
        self._frozen.forget()
        self._outcome.loads += 1
        self._outcome.verified = None
        stamps = self._stamps(ready.checkpoint)
        begun, failure = Event(), None
        try:
            with terminal_progress(f"loading step {step}") as show:
                found = read(ready, store, begun, teller(step, ready.plan.bytes, self._emit, show))
            spans.lap("read", ready.plan.bytes)
            spans.engine(found.receipt.spans)
            if found.failed and not found.written and self._group.certain(True):
                self._outcome.unfinished = unfinished_before
            finish(ready, found)
            spans.lap("finished")
        except Exception as error:
            if self._group.certain(not begun.is_set()):
                self._outcome.unfinished = unfinished_before
            failure = error
        self._group.confirm(f"the load of step {step}", failure)
        spans.lap("agreed")
        self._outcome.unfinished = None
        self._outcome.verified = verified_read(ready, stamps)
        done = report(ready, found, spans.whole("load", ready.plan.bytes, track="loads").seconds)
        self._emit(Loaded(step, done.bytes, done.seconds))
        return done

    def _stamps(self, checkpoint: Checkpoint) -> Mapping[str, str | None]:
        """Of the files that a later save of this rank may refer to, where the store can link them."""
        if not self._store.capabilities.links:
            return {}
        names = [row.name for row in checkpoint.manifest.segments if is_of_rank(row.name, self._group.rank)]
        try:
            return {name: self._store.stamp(inside(step_directory(checkpoint.step), name)) for name in names}
        except StorageError:
            return {}  # safe: no save refers to this checkpoint. What is wrong with the store, the read tells

    def _want(
        self, opening: Opening, state: Mapping[str, object], rules: Sequence[LoadRule], held: ExitStack
    ) -> tuple[Wanted, Interest, ReadAhead | None, Store]:
        """What the state needs of the checkpoint, what all ranks need of it, what is read meanwhile, and the store to
        read the rest from.
        """
        phase = f"what is wanted of step {opening.step}"
        ahead: ReadAhead | None = None
        try:
            checkpoint, store = self._opened(opening)
            if self._group.size == 1:  # of several ranks, each wants a part
                ahead = read_ahead(checkpoint, state, rules, store)
            if ahead is not None:
                held.callback(ahead.close)
            wanted = want(checkpoint, state, rules=rules, rank=self._group.rank, ranks=self._group.size)
        except Exception as error:
            self._group.confirm(phase, error)
            raise
        return wanted, learn_interest(self._group, phase, wanted), ahead, store

    def _opened(self, opening: Opening) -> tuple[Checkpoint, Store]:
        """The checkpoint, and the store to read its segments from: that in which they are on their way, if any is."""
        if opening.ahead is not None and opening.manifest is not None:
            from flowstone.pipeline.opening import checkpoint_in  # as above

            found = checkpoint_in(opening.ahead, opening.manifest, self._options)
            if found is not None:
                return found, opening.ahead
        directory = step_directory(opening.step)
        return Checkpoint(self._store, directory, self._options, opening.manifest), self._store

    def _plan(self, wanted: Wanted, interest: Interest, *, verify_first: bool) -> Loading:
        """Which bytes are read into which memory, once all ranks have found that state and checkpoint agree."""
        failure: Exception | None = None
        try:
            ready = plan_load(wanted, interest.elsewhere, interest.unwanted, verify_first=verify_first)
        except Exception as error:
            failure = error
        self._group.confirm(f"the comparison with step {wanted.checkpoint.step}", failure)
        return ready

    def _share_reads(self, ready: Loading) -> Loading:
        """The same load, with shared reads among the ranks of this node where possible."""
        if self._group.size == 1:
            return ready
        try:
            from flowstone.pipeline.sharing import share_reads  # imported here: a single process does not need it

            node_reads = share_reads(
                ready.checkpoint, ready.destinations.rounds[0].plan, self._store, self._group, ready.held,
                willing=self._options.share_reads,
            )
            return replace(ready, node_reads=node_reads)
        except BaseException:
            ready.held.close()
            raise


def skipped_step_note(step: int, error: FlowstoneError) -> str:
    """The note in a report on a damaged newer step, when a load falls back to an older one."""
    return f"step {step} is damaged and was skipped: {error.message}"


def leads_to(store: Store, step: int | None) -> Chain | None:
    """The journals that lead from a checkpoint to `step`, or to the newest; None if a checkpoint has that step."""
    if not store.capabilities.appends or not any(map(is_journal, store.names())):
        return None
    from flowstone.commit import journals  # imported here: most stores have none

    return journals.leads_to(store, step)


def plan_load(
    found: Wanted, elsewhere: Container[str] = (), unwanted: Container[str] | None = None, *, verify_first: bool
) -> Loading:
    """Compare everything that needs no tensor bytes. Changes nothing.

    elsewhere  stored tensors that another rank needs; those that no rank needs are unexpected
    unwanted   stored objects that no rank needs; None: those that this rank does not need
    raises     MismatchError for every difference that no rule allows; BudgetError
    """
    checkpoint, rules, restoration = found.checkpoint, found.rules, found.restoration
    index = checkpoint.index
    matched = compare(found, elsewhere, unwanted)
    wanted, rows = restoration.pieces.take(matched.wanted), matched.rows
    places = restoration.places.take(matched.wanted)
    arranged, names = None, wanted.names
    if found.arrangement is not None:
        lowered = found.arrangement.lower(wanted, places, rows)
        wanted, places, rows = lowered.wanted, lowered.places, lowered.rows
        arranged = Arranged(found.arrangement, lowered.zeros)
    destinations = choose_destinations(index, wanted, places, rows, verify_first=verify_first)
    return Loading(checkpoint, rules, restoration, matched, names, destinations, arranged)


def teller(
    step: int, total: int, emit: Callable[[LoadProgress], None], show: Callable[[int, int], None]
) -> Callable[[int], None]:
    """A function that reports how many of `total` bytes are done: as an event, and on a terminal."""

    def progress(done: int) -> None:
        emit(LoadProgress(step, done, total))
        show(min(done, total), total)

    return progress


def read(loading: Loading, store: Store, begun: Event, on_progress: Callable[[int], None]) -> Scattered:
    """Read the bytes into their destinations. Blocks. `written` in the result are pieces whose memory in the state has
    changed.

    begun        set before the first byte may change
    on_progress  called with the number of bytes done. Damage is in the result, not raised
    """
    index, paths = loading.checkpoint.index, loading.checkpoint.segment_paths
    destinations, meanwhile = loading.destinations, loading.restoration.count_as_written
    done_bytes = 0
    with loading.held as stack:
        for stream in destinations.streams.values():
            stream.wait_current()
        ahead, ordered = loading.ahead, None
        if ahead is not None:
            ordered = None if destinations.streams else ahead.takes(index, destinations.rounds[0].plan)
        if ahead is not None and ordered is None:
            ahead.close()  # read in vain
        if ordered is None or len(destinations.rounds) > 1:
            arena = open_read_arena(store, destinations.device)
            stack.callback(arena.close)

        def read_round(number: int, fill: Fill) -> Scattered:
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


def finish(loading: Loading, found: Scattered) -> None:
    """Fill padding, then restore values that are not tensors. Raises the damage that `found`
    reports.
    """
    checkpoint = loading.checkpoint
    raise_damage(found, checkpoint.index, loading.wanted, checkpoint.segment_paths, f"cannot load {checkpoint.path}")
    for padding in () if loading.arranged is None else loading.arranged.zeros:
        fill_with_zeros(padding)
    loading.restoration.finish()


def verified_read(loading: Loading, stamps: Mapping[str, str | None]) -> VerifiedRead | None:
    """What a load that succeeded has verified; None if no save can refer to it. `stamps`: see VerifiedRead."""
    if not stamps:
        return None
    chunks, plan, manifest = loading.checkpoint.index.chunks, loading.plan, loading.checkpoint.manifest
    read = np.zeros(int(chunks.first[-1]), np.bool_)
    read[spread(chunks.first[plan.piece] + plan.first, plan.last - plan.first)] = True
    return VerifiedRead(manifest.step, manifest.id, np.packbits(read), stamps)


def report(loading: Loading, found: Scattered, seconds: float) -> LoadReport:
    """The report of a finished load."""
    matched, arranged, lossy = loading.matched, loading.arranged, _lossy(loading)
    return LoadReport(
        step=loading.checkpoint.step, path=loading.checkpoint.path,
        matched=loading.names, initialised=matched.initialised,
        skipped=matched.skipped, cast=matched.cast,
        renamed=_renamed_pairs(loading.checkpoint.index.rows(), loading.rules, arranged),
        rearranged=() if arranged is None else arranged.arrangement.rearranged(loading.names),
        notes=tuple(loading.restoration.notes), bytes=found.bytes, seconds=seconds, shared_bytes=found.shared_bytes,
        lossy=lossy, bounds=(loading.checkpoint.manifest.lossy or ()) if lossy else (),
    )


def _lossy(loading: Loading) -> tuple[str, ...]:
    """Stored names of the tensors that the state needs, of which a chunk is quantized."""
    checkpoint = loading.checkpoint
    if not checkpoint.manifest.lossy:
        return ()
    index, chunks = checkpoint.index, checkpoint.index.chunks
    pieces = np.repeat(index.pieces.tensor, np.diff(chunks.first))[chunks.codecs() == QUANTIZED.id]
    skipped = set(loading.matched.skipped)
    names = (index.tensors.names[at] for at in distinct(pieces).tolist())
    return tuple(name for name in names if name not in skipped)


def _renamed_pairs(
    names: Mapping[str, int], rules: Sequence[Rule], arranged: Arranged | None
) -> tuple[tuple[str, str], ...]:
    if not any(isinstance(rule, Rename) for rule in rules):
        return ()
    pairs = ((name, rename(name, rules)) for name in names)
    return tuple(
        (old, new) for old, new in pairs
        if old != new and (arranged is None or arranged.arrangement.is_as_stored(new))
    )
