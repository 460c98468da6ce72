"""The job: which of how many ranks this process is, and the key-value store that they share."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from flowstone.config import SILENCE_S
from flowstone.ranks.kv_store import KeyValueStore


class Job(msgspec.Struct, frozen=True):
    """`kv_store` is None in a job of one rank."""

    rank: int = 0
    size: int = 1
    kv_store: KeyValueStore | None = None


def rank_and_size() -> tuple[int, int]:
    """Which rank this process is, of how many."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def this_job() -> Job:
    """As torch.distributed has it; a process without it is a job of its own.

    It is a part of the job's own store, over a connection of its own: a call on it delays no other. All
    Checkpointers of the job share it; those that belong together meet when they first agree.
    """
    rank, size = rank_and_size()
    if size == 1:
        return Job()
    store = dist.distributed_c10d._get_default_store()  # no public name gives it
    own = store.clone()  # type: ignore[attr-defined]  # not in the stubs
    own.set_timeout(timedelta(seconds=SILENCE_S))  # of a call, where the process that keeps the store is frozen
    return Job(rank, size, cast("KeyValueStore", PrefixStore("flowstone", own)))  # torch's types: values are str alone
