"""The load half of the conductor: everything is compared before a byte moves, then read, then finished.

    Manifest --> plan --ReadPlan--> store --bytes--> stage --> the caller's memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event

import numpy as np
from numpy.typing import NDArray

from flowstone.config import EngineOptions
from flowstone.events import LoadProgress
from flowstone.format.digest import digest
from flowstone.format.index import Index
from flowstone.format.manifest import encode_manifest, step_directory
from flowstone.pieces import Pieces
from flowstone.plan.match import Match, match, rename, renamed
from flowstone.plan.read import ReadPlan, plan_reads
from flowstone.progress import terminal_progress
from flowstone.reader import Checkpoint
from flowstone.rules import Rename, Rule
from flowstone.stage.arena import open_read_arena
from flowstone.stage.landing import Landed, land
from flowstone.stage.scatter import Scattered, raise_damage, scatter
from flowstone.state import Restoration, Stored, StoredTensor, prepare
from flowstone.store.base import Store
from flowstone.together import Together


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    matched      names of the tensors that were read
    initialised  wanted, not stored, left as they were (Init)
    skipped      stored, wanted by nobody (Skip)
    cast         converted from another dtype (Cast)
    renamed      stored name and name in the state, where they differ (Rename)
    notes        what else a careful reader would want to know
    bytes        of the chunks that were read
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


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """A load that is ready to read: what the state wants and the checkpoint holds agree.

    wanted  the pieces to be read
    landed  parallel: where their bytes land
    """

    checkpoint: Checkpoint
    rules: Sequence[Rule]
    restoration: Restoration
    matched: Match
    wanted: Pieces
    plan: ReadPlan
    landed: Landed
    begun: Event = field(default_factory=Event)  # bytes may have changed

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


def want(checkpoint: Checkpoint, state: Mapping[str, object], *, rules: Sequence[Rule], rank: int) -> Wanted:
    """Find the memory that the checkpoint's bytes may go to. Changes nothing.

    raises  DamagedError, StateError, MismatchError (two names become one)
    """
    checkpoint.check()
    names = renamed(checkpoint.index.rows(), rules)
    return Wanted(checkpoint, rules, names, prepare(state, _stored(checkpoint, names, rules, rank), rank=rank))


def plan_load(found: Wanted, elsewhere: NDArray[np.bool_] | None = None, *, stage: bool) -> Loading:
    """Compare all that can be known without the tensors' bytes. Changes nothing.

    elsewhere  which of the stored names some rank wants, in a job of several: those that none does are unexpected
    raises     MismatchError for every difference that no rule allows; BudgetError
    """
    checkpoint, rules, names, restoration = found.checkpoint, found.rules, found.names, found.restoration
    index = checkpoint.index
    others = [f"{d.kind:<11} {d.name}: wanted {d.expected}, stored {d.found}" for d in restoration.differences]
    matched = match(
        restoration.pieces, restoration.aliases, sections=restoration.sections, index=index, names=names,
        rules=rules, differences=others,
        elsewhere=() if elsewhere is None else {n for n, used in zip(names, elsewhere.tolist(), strict=True) if used},
    )
    wanted = restoration.pieces.take(matched.wanted)
    plan = plan_reads(index, wanted, matched.rows)
    stored = tuple(map(index.dtypes.__getitem__, matched.rows))
    cut = {int(plan.target[row]) for row in plan.common}
    landed = land(wanted, restoration.places.take(matched.wanted), stored, cut, stage=stage)
    return Loading(checkpoint, rules, restoration, matched, wanted, plan, landed)


def agree(
    store: Store, options: EngineOptions, together: Together, step: int, state: Mapping[str, object], *,
    rules: Sequence[Rule], stage: bool,
) -> Loading:
    """Compare `state` with the checkpoint of `step`, on all ranks, before the first byte of any changes.

    raises  what `want` and `plan_load` raise; RankError where that happens on another rank
    """
    words = f"the comparison with step {step}"
    failure: Exception | None = None
    try:
        found = want(Checkpoint(store, step_directory(step), options), state, rules=rules, rank=together.rank)
    except Exception as error:
        failure = error
    together.confirm(f"what is wanted of step {step}", failure)
    elsewhere = None
    if together.team is not None:
        sealed = digest(encode_manifest(found.checkpoint.manifest))
        together.same(f"the identity of step {step}", f"a manifest of digest {sealed}")
        elsewhere = together.anybody(words, found.names_used())
    try:
        ready = plan_load(found, elsewhere, stage=stage)
    except Exception as error:
        failure = error
    together.confirm(words, failure)
    return ready


def teller(step: int, total: int, emit: Callable[[LoadProgress], None]) -> Callable[[int], None]:
    """Tells how many of `total` bytes are done: an event, and a line on a terminal."""
    show = terminal_progress(f"loading step {step}")

    def progress(done: int) -> None:
        emit(LoadProgress(step, done, total))
        if show is not None:
            show(min(done, total), total)

    return progress


def read(loading: Loading, store: Store, on_progress: Callable[[int], None]) -> Scattered:
    """Read to where the bytes land. Blocks. `written` in the result are pieces whose memory in the state has changed.

    on_progress  is told the bytes done. Damage is in the result, not raised
    """
    arena = open_read_arena(store)
    for stream in loading.landed.streams.values():
        stream.follow()
    try:
        found = scatter(
            store, loading.checkpoint.segment_paths, loading.checkpoint.index, loading.plan, loading.wanted,
            loading.landed.places, arena, on_progress,
            {name: stream.native for name, stream in loading.landed.streams.items()},
        )
        loading.begun.set()
    finally:
        arena.close()
    aside = loading.landed.aside
    return replace(found, written=tuple([p for p in found.written if p not in aside])) if aside else found


def finish(loading: Loading, found: Scattered) -> None:
    """Move on what landed aside, then restore what is not bytes. Raises what the read `found` to be damaged."""
    checkpoint = loading.checkpoint
    raise_damage(found, checkpoint.index, loading.wanted, checkpoint.segment_paths, f"cannot load {checkpoint.path}")
    for landing in loading.landed.aside.values():
        landing.settle()
    loading.restoration.finish()


def report(loading: Loading, seconds: float) -> LoadReport:
    """What a load that is over did."""
    matched = loading.matched
    return LoadReport(
        step=loading.checkpoint.step, path=loading.checkpoint.path,
        matched=loading.wanted.names, initialised=matched.initialised,
        skipped=matched.skipped, cast=matched.cast,
        renamed=_renamed_pairs(loading.checkpoint.index.rows(), loading.rules),
        notes=tuple(loading.restoration.notes), bytes=loading.plan.bytes, seconds=seconds,
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
        rename=partial(rename, rules=rules), tied=tied,
    )


def _renamed_pairs(names: Mapping[str, int], rules: Sequence[Rule]) -> tuple[tuple[str, str], ...]:
    if not any(isinstance(rule, Rename) for rule in rules):
        return ()
    pairs = ((name, rename(name, rules)) for name in names)
    return tuple((old, new) for old, new in pairs if old != new)
