"""The job: this process's rank, the number of ranks, and the key-value store that they share."""

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
    """This process's rank, and the number of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def this_job() -> Job:
    """The job as torch.distributed has it; a process without it is a job of one rank.

    The key-value store is a prefix of the job's own store, over its own connection, so that a call on it delays no
    other. All Checkpointers of the job share it; those of the same group find each other at their first agreement.
    """
    rank, size = rank_and_size()
    if size == 1:
        return Job()
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    own = store.clone()  # type: ignore[attr-defined]  # not in the stubs
    own.set_timeout(timedelta(seconds=SILENCE_S))  # per call, in case the process that hosts the store is frozen
    return Job(rank, size, cast("KeyValueStore", PrefixStore("flowstone", own)))  # torch's stubs: values are str
