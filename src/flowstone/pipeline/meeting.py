"""The nodes of a job find each other, where its memory is one store: by the ranks' own agreement, no collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from flowstone.ranks import Decision, RankGroup
from flowstone.store.base import Store


@runtime_checkable
class Meets(Store, Protocol):
    """A store whose parts on several nodes have to know each other (store/peers/store.py)."""

    def introduce(self) -> bytes:
        """What this rank tells the others."""

    def meet(self, said: Sequence[bytes], own: bytes, *, deadline_s: float) -> None:
        """Take what all ranks have told, in their order, for the nodes of the job.

        deadline_s  that ranks wait for the slowest of them
        """

    def expedite(self) -> None:
        """A thread waits for all saves so far. Any thread; also in a forked child."""

    def absent(self) -> str:
        """Why newer checkpoints, of which some nodes know, cannot be loaded; "" if there are none."""


class Meeting:
    """The meeting of all ranks' parts of those stores that are on several nodes.

    Made before the other ranks wait for this one: to introduce itself, a store may have processes to start.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self._said: list[tuple[Meets, str, bytes | Exception]] = []
        for store in stores:
            if isinstance(store, Meets):
                try:
                    self._said.append((store, store.location, store.introduce()))
                except Exception as error:
                    self._said.append((store, store.location, error))  # the other ranks are told, too

    def hold(self, group: RankGroup) -> None:
        """Every rank calls this, with the same stores. Blocks. A group of one has no one to meet.

        raises  what a store raises, or RankError for another rank's error
        """
        try:
            for store, location, own in self._said:
                if group.size == 1 and not isinstance(own, Exception):
                    continue  # the store looks for other nodes by itself
                told = group.agreement.agree(f"who holds {location}", own, _all).common
                assert isinstance(own, bytes), "an error was raised"
                store.meet(msgspec.msgpack.decode(told, type=list[bytes]), own, deadline_s=group.deadline_s)
        except BaseException:
            group.abandon()
            raise


def _all(said: Sequence[bytes]) -> Decision:
    return Decision(msgspec.msgpack.encode(list(said)))
