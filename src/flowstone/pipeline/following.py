"""A state that follows a journal while it is written: each step is made as soon as its frame is there (LowDiff+, arXiv
2509.04084; docs/REPLICA.md).

    newest checkpoint --load--> the state --next frame, as `replay` makes it--> the state of the newest step

The journals of a store are a chain: what is followed is left for the next one where that begins, and where the chain no
longer has the step that was reached (a rewind; a checkpoint that nothing leads to), the newest checkpoint is loaded
again. What comes next is a Move: of several ranks rank 0 looks for it, and all make it. One thread; reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import TypeAlias

import msgspec

from flowstone.checkpoint import Checkpoint
from flowstone.commit import catalog, journals
from flowstone.commit.entries import is_journal, step_directory
from flowstone.commit.journals import Chain, FramePlace, Journal, Part
from flowstone.config import FOLLOWED_AT_ONCE, EngineOptions
from flowstone.errors import DamagedError, StorageError
from flowstone.format.journal import Opening, OptimizerRow
from flowstone.pipeline.replay import (
    FrameBuffer,
    Progress,
    ReadFrame,
    UnfitError,
    approximate_sections,
    joined,
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


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the checkpoint of this step, which has that identity."""

    step: int
    id: str


class Make(msgspec.Struct, frozen=True, tag=True):
    """Make the next steps of a journal, in that directory, up to this one."""

    journal: str
    until: int


Move: TypeAlias = Load | Make


class _Followed(msgspec.Struct):
    """A journal that is being followed.

    until     the last step of it that counts; None: whatever is appended
    last      by rank, the frame of the step that was made last; empty: none yet
    openings  by rank: of this rank's file, and of those that have gradients for it; empty: not read yet
    """

    journal: Journal
    until: int | None
    last: Mapping[int, FramePlace] = {}
    openings: Mapping[int, Opening] = {}


