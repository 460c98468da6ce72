"""The rank of this process, as torch.distributed has it."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # the backend "fake"

from flowstone.ranks import KeyValueStore, this_job
from flowstone.stage import arena


def test_a_process_without_torch_distributed_is_a_job_of_its_own() -> None:
    job = this_job()
    assert (job.rank, job.size, job.kv_store) == (0, 1, None)


def test_a_job_of_one_rank_talks_to_nobody() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert this_job().kv_store is None
    finally:
        dist.destroy_process_group()


def test_ranks_meet_whatever_their_processes_have_opened_before() -> None:
    """A job may be made of processes that were in different jobs before, as after an elastic restart."""

    def joined(store: dist.Store, rank: int) -> KeyValueStore:
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        try:
            kv_store = this_job().kv_store
            assert kv_store is not None
            return kv_store
        finally:
            dist.destroy_process_group()

    earlier, now = dist.HashStore(), dist.HashStore()
    joined(earlier, 1)
    kv_stores = [joined(now, rank) for rank in (0, 1)]
    kv_stores[0].set("word", b"heard")
    assert kv_stores[1].check(["word"])
    assert kv_stores[1].get("word") == b"heard"


def test_ranks_of_a_node_share_a_quarter_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available_bytes", lambda: 64 << 30)
    for reported, share in (("", 16), ("1", 16), ("8", 2), ("none", 16), ("0", 16)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", reported)
        assert arena.default_budget_bytes() == share << 30
