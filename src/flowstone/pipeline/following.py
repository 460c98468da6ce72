"""A state that follows a journal while it is written: each step is made as soon as its frame is there (LowDiff+, arXiv
2509.04084; docs/REPLICA.md).

    newest checkpoint --load--> the state --next frame, as `replay` makes it--> the state of the newest step

The journals of a store are a chain: what is followed is left for the next one where that begins, and where the chain no
longer has the step that was reached (a rewind; a checkpoint that nothing leads to), the newest checkpoint is loaded
again. One thread; reads only.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import msgspec

from flowstone.checkpoint import Checkpoint
from flowstone.commit import catalog, journals
from flowstone.commit.entries import is_journal, step_directory
from flowstone.commit.journals import Chain, FramePlace, Journal, Part
from flowstone.config import FOLLOWED_AT_ONCE, EngineOptions
from flowstone.errors import DamagedError, StorageError
from flowstone.format.journal import OptimizerRow
from flowstone.pipeline.replay import (
    FrameBuffer,
    Progress,
    UnfitError,
    approximate_sections,
    read_frame,
    restore_rest,
    sources_for,
    take_over,
)
from flowstone.stage.replayer import Replayer
from flowstone.state import describe
from flowstone.state.stepped import optimizer_rows, replayable
from flowstone.store.base import Store
from flowstone.store.replica_wire import Exactness

_RANK = 0  # the only one


class _Followed(msgspec.Struct):
    """A journal that is being followed.

    until  the last step of it that counts; None: whatever is appended
    last   the frame that was made last; None: none yet
    """

    journal: Journal
    until: int | None
    last: FramePlace | None = None


class Following:
    """Brings `state` to the newest step of the store, again and again.

    step          that the state is of; -1: of none yet
    exactness     as of Replay: "exact" while every fingerprint was that of the training
    differs_from  the first step with another fingerprint
    loads         how many checkpoints were loaded
    """

    def __init__(
        self, store: Store, state: MutableMapping[str, object], load: Callable[[int], object], options: EngineOptions
    ) -> None:
        """`load`: brings `state` to a checkpoint's step."""
        self._store, self._state, self._load, self._options = store, state, load, options
        self._buffer = FrameBuffer()
        self._base: Checkpoint | None = None
        self._ways: list[_Followed] = []
        self._replayer: Replayer | None = None
        self._rows: tuple[OptimizerRow, ...] = ()
        self._progress: Progress | None = None
        self._approximate: tuple[str, ...] = ()
        self.step, self.loads = -1, 0

    @property
    def exactness(self) -> Exactness:
        differs = self._approximate or (self._progress is not None and self._progress.exactness != "exact")
        return "tolerance" if differs else "exact"

    @property
    def differs_from(self) -> int | None:
        return None if self._progress is None else self._progress.differs_from

    @property
    def is_beyond_checkpoint(self) -> bool:
        """Whether the store has the state's step in a journal alone."""
        return self._progress is not None and self._progress.steps > 0 and self.step not in catalog.steps(self._store)

    def advance(self, written: str) -> int:
        """Make the steps that have come, a few at most. Returns how many it has made.

        written  the journal to which the training appends; "": it is not known, or ended

        raises   UnfitError    the state, or its optimizers, are not those of the journals
                 DamagedError  a frame that is not what was written, and is not the newest
                 StorageError, NoCheckpointError  what was looked at is gone: look again
        """
        for made in range(FOLLOWED_AT_ONCE):
            if not self._make_next() and not (self._find_way(written) and self._make_next()):
                return made
        return FOLLOWED_AT_ONCE

    def restore_rest(self) -> None:
        """Bring what no optimizer explains to the step, too. The state is then all of that step."""
        assert self._base is not None, "a step was made"
        assert self._progress is not None, "as above"
        rest = {section: value for section, value in self._state.items() if section not in self._approximate}
        restore_rest(self._base, rest, self._progress, _RANK, self._approximate)
        take_over(self._state, rest)

    # Steps

    def _make_next(self) -> bool:
        """Make the step of the next frame, if it is there. Whether it was."""
        while self._ways:
            way = self._ways[0]
            place = self._next_place(way)
            if place is not None and (way.until is None or place.step <= way.until):
                return self._make(way, place)
            if way.until is None or self.step < way.until:
                return False
            self._ways.pop(0)
        return False

    def _next_place(self, way: _Followed) -> FramePlace | None:
        try:
            return journals.next_frame(self._store, way.journal, _RANK, way.last)
        except StorageError:
            return None  # safe: a journal that is gone was removed for a checkpoint, which is looked for next

    def _make(self, way: _Followed, place: FramePlace) -> bool:
        opening = way.journal.opening
        try:
            one = read_frame(self._store, Part(way.journal, place.step), place, opening, self._buffer)
        except DamagedError:
            if self._has_frame_behind(way, place):
                raise
            return False  # it is being written, or the training died there
        except StorageError:
            return False  # safe: as in `_next_place`
        replayer, progress = self._begun_with(way.journal)
        with replayer.stepping(opening.threads):
            progress.begin(one, self._state, _RANK)
            replayer.apply(one.row, one.payload, one.path)
            progress.note(one, self._state, _RANK)
        way.last, self.step = place, place.step
        return True

    def _has_frame_behind(self, way: _Followed, place: FramePlace) -> bool:
        return journals.next_frame(self._store, way.journal, _RANK, place) is not None

    def _begun_with(self, journal: Journal) -> tuple[Replayer, Progress]:
        """What makes the steps of `journal`.

        raises  UnfitError  they are of other optimizers, or of several ranks
        """
        opening = journal.opening
        if opening.ranks != 1:
            raise UnfitError(f"its steps are made by {opening.ranks} ranks")
        if opening.optimizers != self._rows:
            raise UnfitError("its steps are of other optimizers, or of other parameters, than the replica's state has")
        assert self._replayer is not None, "the state was loaded"
        if self._progress is None:
            described = describe(self._state, rank=_RANK)
            self._progress = Progress(described, [opening], self._replayer, strict=False)
        self._replayer.sources = sources_for(self._state, [opening])[opening.id]
        self._approximate = tuple(dict.fromkeys([*self._approximate, *approximate_sections([opening])]))
        return self._replayer, self._progress

    # The way

    def _find_way(self, written: str) -> bool:
        """Look where the training goes on, unless it is where this is already. Whether there is more to make."""
        if written and self._ways and self._ways[-1].journal.opening.id == written and len(self._ways) == 1:
            return False
        chain = journals.newest_chain(self._store) if any(map(is_journal, self._store.names())) else None
        newest = catalog.newest(self._store)
        if newest is None:
            return False
        ways = [] if chain is None else self._ways_on(chain)
        if ways is None or (chain is None and newest.step > self.step):
            self._begin(newest.step, newest.id)
            ways = [] if chain is None else self._ways_on(chain) or []
        elif chain is not None and self._base is not None and self._base.step < chain.base <= self.step:
            self._base = Checkpoint(self._store, step_directory(chain.base), self._options)  # the older one may go
        self._ways = ways
        return bool(ways)

    def _ways_on(self, chain: Chain) -> list[_Followed] | None:
        """The journals that lead on from the step; None if the chain does not come by there."""
        ways = [_Followed(part.journal, part.until) for part in chain.parts]
        ways[-1].until = None
        ids = [part.journal.opening.id for part in chain.parts]
        here = self._ways[0] if self._ways else None
        if here is not None and here.last is not None and here.journal.opening.id in ids:
            at = ids.index(here.journal.opening.id)
            if chain.parts[at].until < self.step:
                return None
            ways[at].last = here.last
            return ways[at:]
        first = chain.parts[0].journal.opening
        if self.step < 0 or first.after != self.step:
            return None
        follows = here is not None and here.last is not None and first.parent == here.journal.opening.id
        begins = self._progress is None and self._base is not None and first.checkpoint == self._base.manifest.id
        return ways if follows or begins else None

    def _begin(self, step: int, identity: str) -> None:
        """Load a checkpoint: what was made before is of no use any more."""
        self.step, self._ways, self._progress, self._approximate = -1, [], None, ()
        self._load(step)
        base = Checkpoint(self._store, step_directory(step), self._options)
        assert base.manifest.id == identity, "a committed step is never another one"
        self._base, self.loads = base, self.loads + 1
        described = describe(self._state, rank=_RANK)
        optimizers, why = replayable(described.optimizers, described.unguarded)
        if not why:
            self._rows, why = optimizer_rows(self._state, optimizers, _RANK)
        if why:
            raise UnfitError(why)
        self._replayer, self.step = Replayer(optimizers), step
