"""The nodes of a job exchange addresses, where their memory is one store: in the ranks' agreement, no collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from flowstone.errors import FlowstoneError, RankError, StorageError
from flowstone.ranks import Decision, RankGroup
from flowstone.store.base import Store


@runtime_checkable
class MultiNodeStore(Store, Protocol):
    """A store whose parts on several nodes have to know each other (store/peers/store.py)."""

    def introduce(self) -> bytes:
        """This rank's address and settings, for the others."""

    def use_addresses(self, introductions: Sequence[bytes], own: bytes, *, deadline_s: float) -> None:
        """Take what all ranks have introduced, in their order, for the nodes of the job.

        deadline_s  that ranks wait for the slowest of them
        """

    def expedite(self) -> None:
        """A thread waits for all saves so far. Any thread; also in a forked child."""

    def absent(self) -> str:
        """Why newer checkpoints, of which some nodes know, cannot be loaded; "" if there are none."""


class MultiNodeStores:
    """The stores of a Checkpointer whose memory is spread over several nodes.

    Made before the other ranks wait for this one: to introduce itself, a store may have processes to start.
    """

    def __init__(
        self, stores: Sequence[Store], leave_out: Callable[[Sequence[tuple[Store, FlowstoneError]]], Store] | None
    ) -> None:
        """See `shared.address_exchange`."""
        self._first, self._leave_out = stores[0], leave_out
        self._introductions: list[tuple[MultiNodeStore, str, bytes | Exception]] = []
        for store in stores:
            if isinstance(store, MultiNodeStore):
                try:
                    self._introductions.append((store, store.location, store.introduce()))
                except Exception as error:
                    self._introductions.append((store, store.location, error))  # the other ranks raise, too

    def exchange_addresses(self, group: RankGroup) -> Store:
        """Exchange the addresses of all ranks. Every rank calls this, with the same stores; it waits for all of them.

        returns the store that takes the saves: of several tiers, those that do not answer are left out, on all ranks

        raises  what a store raises, or RankError for another rank's error
        """
        lost: list[tuple[Store, FlowstoneError]] = []
        try:
            for store, location, own in self._introductions:
                if group.size == 1 and not isinstance(own, Exception):
                    continue  # the store looks for other nodes by itself
                try:
                    told = group.agreement.agree(f"who holds {location}", own, _all).common
                except (StorageError, RankError) as error:
                    if self._leave_out is None or not _refuses(error):
                        raise
                    lost.append((store, error))
                    continue
                assert isinstance(own, bytes), "an error was raised"
                introductions = msgspec.msgpack.decode(told, type=list[bytes])
                store.use_addresses(introductions, own, deadline_s=group.deadline_s)
            return self._leave_out(lost) if lost and self._leave_out is not None else self._first
        except BaseException:
            group.abandon()
            raise


def _refuses(error: StorageError | RankError) -> bool:
    """Whether the error says that some rank cannot use its store now: then no rank uses it, and all have that error."""
    return isinstance(error, StorageError) or error.kind in ("PeerError", "MemoryAgentError", "StorageError")


def _all(said: Sequence[bytes]) -> Decision:
    return Decision(msgspec.msgpack.encode(list(said)))
