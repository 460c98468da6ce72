"""The replicas of several ranks: that of rank 0 says what comes next, from what all of them say, and all do it.

    each: how its rank of the training is, its step --agree--> rank 0: a move, or to save, or to end --> each

So all are at the same step whenever they agree, none saves what another one does not have, and all load the same
checkpoint at the same time. Training is in none of these agreements.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from flowstone.config import REPLICA_LOOK_S, REPLICA_REST_S, REPLICA_ROUND_S, REPLICA_TRIES_MAX
from flowstone.errors import NoCheckpointError, RankError, StorageError
from flowstone.pipeline.following import Following, Make, Move
from flowstone.ranks import Decision
from flowstone.replica.link import TrainerLink, Training
from flowstone.replica.saving import ReplicaCheckpointer
from flowstone.store.replica_wire import Exactness


class _Said(msgspec.Struct, frozen=True):
    """Of a rank. See TrainerLink and Following."""

    training: Training
    step: int
    exactness: Exactness
    differs_from: int | None


class _Order(msgspec.Struct, frozen=True):
    """What all do now.

    does       "wait": nothing has come
    exactness  and `differs_from`: of the state of all ranks
    why        nothing is saved, though training has died
    """

    does: Literal["move", "wait", "save", "end"]
    exactness: Exactness
    differs_from: int | None
    move: Move | None = None
    why: str = ""


class Rounds:
    """One replica's side."""

    def __init__(
        self, following: Following, link: TrainerLink, checkpointer: ReplicaCheckpointer, *, tolerance: bool
    ) -> None:
        self._following, self._link, self._checkpointer, self._tolerance = following, link, checkpointer, tolerance
        self._failures = 0
        self._since: float | None = None  # on rank 0: when the first rank of the training was gone

    def follow(self) -> bool:
        """Until training has ended, or died. Returns whether the state is to be saved.

        raises  TimeoutError  some rank of the training is gone, and another one lives on
                and as Following.make, RankError
        """
        following, link = self._following, self._link
        while True:
            newest = link.status.newest
            mine = _Said(link.training, following.step, following.exactness, following.differs_from)
            told = self._checkpointer.agree("what replicas do next", msgspec.msgpack.encode(mine), self._decide)
            order = msgspec.msgpack.decode(told, type=_Order)
            if following.step >= 0:
                link.is_following = True
                link.tell(does="follows", step=following.step, exactness=order.exactness,
                          differs_from=order.differs_from)
            if order.why:
                raise TimeoutError(order.why)
            if order.does in ("save", "end"):
                return order.does == "save"
            if order.move is not None:
                self._make(order.move)
            elif following.rank == 0 and link.training == "lives":
                link.await_news(newest, REPLICA_ROUND_S)
            elif following.rank == 0:
                time.sleep(REPLICA_LOOK_S)

    def _decide(self, said: Sequence[bytes]) -> Decision:
        """On rank 0."""
        return Decision(msgspec.msgpack.encode(self._order([msgspec.msgpack.decode(one, type=_Said) for one in said])))

    def _order(self, said: Sequence[_Said]) -> _Order:
        following, link = self._following, self._link
        if len({one.step for one in said}) > 1:  # some rank could not make the last move
            following.forget()
        differing = [one.differs_from for one in said if one.differs_from is not None]
        is_exact = all(one.exactness == "exact" for one in said)
        order = _Order("wait", "exact" if is_exact else "tolerance", min(differing, default=None))
        gone = [one.training for one in said if one.training != "lives"]
        is_over = len(gone) == len(said)
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
        if self._since is not None and time.monotonic() - self._since > REPLICA_REST_S:
            lives = [rank for rank, one in enumerate(said) if one.training == "lives"]
            return msgspec.structs.replace(
                order, why=f"a rank of the training has ended {REPLICA_REST_S:.0f} s ago, and rank {lives[0]} lives on"
            )
        return order

    def _next_move(self, newest: int | None) -> Move | None:
        try:
            return self._following.next_move(self._link.journal, newest=newest)
        except (StorageError, NoCheckpointError):
            return None  # safe: removed meanwhile, for a newer checkpoint, which is looked for next

    def _make(self, move: Move) -> None:
        """What is gone meanwhile, as training has a newer checkpoint, is of no use: then all load that one."""
        following = self._following
        try:
            if following.make(move):
                self._failures = 0 if isinstance(move, Make) else self._failures
                return
            why = f"the replica of rank {following.rank} does not see what that of rank 0 sees"
        except (StorageError, NoCheckpointError, RankError) as error:
            why = str(error)
        following.forget()
        self._failures += 1
        if self._failures > REPLICA_TRIES_MAX:
            raise RankError(
                f"{self._failures} moves have failed: {move}", rank=following.rank, phase="replica", reason=why,
                next="use one directory, with changes visible at once",
            )