class Following:
    """Brings `state` to the newest step of the store, again and again.

    rank          that has the state, of those that write the journals, `ranks` of them
    step          that the state is of; -1: of none yet
    exactness     as of Replay: "exact" while every fingerprint was that of the training
    differs_from  the first step with another fingerprint
    loads         how many checkpoints were loaded
    """

    def __init__(
        self, store: Store, state: MutableMapping[str, object], load: Callable[[int], object], options: EngineOptions,
        *, rank: int = 0, ranks: int = 1,
    ) -> None:
        """`load`: brings `state` to a checkpoint's step."""
        self._store, self._state, self._load, self._options = store, state, load, options
        self.rank, self.ranks = rank, ranks
        self._buffers = [FrameBuffer() for _ in range(ranks)]
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

        raises   as `make`
        """
        made = 0
        while made < FOLLOWED_AT_ONCE:
            move = self.next_move(written, at_most=1)
            if move is None or not self.make(move):
                break
            made += isinstance(move, Make)
        return made

    def next_move(self, written: str, *, at_most: int = FOLLOWED_AT_ONCE, newest: int | None = None) -> Move | None:
        """What comes next; None if there is nothing yet. Leaves the state as it is.

        at_most  so many steps
        newest   the last step that counts; None: what the files of all ranks have
        raises   StorageError  what was looked at is gone: look again
        """
        found = self._next_steps(at_most, newest)
        is_there = bool(written and len(self._ways) == 1 and self._ways[0].journal.opening.id == written)
        return found if found is not None or is_there else self._find_way() or self._next_steps(at_most, newest)

    def make(self, move: Move) -> bool:
        """Change the state. Returns whether all of the move was made: the frame of a single rank may be being written.

        raises   UnfitError    the state, or its optimizers, are not those of the journals
                 DamagedError  a frame that is not what was written, and is not the newest
                 StorageError, NoCheckpointError  what was looked at is gone: look again
        """
        if isinstance(move, Load):
            self._begin(move)
            return True
        if not self._ways or self._ways[0].journal.directory != move.journal:  # on other ranks than the one that looks
            self._ways = [_Followed(one, None) for one in journals.listed(self._store) if one.directory == move.journal]
        way = self._ways[0] if self._ways else None
        if way is None or (not way.last and way.journal.opening.after != self.step):
            return False  # a journal that this rank does not see, or that does not begin here
        while self.step < move.until:
            if not self._make_next(way):
                return False
        return self.step == move.until

    def forget(self) -> None:
        """The state is of no step that is known: the newest checkpoint is loaded next."""
        self.step, self._ways, self._progress, self._approximate = -1, [], None, ()

    def restore_rest(self) -> None:
        """Bring what no optimizer explains to the step, too. The state is then all of that step."""
        assert self._base is not None, "a step was made"
        assert self._progress is not None, "as above"
        rest = {section: value for section, value in self._state.items() if section not in self._approximate}
        restore_rest(self._base, rest, self._progress, self.rank, self._approximate)
        take_over(self._state, rest)

    # Steps

    def _next_steps(self, at_most: int, newest: int | None) -> Make | None:
        """Those whose frames are there, in the files of all ranks."""
        while self._ways:
            way, step = self._ways[0], self.step
            last: Mapping[int, FramePlace] | None = way.last
            for _ in range(at_most):
                last = None if last is None else self._next_places(way, last)
                if last is None or any(bound is not None and last[0].step > bound for bound in (way.until, newest)):
                    break
                step = last[0].step
            if step != self.step:
                return Make(way.journal.directory, step)
            if way.until is None or self.step < way.until:
                return None
            self._ways.pop(0)
        return None

    def _next_places(self, way: _Followed, last: Mapping[int, FramePlace]) -> dict[int, FramePlace] | None:
        """The frames of the next step, by rank; None unless all ranks have one."""
        found = dict[int, FramePlace]()
        for rank in range(self.ranks):
            try:
                place = journals.next_frame(self._store, way.journal, rank, last.get(rank))
            except StorageError:
                return None  # safe: a journal that is gone was removed for a checkpoint, which is looked for next
            if place is None or (found and place.step != found[0].step):
                return None
            found[rank] = place
        return found

    def _make_next(self, way: _Followed) -> bool:
        """Make the next step of a journal, if it is there. Whether it was."""
        places = self._next_places(way, way.last)
        if places is None:
            return False
        try:
            one = self._read(way, places)
        except DamagedError:
            if self._next_places(way, places) is not None:
                raise
            return False  # it is being written, or the training died there
        except StorageError:
            return False  # safe: as in `_next_places`
        replayer, progress = self._begun_with(one.opening)
        with replayer.stepping(one.opening.threads):
            progress.begin(one, self._state, self.rank)
            replayer.apply(one.row, one.payload, one.path, one.borrowed)
            progress.note(one, self._state, self.rank)
        way.last, self.step = places, places[self.rank].step
        return True

    def _read(self, way: _Followed, places: Mapping[int, FramePlace]) -> ReadFrame:
        """The frame of a step, with what other ranks have logged for this one."""
        if not way.openings:
            own = journals.opening_of(self._store, way.journal, self.rank)
            way.openings = {one: journals.opening_of(self._store, way.journal, one) for one in (self.rank, *own.others)}
        part = Part(way.journal, places[self.rank].step)
        return joined({
            rank: read_frame(self._store, part, places[rank], opening, self._buffers[rank])
            for rank, opening in way.openings.items()
        }, self.rank)

    def _begun_with(self, opening: Opening) -> tuple[Replayer, Progress]:
        """What makes the steps of this rank's file.

        raises  UnfitError  they are of other optimizers, or of another number of ranks
        """
        if opening.ranks != self.ranks:
            raise UnfitError(f"its steps are made by {opening.ranks} ranks, and the replica is one of {self.ranks}")
        if opening.optimizers != self._rows:
            raise UnfitError("its steps are of other optimizers, or of other parameters, than the replica's state has")
        assert self._replayer is not None, "the state was loaded"
        if self._progress is None:
            described = describe(self._state, rank=self.rank)
            self._progress = Progress(described, [opening], self._replayer, strict=False)
        self._replayer.sources = sources_for(self._state, [opening])[opening.id]
        self._approximate = tuple(dict.fromkeys([*self._approximate, *approximate_sections([opening])]))
        return self._replayer, self._progress

    # The way

    def _find_way(self) -> Load | None:
        """Look where the training goes on. What is to be loaded first, if the journals do not lead there."""
        chain = journals.newest_chain(self._store) if any(map(is_journal, self._store.names())) else None
        newest = catalog.newest(self._store)
        if newest is None:
            return None
        ways = [] if chain is None else self._ways_on(chain)
        is_loaded = self._progress is None and self._base is not None and self._base.manifest.id == newest.id
        if (ways is None or (chain is None and newest.step > self.step)) and not (is_loaded and self.step >= 0):
            return Load(newest.step, newest.id)
        if chain is not None and self._base is not None and self._base.step < chain.base <= self.step:
            self._base = Checkpoint(self._store, step_directory(chain.base), self._options)  # the older one may go
        self._ways = ways or []
        return None

    def _ways_on(self, chain: Chain) -> list[_Followed] | None:
        """The journals that lead on from the step; None if the chain does not come by there."""
        ways = [_Followed(part.journal, part.until) for part in chain.parts]
        ways[-1].until = None
        ids = [part.journal.opening.id for part in chain.parts]
        here = self._ways[0] if self._ways else None
        if here is not None and here.last and here.journal.opening.id in ids:
            at = ids.index(here.journal.opening.id)
            if chain.parts[at].until < self.step:
                return None
            ways[at].last = here.last
            return ways[at:]
        first = chain.parts[0].journal.opening
        if self.step < 0 or first.after != self.step:
            return None
        follows = here is not None and here.last and first.parent == here.journal.opening.id
        begins = self._progress is None and self._base is not None and first.checkpoint == self._base.manifest.id
        return ways if follows or begins else None

    def _begin(self, at: Load) -> None:
        """Load a checkpoint: what was made before is of no use any more."""
        self.forget()
        self._load(at.step)
        base = Checkpoint(self._store, step_directory(at.step), self._options)
        assert base.manifest.id == at.id, "a committed step is never another one"
        self._base, self.loads = base, self.loads + 1
        described = describe(self._state, rank=self.rank)
        optimizers, why = replayable(described.optimizers, described.unguarded)
        if not why:
            self._rows, why = optimizer_rows(self._state, optimizers, self.rank)
        if why:
            raise UnfitError(why)
        self._replayer, self.step = Replayer(optimizers), at.step
