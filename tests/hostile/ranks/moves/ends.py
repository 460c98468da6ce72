"""How jobs end: in order, or by the death of ranks. Another job, of another size, continues in the same store."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING
from unittest import mock

from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.save import capturing
from flowstone.store.local import LocalStore
from flowstone.store.local_io import LocalWriteHandle
from flowstone.store.system import System
from hostile.ranks.moves.move import Ending, Table, some_rank

if TYPE_CHECKING:
    from hostile.ranks.loop import Loop

TABLE = Table()
POINTS: tuple[tuple[object, str, str | None], ...] = (
    (SaveCoordinator, "assign", None), (capturing, "start_capture", None), (LocalWriteHandle, "receipt", None),
    (System, "sync", None),
    (SaveCoordinator, "commit", None), (LocalStore, "put", "index"), (LocalStore, "put", "manifest"),
    (LocalStore, "rename", None), (LocalStore, "sync_directory", None),
)
"""Calls before which a rank is killed, with a text that one of their arguments contains."""


@TABLE.move(weight=1.5, ending=Ending.ORDERLY)
def restart(loop: Loop, chance: Random) -> None:
    """The job ends in order with saves in flight, and continues with another number of ranks."""
    loop.save()
    if loop.unsettled:
        loop.together()


@TABLE.move(weight=0.7, ending=Ending.KILLED)
def kill_one(loop: Loop, chance: Random) -> None:
    """One rank is killed at some point of a save; the others report that in time; then all are restarted."""
    from hostile.ranks.loop import killed, killed_after

    victim, point, delay_s = some_rank(loop, chance), chance.choice([None, *POINTS]), chance.random() * 0.05
    loop.disturb("kill-one")
    loop.excuse("kill-one")
    if loop.rank == victim:
        if point is None:
            killed_after(delay_s)
        else:
            killed_after(1.0)  # in case it does not reach that point
            owner, name, words = point
            original = getattr(owner, name)

            def strike(*arguments: object, **more: object) -> object:
                if words is None or any(isinstance(argument, str) and words in argument for argument in arguments):
                    killed()
                return original(*arguments, **more)

            mock.patch.object(owner, name, strike).start()
    for _ in range(2):
        loop.save()
        loop.train()
    if loop.rank == victim:
        while True:
            loop.call("wait", loop.settle)
    loop.call("wait", loop.settle)


@TABLE.move(weight=0.7, ending=Ending.KILLED)
def kill_all(loop: Loop, chance: Random) -> None:
    """All ranks are killed, one after the other, within a moment, while they save."""
    from hostile.ranks.loop import killed_after

    delays_s = [chance.random() ** 2 * 0.2 for _ in range(loop.size)]
    loop.disturb("kill-all")
    loop.excuse("kill-all")
    killed_after(delays_s[loop.rank])
    while True:
        loop.save()
        loop.train()
