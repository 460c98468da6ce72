"""Who this process is, as torch.distributed has it."""

from __future__ import annotations

import torch.distributed as dist

from flowstone.ranks import this_job


def test_a_process_without_torch_distributed_is_a_job_of_its_own() -> None:
    job = this_job()
    assert (job.rank, job.size, job.board) == (0, 1, None)


def test_a_job_of_one_rank_talks_to_nobody() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert this_job().board is None
    finally:
        dist.destroy_process_group()
