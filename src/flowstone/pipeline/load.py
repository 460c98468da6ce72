"""The load half of the conductor: everything is compared before a byte moves, then read, then finished.

    Manifest --> plan --ReadPlan--> store --bytes--> stage --> the caller's memory
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.checkpoint import Checkpoint
from flowstone.commit.entries import step_directory
from flowstone.config import SHARED_READ_BYTES_MIN, EngineOptions
from flowstone.errors import ArgumentError
from flowstone.events import LoadProgress
from flowstone.format.digest import digest
from flowstone.format.index import Index
from flowstone.format.manifest import encode_manifest
from flowstone.pipeline.rank_group import RankGroup
from flowstone.plan.match import Available, Match, Requested, allowed, match, refuse, rename, renamed, section_of
from flowstone.plan.read import ReadPlan, plan_reads
from flowstone.rules import Rename, Rule, Skip
from flowstone.runtime.progress import terminal_progress
from flowstone.stage.arena import open_read_arena
from flowstone.stage.bounce import Destinations, choose_destinations
from flowstone.stage.node_reads import LocalPeer, NodeReads, ReadRequest
from flowstone.stage.overlap import overlaps
from flowstone.stage.scatter import Fill, Scattered, raise_damage, scatter, scattered_targets
from flowstone.state import Restoration, Stored, StoredTensor, found_in, prepare, warn_of_load, wrapped_sections
from flowstone.state.names import strip_wrappers
from flowstone.store.base import Store
from flowstone.store.shared_ring import Announcement, node
from flowstone.table.pieces import Pieces

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    matched      names of the tensors that were read
    initialised  wanted, not stored, left as they were (Init)
    skipped      in the checkpoint, not in the state (Skip)
    cast         converted from another dtype (Cast)
    renamed      stored name and name in the state, where they differ (Rename)
    notes        what else a careful reader would want to know
    bytes        of the chunks that this rank has read
    shared_bytes of those that it has taken from ranks on its node, itself among them, of which one has read each
    """

    step: int
    path: str
    matched: tuple[str, ...]
    initialised: tuple[str, ...]
    skipped: tuple[str, ...]
    cast: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    bytes: int
    seconds: float
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """A load that is ready to read: what the state wants and the checkpoint holds agree.

    wanted        the pieces to be read
    destinations  parallel: where their bytes are read to
    node_reads    how ranks of a node read for each other, if they do
    held          what is closed once all is read
    """

    checkpoint: Checkpoint
    rules: Sequence[Rule]
    restoration: Restoration
    matched: Match
    wanted: Pieces
    plan: ReadPlan
    destinations: Destinations
    node_reads: NodeReads | None = None
    held: ExitStack = field(default_factory=ExitStack)
    begun: Event = field(default_factory=Event)  # from here on bytes may change

    @property
    def changed_nothing(self) -> bool:
        return not self.begun.is_set()


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What a state wants of a checkpoint. `names`: of the stored tensors, as Rename rules call them, to index rows."""

    checkpoint: Checkpoint
    rules: Sequence[Rule]
    names: Mapping[str, int]
    restoration: Restoration

    def names_used(self) -> NDArray[np.bool_]:
        """Which of the stored names this rank wants."""
        aliases = [alias.name for alias in self.restoration.aliases]
        used = {*self.restoration.pieces.names, *aliases}
        return np.array([name in used for name in self.names], np.bool_)

    def unwanted(self) -> dict[str, list[str]]:
        """By section, all that are asked for: the names of stored objects, no tensors, that this rank does not want."""
        found: dict[str, list[str]] = {section: [] for section in self.restoration.sections}
        for difference in self.restoration.differences:
            if difference.kind == "unexpected":
                section = section_of(difference.name, self.restoration.sections)
                found.setdefault(section, []).append(difference.name)
        return found


def want(
    checkpoint: Checkpoint, state: Mapping[str, object], *, rules: Sequence[Rule], rank: int = 0, ranks: int = 1
) -> Wanted:
    """Find the memory that the checkpoint's bytes may go to. Changes nothing.

    raises  DamagedError, StateError, MismatchError (two names become one)
    """
    checkpoint.check()
    sections = [*checkpoint.objects, *checkpoint.contents.per_rank]
    if isinstance(state, Mapping) and not state and sections:
        raise ArgumentError(
            "load: the state is empty, so nothing would be loaded", checkpoint=", ".join(sections[:10]),
            next="pass the objects to load into, under these names: {'model': model, ...}",
        )
    if isinstance(state, Mapping):
        if idiom := found_in(state, modules=False):
            warn_of_load(idiom)
        rules = (*rules, *map(_Unwrap, wrapped_sections(state, checkpoint.objects)))
    names = renamed(checkpoint.index.rows(), rules)
    stored = _stored(checkpoint, names, rules, rank)
    return Wanted(checkpoint, rules, names, prepare(state, stored, rank=rank, ranks=ranks))


def plan_load(
    found: Wanted, elsewhere: NDArray[np.bool_] | None = None, unwanted: Container[str] | None = None, *,
    verify_first: bool
) -> Loading:
    """Compare all that can be known without the tensors' bytes. Changes nothing.

    elsewhere  which of the stored tensors some rank wants, in a job of several: those that none does are unexpected
    unwanted   in such a job, the stored objects that no rank wants
    raises     MismatchError for every difference that no rule allows; BudgetError
    """
    checkpoint, rules, restoration = found.checkpoint, found.rules, found.restoration
    names, index = found.names, checkpoint.index
    used = None if elsewhere is None else {n for n, used in zip(names, elsewhere.tolist(), strict=True) if used}
    matched = compare(found, used or (), unwanted)
    wanted = restoration.pieces.take(matched.wanted)
    plan = plan_reads(index, wanted, matched.rows)
    stored = tuple(map(index.dtypes.__getitem__, matched.rows))
    places = restoration.places.take(matched.wanted)
    destinations = choose_destinations(
        wanted, places, stored, scattered_targets(index, plan, places), verify_first=verify_first
    )
    return Loading(checkpoint, rules, restoration, matched, wanted, plan, destinations)


def compare(found: Wanted, elsewhere: Container[str], unwanted: Container[str] | None) -> Match:
    """Find what is wanted among what is stored.

    elsewhere  stored tensors that other ranks want
    unwanted   the stored objects that no rank wants; None: this rank has the word
    raises     MismatchError for every difference that no rule allows
    """
    rules, restoration = found.rules, found.restoration
    left = [d for d in restoration.differences if d.kind == "unexpected"]
    skipped = tuple(d.name for d in left if allowed(rules, Skip, d.name))
    silent = {*skipped, *(d.name for d in left if unwanted is not None and d.name not in unwanted)}
    others = [
        f"{d.kind:<11} {d.name}: wanted {d.expected}, stored {d.found}" for d in restoration.differences
        if d.kind != "unexpected" or d.name not in silent
    ]
    matched = match(
        Requested(restoration.pieces, restoration.aliases, restoration.sections),
        Available(found.checkpoint.index, found.names, found.checkpoint.contents.replicated), rules,
        differences=others, elsewhere=elsewhere, remedy=_remedy(found),
    )
    _check_apart(found, matched)
    return replace(matched, skipped=(*matched.skipped, *skipped))


class _Unwrap(Rename):
    """Names below a section without what wrappers of modules have put into them; see `wrapped_sections`."""

    def __init__(self, section: str) -> None:
        super().__init__(section, section)

    def apply(self, name: str) -> str:
        head = f"{self.source}."
        return head + strip_wrappers(name.removeprefix(head)) if name.startswith(head) else name


def _remedy(found: Wanted) -> str:
    """What to do about differences whose cause is known; "" where it is not."""
    remedies, checkpoint = found.restoration.remedies, found.checkpoint
    if remedies:
        return "; ".join(dict.fromkeys(remedies))
    sections = [*checkpoint.objects, *checkpoint.contents.per_rank]
    known = {rename(section, found.rules) for section in sections}
    absent = [section for section in found.restoration.sections if section not in known]
    if not absent or not sections:
        return ""
    return (
        f"the checkpoint has no {', '.join(map(repr, absent[:5]))}; it has {', '.join(map(repr, sections[:10]))}: use "
        "these names in your state, or map them with fs.Rename(stored, wanted)"
    )


def _check_apart(found: Wanted, matched: Match) -> None:
    """Raise MismatchError where one tensor's bytes would be loaded over another's."""
    restoration = found.restoration
    wanted, places = restoration.pieces.take(matched.wanted), restoration.places.take(matched.wanted)
    pairs = overlaps(wanted, places, found.checkpoint.index, matched.rows)
    if pairs:
        refuse(
            [f"overlap     {wanted.names[at]}: shares memory with {wanted.names[other]}" for at, other in pairs],
            what="tensors of the state share memory",
            next="give each its own memory (clone()), or leave one out of the state and add fs.Skip for it",
        )


def agree(
    store: Store, options: EngineOptions, group: RankGroup, step: int, state: Mapping[str, object], *,
    rules: Sequence[Rule], verify_first: bool,
) -> Loading:
    """Compare `state` with the checkpoint of `step`, on all ranks, before the first byte of any changes.

    raises  what `want` and `plan_load` raise; RankError where that happens on another rank
    """
    words = f"the comparison with step {step}"
    failure: Exception | None = None
    try:
        checkpoint = Checkpoint(store, step_directory(step), options)
        found = want(checkpoint, state, rules=rules, rank=group.rank, ranks=group.size)
    except Exception as error:
        failure = error
    group.confirm(f"what is wanted of step {step}", failure)
    elsewhere = unwanted = None
    if group.coordinator is not None:
        manifest_digest = digest(encode_manifest(found.checkpoint.manifest))
        group.same(f"the identity of step {step}", f"a manifest of digest {manifest_digest}")
        elsewhere = group.anybody(f"the tensors that are wanted of step {step}", found.names_used())
        unwanted = group.nobody(f"the objects that are wanted of step {step}", found.unwanted())
    try:
        ready = plan_load(found, elsewhere, unwanted, verify_first=verify_first)
    except Exception as error:
        failure = error
    group.confirm(words, failure)
    if group.coordinator is None:
        return ready
    try:
        return replace(ready, node_reads=_node_reads(ready, store, group, ready.held, willing=options.share_reads))
    except BaseException:
        ready.held.close()
        raise


def _node_reads(
    loading: Loading, store: Store, group: RankGroup, stack: ExitStack, *, willing: bool
) -> NodeReads | None:
    """How the ranks of this node read for each other what several of them want; None where each reads for itself.

    stack    closes what that needs
    willing  whether this rank takes part
    """
    step, index, plan, this_node = loading.checkpoint.step, loading.checkpoint.index, loading.plan, node()
    request: ReadRequest | None = None
    node_reads: NodeReads | None = None
    failure: Exception | None = None
    as_it_lies = index.chunks.stored is None  # a ring holds extents as they are
    if willing and as_it_lies and plan.bytes >= SHARED_READ_BYTES_MIN:
        path = loading.checkpoint.segment_paths[int(index.chunks.segment[plan.piece[0]])]
        try:
            if store.reads_past_cache(path, plan.bytes):  # else the kernel reads once for all, and this gains nothing
                request = stack.enter_context(closing(ReadRequest(index, plan)))
        except OSError as error:
            _log.warning("cannot share memory with the ranks on this node (%s); each rank reads for itself", error)
        except Exception as error:
            failure = error
    words = b"" if request is None else msgspec.msgpack.encode(request.ring.announcement)
    said = group.near(f"the shared rings of step {step}", this_node, failure or words)
    peers = [LocalPeer(rank, msgspec.msgpack.decode(words, type=Announcement)) for rank, words in said]
    if request is not None and len(peers) > 1:
        me = [one.rank for one in peers].index(group.rank)
        try:
            node_reads = NodeReads(request, peers, me, index, plan, deadline_s=group.deadline_s)
            stack.callback(node_reads.close)
        except OSError as error:
            _log.warning("ranks on this node cannot see each other's memory (%s); each rank reads for itself", error)
        except Exception as error:
            failure = error
    ready = group.near(
        f"sharing what step {step} holds", this_node, failure or (b"" if node_reads is None else b"ready")
    )
    return node_reads if len(ready) == len(peers) else None


def teller(step: int, total: int, emit: Callable[[LoadProgress], None]) -> Callable[[int], None]:
    """Tells how many of `total` bytes are done: an event, and a line on a terminal."""
    show = terminal_progress(f"loading step {step}")

    def progress(done: int) -> None:
        emit(LoadProgress(step, done, total))
        if show is not None:
            show(min(done, total), total)

    return progress


def read(loading: Loading, store: Store, on_progress: Callable[[int], None]) -> Scattered:
    """Read the bytes to their destinations. Blocks. `written` in the result are pieces whose memory in the state has
    changed.

    on_progress  is told the bytes done. Damage is in the result, not raised
    """
    index, plan, paths = loading.checkpoint.index, loading.plan, loading.checkpoint.segment_paths
    devices = {name: stream.native for name, stream in loading.destinations.streams.items()}
    for stream in loading.destinations.streams.values():
        stream.wait_current()
    with loading.held as stack:
        arena = open_read_arena(store)
        stack.callback(arena.close)
        fill = Fill(index, plan, loading.wanted, loading.destinations.places, devices)
        loading.begun.set()  # whatever ends this from here on: nobody can say that nothing has changed
        if loading.node_reads is None:
            found = scatter(store, paths, fill, arena, on_progress)
        else:
            found = loading.node_reads.run(store, paths, fill, arena, on_progress)
    bounced = loading.destinations.bounced
    return replace(found, written=tuple([p for p in found.written if p not in bounced])) if bounced else found


def finish(loading: Loading, found: Scattered) -> None:
    """Copy bounce buffers back, then restore what is not bytes. Raises what the read `found` to be damaged."""
    checkpoint = loading.checkpoint
    raise_damage(found, checkpoint.index, loading.wanted, checkpoint.segment_paths, f"cannot load {checkpoint.path}")
    for buffer in loading.destinations.bounced.values():
        buffer.copy_back()
    loading.restoration.finish()


def report(loading: Loading, found: Scattered, seconds: float) -> LoadReport:
    """What a load that is over did."""
    matched = loading.matched
    return LoadReport(
        step=loading.checkpoint.step, path=loading.checkpoint.path,
        matched=loading.wanted.names, initialised=matched.initialised,
        skipped=matched.skipped, cast=matched.cast,
        renamed=_renamed_pairs(loading.checkpoint.index.rows(), loading.rules),
        notes=tuple(loading.restoration.notes), bytes=found.bytes, seconds=seconds, shared_bytes=found.shared_bytes,
    )


class _Tensors(Mapping[str, StoredTensor]):
    """The stored tensors by their names in the state; a record is made where one is asked for."""

    def __init__(self, index: Index, rows: Mapping[str, int]) -> None:
        self._index, self._rows = index, rows

    def __getitem__(self, name: str) -> StoredTensor:
        row = self._rows[name]
        return StoredTensor(self._index.dtypes[row], self._index.shapes[row])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _stored(checkpoint: Checkpoint, names: Mapping[str, int], rules: Sequence[Rule], rank: int) -> Stored:
    """What the state layer needs to know of a checkpoint before a byte is read."""
    index, content = checkpoint.index, checkpoint.contents
    tied = {rename(alias, rules): rename(index.names[row], rules) for alias, row in index.aliases}
    return Stored(
        tensors=_Tensors(index, names), objects=content.replicated,
        per_rank={section: values[rank % len(values)] for section, values in content.per_rank.items() if values},
        by_rank=content.per_rank,
        rename=partial(rename, rules=rules), tied=tied,
    )


def _renamed_pairs(names: Mapping[str, int], rules: Sequence[Rule]) -> tuple[tuple[str, str], ...]:
    if not any(isinstance(rule, Rename) for rule in rules):
        return ()
    pairs = ((name, rename(name, rules)) for name in names)
    return tuple((old, new) for old, new in pairs if old != new)
