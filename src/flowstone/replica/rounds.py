"""Each rank of a training job can have a replica (a process with a second copy of that rank's state). The replicas act
together, in rounds. In each round, every replica tells rank 0's replica whether the training process of its own rank is
alive, and which step the replica has reached. Rank 0's replica decides what all of them do next: make a move, wait,
save, or end.

A move loads a checkpoint, or replays steps. All replicas load the same checkpoint, are at the same step at each
agreement, and save only a step that all of them have. The trainers take no part in these agreements.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from flowstone.config import REPLICA_ATTEMPTS_MAX, REPLICA_LAST_RANK_S, REPLICA_POLL_S, REPLICA_ROUND_S
from flowstone.errors import NoCheckpointError, RankError, StorageError
from flowstone.ranks import Decision
from flowstone.replica.following import JournalFollower, Make, Move
from flowstone.replica.link import TrainerLink, Training
from flowstone.replica.replica_wire import Exactness
from flowstone.replica.saving import FollowerCheckpointer


class _ReplicaReport(msgspec.Struct, frozen=True):
    """The report of one replica; TrainerLink and JournalFollower explain the fields."""

    training: Training
    step: int
    exactness: Exactness
    differs_from: int | None


class _ReplicaOrder(msgspec.Struct, frozen=True):
    """Rank 0's decision on what all replicas do next.

    does       "move": make `move`. "wait": there is no new step. "save": save the step of the state in full, then end.
               "end": end without a save
    exactness  "exact" if the state of every rank is bit-identical to training's; else "tolerance"
    differs_from  the first step whose fingerprint differs from training's on any rank
    why        why nothing is saved although a trainer has died; else ""
    """

    does: Literal["move", "wait", "save", "end"]
    exactness: Exactness
    differs_from: int | None
    move: Move | None = None
    why: str = ""


class ReplicaCoordinator:
    """Takes part in the rounds for one replica."""

    def __init__(
        self, following: JournalFollower, link: TrainerLink, checkpointer: FollowerCheckpointer, *, tolerance: bool
    ) -> None:
        self._following, self._link, self._checkpointer, self._tolerance = following, link, checkpointer, tolerance
        self._failures = 0
        # on rank 0: the time when a rank of the training job was first found ended or dead
        self._since: float | None = None

    def follow(self) -> bool:
        """Follow the trainer until it has ended or died. Returns whether the state must be saved.

        raises  TimeoutError  a rank of the training job has ended or died, but another rank is still alive
                RankError, and the errors of JournalFollower.make
        """
        following, link = self._following, self._link
        while True:
            newest = link.status.newest
            report = _ReplicaReport(link.training, following.step, following.exactness, following.differs_from)
            answer = self._checkpointer.agree("what replicas do next", msgspec.msgpack.encode(report), self._decide)
            order = msgspec.msgpack.decode(answer, type=_ReplicaOrder)
            if following.step >= 0:
                link.note_following()
                link.update_status(does="follows", step=following.step, exactness=order.exactness,
                          differs_from=order.differs_from)
            if order.why:
                raise TimeoutError(order.why)
            if order.does in ("save", "end"):
                return order.does == "save"
            if order.move is not None:
                self._make(order.move)
            elif following.rank == 0 and link.training == "lives":
                link.await_step(newest, REPLICA_ROUND_S)
            elif following.rank == 0:
                time.sleep(REPLICA_POLL_S)

    def _decide(self, messages: Sequence[bytes]) -> Decision:
        """On rank 0: the order for all replicas."""
        reports = [msgspec.msgpack.decode(data, type=_ReplicaReport) for data in messages]
        return Decision(msgspec.msgpack.encode(self._order(reports)))

    def _order(self, reports: Sequence[_ReplicaReport]) -> _ReplicaOrder:
        following, link = self._following, self._link
        if len({report.step for report in reports}) > 1:  # the last move has failed on some rank
            following.forget()
        differing = [report.differs_from for report in reports if report.differs_from is not None]
        is_exact = all(report.exactness == "exact" for report in reports)
        order = _ReplicaOrder("wait", "exact" if is_exact else "tolerance", min(differing, default=None))
        gone = [report.training for report in reports if report.training != "lives"]
        is_over = len(gone) == len(reports)
        if is_over and "died" not in gone:
            return msgspec.structs.replace(order, does="end")
        move = self._next_move(newest=None if is_over else link.status.newest)
        if move is not None:
            return msgspec.structs.replace(order, does="move", move=move)
        if is_over:
            saves = following.step >= 0 and following.is_beyond_checkpoint and (is_exact or self._tolerance)
            return msgspec.structs.replace(order, does="save" if saves else "end")
        if gone and self._since is None:
            self._since = time.monotonic()
        if self._since is not None and time.monotonic() - self._since > REPLICA_LAST_RANK_S:
            lives = [rank for rank, report in enumerate(reports) if report.training == "lives"]
            return msgspec.structs.replace(
                order,
                why=f"a trainer ended {REPLICA_LAST_RANK_S:.0f} s ago, but rank {lives[0]} is still alive"
            )
        return order

    def _next_move(self, newest: int | None) -> Move | None:
        try:
            return self._following.next_move(self._link.journal, newest=newest)
        except (StorageError, NoCheckpointError):
            return None  # the file was removed, as there is a newer checkpoint, which the next round finds

    def _make(self, move: Move) -> None:
        """Make the move. If its files were removed because there is a newer checkpoint, all replicas load that one
        next.
        """
        following = self._following
        try:
            if following.make(move):
                self._failures = 0 if isinstance(move, Make) else self._failures
                return
            why = f"the replica of rank {following.rank} does not see the files that rank 0's replica sees"
        except (StorageError, NoCheckpointError, RankError) as error:
            why = str(error)
        following.forget()
        self._failures += 1
        if self._failures > REPLICA_ATTEMPTS_MAX:
            raise RankError(
                f"the replicas failed {self._failures} times in a row to load a checkpoint or replay a step; the last "
                f"attempt was {move}",
                rank=following.rank, phase="replica", reason=why,
                next="use one directory that every node sees, with changes visible at once",
            )
