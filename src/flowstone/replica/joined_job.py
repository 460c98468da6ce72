"""A job of processes on one node. They join torch.distributed through a store on rank 0, and watch each other's
processes, so that no rank waits for a process that has ended.

    join     connect to the store, exchange process ids, then create the gloo group
    watch    thread `flowstone-joined` reports a rank that ends without `leave` as lost
    leave    rank 0 leaves last: its store has the last messages of the other ranks
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from flowstone.config import DEADLINE_S

_HOST = "127.0.0.1"


class JoinedJob:
    """This process's membership of the job."""

    def __init__(self, rank: int, size: int, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called on the watching thread, with the reason, if a rank ends without calling `leave`."""
        self._rank, self._size, self._on_lost = rank, size, on_lost
        self._store: Any = None
        self._processes: dict[int, int] = {}  # rank -> process descriptor
        self._is_leaving = False
        self._watcher = threading.Thread(target=self._watch, name="flowstone-joined", daemon=True)

    def join(self, port: int, listener: int, timeout_s: float) -> None:
        """Become a rank of the default group. Blocks until all ranks have joined.

        listener  on rank 0: descriptor of a socket that listens at `port`; the key-value store closes the descriptor.
                  On other ranks: -1
        raises    RuntimeError (torch's), OSError if a rank does not join in time
        """
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]  # missing in torch's stubs
            _HOST, port, self._size, self._rank == 0, timeout, wait_for_workers=False,
            master_listen_fd=None if listener < 0 else listener,
        )
        own = PrefixStore("flowstone-joined", store.clone())  # type: ignore[attr-defined]  # not in the stubs
        own.set(_process(self._rank), str(os.getpid()))
        for rank in range(self._size):
            if rank != self._rank:
                with suppress(ProcessLookupError):  # that process has ended, which `_watch` reports
                    self._processes[rank] = os.pidfd_open(int(own.get(_process(rank))))
        self._store = own
        self._watcher.start()
        dist.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=self._size, timeout=timedelta(seconds=DEADLINE_S)
        )

    def leave(self, reason: str = "") -> None:
        """Announce that this process is about to end. `reason`: why, if the others cannot continue without this rank.

        Without a reason, rank 0 first waits until the other ranks have ended, because the key-value store ends
        with its process.
        """
        has_left, self._is_leaving = self._is_leaving, True
        if self._store is None or has_left:
            return
        with suppress(RuntimeError):  # rank 0 has ended
            self._store.set(_last_words(self._rank), reason)
        if self._rank == 0 and not reason:
            self._watcher.join(DEADLINE_S)

    def _watch(self) -> None:
        processes = dict(self._processes)
        lost = {*range(self._size)} - {*processes, self._rank}
        while processes and (self._is_leaving or not lost):
            ready, _, _ = select.select(list(processes.values()), [], [])
            ended = [rank for rank, descriptor in processes.items() if descriptor in ready]
            lost |= {rank for rank in ended if not self._has_left(rank)}
            for rank in ended:
                os.close(processes.pop(rank))
        for rank in sorted(lost)[:1]:
            if not self._is_leaving:
                self._on_lost(f"the replica of rank {rank} has ended{self._reason_of(rank)}")

    def _has_left(self, rank: int) -> bool:
        return self._words_of(rank) == b""

    def _reason_of(self, rank: int) -> str:
        words = self._words_of(rank)
        return f": {words.decode(errors='replace')}" if words else ""

    def _words_of(self, rank: int) -> bytes | None:
        with suppress(RuntimeError):  # rank 0 has ended, and the store with it
            if self._store.check([_last_words(rank)]):
                words: bytes = self._store.get(_last_words(rank))
                return words
        return None


def _process(rank: int) -> str:
    return f"process/{rank}"


def _last_words(rank: int) -> str:
    return f"left/{rank}"
