"""Keep a second copy of a state up to date: replay each frame (the record of one step) of a journal as soon as it is
written (LowDiff+, arXiv 2509.04084; docs/REPLICA.md).

    newest checkpoint --load--> the state --replay of the next frame--> the state of the newest step

The journals of a store form a chain: at the end of a journal, the follower continues in the next one. If the chain no
longer has the follower's step (after a rewind, or after a full save of a step that is in no journal), it loads the
newest checkpoint again. Rank 0 chooses each next Move (Load or Make), and all ranks make it. For one thread; only reads
the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TypeAlias

import msgspec

from flowstone.commit import catalog
from flowstone.commit.entries import is_journal, step_directory
from flowstone.config import REPLICA_STEPS_AT_ONCE, EngineOptions
from flowstone.errors import DamagedError, StorageError
from flowstone.journal import journals
from flowstone.journal.journal_format import JournalHeader, OptimizerRow
from flowstone.journal.journals import Chain, ChainPart, FramePlace, Journal
from flowstone.journal.optimizer_rows import optimizer_rows
from flowstone.journal.replay import (
    FrameBuffer,
    ReplayProgress,
    UnfitError,
    VerifiedFrame,
    approximate_sections,
    read_frame,
    restore_remaining,
    sources_for,
    update_sections,
    with_borrowed_gradients,
)
from flowstone.journal.replayer import Replayer
from flowstone.reading.checkpoint import Checkpoint
from flowstone.replica.replica_wire import Exactness
from flowstone.state import describe
from flowstone.store.base import Store
from flowstone.torch.compressed import CompressedGradients
from flowstone.torch.stepped_tensors import find_replayable_optimizers


class Load(msgspec.Struct, frozen=True, tag=True):
    """A move: load the checkpoint of `step` with this id."""

    step: int
    id: str


class Make(msgspec.Struct, frozen=True, tag=True):
    """A move: replay the next steps of the journal in this directory, up to step `until`."""

    journal: str
    until: int


Move: TypeAlias = Load | Make


class _FollowedJournal(msgspec.Struct):
    """A journal that is being followed.

    until     its last step to replay; None: the journal still grows
    last      by rank, the frame of the last replayed step; empty: no step yet
    openings  headers by rank: of this rank's file, and of files with gradients for this rank; empty: not read yet
    """

    journal: Journal
    until: int | None
    last: Mapping[int, FramePlace] = {}
    openings: Mapping[int, JournalHeader] = {}

    def advance(self, last: Mapping[int, FramePlace]) -> None:
        """Note that a step was replayed. `last`: its frames, by rank."""
        self.last = last

    def read_headers(self, store: Store, rank: int) -> Mapping[int, JournalHeader]:
        """Returns `openings`, which the first call reads from the files. `rank`: the rank of the state."""
        if not self.openings:
            own = journals.read_header(store, self.journal, rank)
            self.openings = {rank: own} | {
                other: journals.read_header(store, self.journal, other) for other in own.other_ranks
            }
        return self.openings


class JournalFollower:
    """Brings `state` to the newest step of the store, repeatedly.

    rank          rank of the state, among the `ranks` that write the journals
    step          step of the state; -1: nothing was loaded yet
    exactness     as in Replay: "exact" if the state is bit-identical to the trainer's. "tolerance" if it may differ,
                  for example because some sections can only be replayed approximately
    differs_from  the first step whose fingerprint differs from the one in the journal; None if there is none
    loads         the number of loaded checkpoints
    """

    def __init__(
        self, store: Store, state: MutableMapping[str, object], load: Callable[[int], object], options: EngineOptions,
        *, rank: int = 0, ranks: int = 1,
    ) -> None:
        """`load(step)` loads a checkpoint into `state`."""
        self._store, self._state, self._load, self._options = store, state, load, options
        self.rank, self.ranks = rank, ranks
        self._buffers = [FrameBuffer() for _ in range(ranks)]
        self._base: Checkpoint | None = None
        self._queue: list[_FollowedJournal] = []
        self._replayer: Replayer | None = None
        self._rows: tuple[OptimizerRow, ...] = ()
        self._progress: ReplayProgress | None = None
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
        """Whether the state's step is newer than every checkpoint, so that only a journal has it."""
        return self._progress is not None and self._progress.steps > 0 and self.step not in catalog.steps(self._store)

    def advance(self, written: str) -> int:
        """Make the next move: load a checkpoint, or replay a few steps. Returns the number of replayed steps.

        written  the journal to which the trainer appends; "": unknown, or ended

        raises   the errors of `make`
        """
        made = 0
        while made < REPLICA_STEPS_AT_ONCE:
            move = self.next_move(written, at_most=1)
            if move is None or not self.make(move):
                break
            made += isinstance(move, Make)
        return made

    def next_move(
        self, written: str, *, at_most: int = REPLICA_STEPS_AT_ONCE, newest: int | None = None
    ) -> Move | None:
        """The next move; None if there is nothing to do yet. Does not change the state.

        at_most  the most steps of one move
        newest   the last step to replay; None: the last step that the files of all ranks have
        raises   StorageError  a file was removed meanwhile: try again
        """
        steps = self._next_steps(at_most, newest)
        is_there = bool(written and len(self._queue) == 1 and self._queue[0].journal.header.id == written)
        return steps if steps is not None or is_there else self._find_journals() or self._next_steps(at_most, newest)

    def make(self, move: Move) -> bool:
        """Make a move. Returns whether it is complete. It is not, for example, while a frame is still being written.

        raises   UnfitError    the journals are of another state, or of other optimizers
                 DamagedError  a frame before the newest one is damaged
                 StorageError, NoCheckpointError  a file was removed meanwhile: try again
        """
        if isinstance(move, Load):
            self._begin(move)
            return True
        # rank 0 has found this journal, and this rank has not yet
        if not self._queue or self._queue[0].journal.directory != move.journal:
            listed = journals.list_journals(self._store)
            self._queue = [_FollowedJournal(journal, None) for journal in listed if journal.directory == move.journal]
        followed = self._queue[0] if self._queue else None
        if followed is None or (not followed.last and followed.journal.header.after != self.step):
            return False  # this rank does not see that journal, or the journal begins at another step
        while self.step < move.until:
            if not self._make_next(followed):
                return False
        return self.step == move.until

    def forget(self) -> None:
        """Forget which step the state has, so that the next move loads the newest checkpoint."""
        self.step, self._queue, self._progress, self._approximate = -1, [], None, ()

    def restore_remaining(self) -> None:
        """Also restore, as of the state's step, the values that no optimizer updates (objects, generators, buffers)."""
        assert self._base is not None, "a step was made"
        assert self._progress is not None, "as above"
        rest = {section: value for section, value in self._state.items() if section not in self._approximate}
        restore_remaining(self._base, rest, self._progress, self.rank, self._approximate)
        update_sections(self._state, rest)

    # Steps

    def _next_steps(self, at_most: int, newest: int | None) -> Make | None:
        """A move that replays the next steps which are in the files of all ranks; None if there are none."""
        while self._queue:
            followed, step = self._queue[0], self.step
            last: Mapping[int, FramePlace] | None = followed.last
            for _ in range(at_most):
                last = None if last is None else self._next_places(followed, last)
                bounds = [bound for bound in (followed.until, newest) if bound is not None]
                if last is None or any(last[0].step > bound for bound in bounds):
                    break
                step = last[0].step
            if step != self.step:
                return Make(followed.journal.directory, step)
            if followed.until is None or self.step < followed.until:
                return None
            self._queue.pop(0)
        return None

    def _next_places(self, followed: _FollowedJournal, last: Mapping[int, FramePlace]) -> dict[int, FramePlace] | None:
        """Where the next step's frames are, by rank; None unless the files of all ranks have the frame."""
        places = dict[int, FramePlace]()
        for rank in range(self.ranks):
            try:
                place = journals.next_frame(self._store, followed.journal, rank, last.get(rank))
            except StorageError:
                return None  # a journal is removed once there is a newer checkpoint, which the next move finds
            if place is None or (places and place.step != places[0].step):
                return None
            places[rank] = place
        return places

    def _make_next(self, followed: _FollowedJournal) -> bool:
        """Replay the next step of a journal. Returns False if its frames are not complete yet."""
        places = self._next_places(followed, followed.last)
        if places is None:
            return False
        try:
            frame = self._read(followed, places)
        except DamagedError:
            if self._next_places(followed, places) is not None:
                raise
            return False  # the frame is being written, or the trainer was killed before its end
        except StorageError:
            return False  # safe: as in `_next_places`
        replayer, progress, sources = self._replayer_for(frame.opening)
        with replayer.stepping(frame.opening.threads):
            progress.begin_step(frame, self._state, self.rank)
            replayer.apply(frame.row, frame.payload, frame.path, frame.borrowed, sources)
            progress.note_step(frame, self._state, self.rank)
        followed.advance(places)
        self.step = places[self.rank].step
        return True

    def _read(self, followed: _FollowedJournal, places: Mapping[int, FramePlace]) -> VerifiedFrame:
        """This rank's frame of a step, with the gradients that other ranks have logged for this rank."""
        part = ChainPart(followed.journal, places[self.rank].step)
        return with_borrowed_gradients({
            rank: read_frame(self._store, part, places[rank], opening, self._buffers[rank])
            for rank, opening in followed.read_headers(self._store, self.rank).items()
        }, self.rank)

    def _replayer_for(self, opening: JournalHeader) -> tuple[Replayer, ReplayProgress, Sequence[CompressedGradients]]:
        """Returns, for this rank's file: the replayer, its progress, and the sources that decompress gradients.

        raises  UnfitError  the training job has other optimizers, or another number of ranks
        """
        if opening.ranks != self.ranks:
            raise UnfitError(f"the training job has {opening.ranks} ranks, but the replica has {self.ranks}")
        if opening.optimizers != self._rows:
            raise UnfitError("the trainer's optimizers or parameters differ from those in the replica's state")
        assert self._replayer is not None, "the state was loaded"
        if self._progress is None:
            described = describe(self._state, rank=self.rank)
            self._progress = ReplayProgress(described, [opening], self._replayer, strict=False)
        sources = sources_for(self._state, [opening])[opening.id]
        self._approximate = tuple(dict.fromkeys([*self._approximate, *approximate_sections([opening])]))
        return self._replayer, self._progress, sources

    # Which journals come next

    def _find_journals(self) -> Load | None:
        """Find the journals to follow. If the state's step is not on the way to the newest step, returns a checkpoint
        to load first.
        """
        chain = journals.newest_chain(self._store) if any(map(is_journal, self._store.names())) else None
        newest = catalog.newest_manifest(self._store)
        if newest is None:
            return None
        ahead = [] if chain is None else self._journals_ahead(chain)
        is_loaded = self._progress is None and self._base is not None and self._base.manifest.id == newest.id
        if (ahead is None or (chain is None and newest.step > self.step)) and not (is_loaded and self.step >= 0):
            return Load(newest.step, newest.id)
        if chain is not None and self._base is not None and self._base.step < chain.base <= self.step:
            # opened now: the writer may remove the older checkpoint at any time
            self._base = Checkpoint(self._store, step_directory(chain.base), self._options)
        self._queue = ahead or []
        return None

    def _journals_ahead(self, chain: Chain) -> list[_FollowedJournal] | None:
        """The journals of the chain that continue from the state's step; None if that step is not in the chain."""
        ahead = [_FollowedJournal(part.journal, part.until) for part in chain.parts[:-1]]
        ahead.append(_FollowedJournal(chain.parts[-1].journal, None))
        ids = [part.journal.header.id for part in chain.parts]
        current = self._queue[0] if self._queue else None
        if current is not None and current.last and current.journal.header.id in ids:
            index = ids.index(current.journal.header.id)
            if chain.parts[index].until < self.step:
                return None
            ahead[index].advance(current.last)
            return ahead[index:]
        first = chain.parts[0].journal.header
        if self.step < 0 or first.after != self.step:
            return None
        follows = current is not None and current.last and first.parent == current.journal.header.id
        begins = self._progress is None and self._base is not None and first.checkpoint == self._base.manifest.id
        return ahead if follows or begins else None

    def _begin(self, move: Load) -> None:
        """Load a checkpoint, and follow from there."""
        self.forget()
        self._load(move.step)
        base = Checkpoint(self._store, step_directory(move.step), self._options)
        assert base.manifest.id == move.id, "a committed step never changes"
        self._base, self.loads = base, self.loads + 1
        described = describe(self._state, rank=self.rank)
        optimizers, why = find_replayable_optimizers(described.optimizers, described.unguarded)
        if not why:
            self._rows, why = optimizer_rows(self._state, optimizers, self.rank)
        if why:
            raise UnfitError(why)
        self._replayer, self.step = Replayer(optimizers), move.step
