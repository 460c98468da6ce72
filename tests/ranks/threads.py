"""Ranks as threads that talk over one real TCPStore."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flowstone.config import TREE_FAN
from flowstone.ranks.agreement import Agreement, Timeouts
from flowstone.ranks.kv_store import KeyValueStore


class Job:
    """`size` ranks; what each does runs in a thread of its own."""

    def __init__(self, size: int, *, fan: int = TREE_FAN, **timeouts: float) -> None:
        self.size = size
        self.server = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)
        # Few connections: the fifth takes the store five seconds. No call waits in one, so ranks may share them.
        connections = [self.server.clone() for _ in range(min(size, 4))]
        self.kv_stores: list[KeyValueStore] = [dist.PrefixStore("job", connections[rank % 4]) for rank in range(size)]
        self.ranks = [
            Agreement(kv_store, rank, size, fan=fan, timeouts=Timeouts(**timeouts))
            for rank, kv_store in enumerate(self.kv_stores)
        ]

    def run(self, act: Callable[[Agreement], Any], *, ranks: list[int] | None = None) -> list[Any]:
        """What each rank's act gave, or raised."""
        chosen = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        with ThreadPoolExecutor(len(chosen)) as threads:
            futures = [threads.submit(act, rank) for rank in chosen]
        return [future.exception() or future.result() for future in futures]
