"""Exchanges the addresses of nodes whose memory together is one store. The addresses are sent with the messages by
which ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from flowstone.errors import FlowstoneError, RankError, StorageError
from flowstone.ranks import Decision, RankGroup
from flowstone.store.base import Store


@runtime_checkable
class MultiNodeStore(Store, Protocol):
    """A store in the memory of several nodes, which have to know each other's addresses (store/peers/store.py)."""

    def introduce(self) -> bytes:
        """This rank's address and settings, for the other ranks."""

    def use_addresses(self, introductions: Sequence[bytes], own: bytes, *, deadline_s: float) -> None:
        """Use the nodes of all ranks of the job as one store.

        introductions  what `introduce` has returned on each rank, in rank order
        own            what it has returned on this rank
        deadline_s     how many seconds ranks wait for the slowest rank
        """

    def expedite(self) -> None:
        """Speed up copies to other nodes, because a thread waits for saves. Can be called on any thread, and in a
        forked child.
        """

    def missing_checkpoints(self) -> str:
        """Why newer checkpoints, which only some nodes have, cannot be loaded; "" if there are no such checkpoints."""


class MultiNodeStores:
    """Those stores of a Checkpointer that are in the memory of several nodes.

    Must be constructed before other ranks wait for this rank, as a store may first have to start processes.
    """

    def __init__(
        self, stores: Sequence[Store], leave_out: Callable[[Sequence[tuple[Store, FlowstoneError]]], Store] | None
    ) -> None:
        """Get this rank's address from each store. `leave_out`: see `shared.address_exchange`."""
        self._first, self._leave_out = stores[0], leave_out
        self._introductions: list[tuple[MultiNodeStore, str, bytes | Exception]] = []
        for store in stores:
            if isinstance(store, MultiNodeStore):
                try:
                    self._introductions.append((store, store.location, store.introduce()))
                except Exception as error:
                    self._introductions.append((store, store.location, error))  # so all ranks raise the error

    def exchange_addresses(self, group: RankGroup) -> Store:
        """Exchange the addresses of all ranks. Every rank calls this, with the same stores, and waits for all ranks.

        returns the store that takes the saves; tiers that do not answer are left out, on all ranks

        raises  the error of a store, or RankError for another rank's error
        """
        lost: list[tuple[Store, FlowstoneError]] = []
        try:
            for store, location, own in self._introductions:
                if group.size == 1 and not isinstance(own, Exception):
                    continue  # such a store finds other nodes by itself
                try:
                    packed = group.agreement.agree(f"the nodes that hold {location}", own, _all).common
                except (StorageError, RankError) as error:
                    if self._leave_out is None or not _refuses(error):
                        raise
                    lost.append((store, error))
                    continue
                assert isinstance(own, bytes), "an error would have been raised"
                introductions = msgspec.msgpack.decode(packed, type=list[bytes])
                store.use_addresses(introductions, own, deadline_s=group.deadline_s)
            return self._leave_out(lost) if lost and self._leave_out is not None else self._first
        except BaseException:
            group.abandon()
            raise


def _refuses(error: StorageError | RankError) -> bool:
    """Whether `error` means that some rank cannot use its store now. No rank then uses the store, and all ranks get
    this error.
    """
    return isinstance(error, StorageError) or error.kind in ("PeerError", "MemoryAgentError", "StorageError")


def _all(messages: Sequence[bytes]) -> Decision:
    return Decision(msgspec.msgpack.encode(list(messages)))
