"""Functions that ranks run in tests of calls that one of them makes by itself, as it should and as it should not."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
from acts import fill, opened, outcome, state_of, tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import flowstone as fs


def rank_0_saves(rank: int, path: str) -> list[float]:
    """The idiom of DDP: rank 0 alone saves, the others train on; then all load, as a job and each by itself."""
    state = state_of("whole")
    if rank == 0:
        with opened(path, alone=True) as saver:
            for step in (1, 2, 3):
                saver.fence()
                fill(state, step)
                saver.save(step, state)
                dist.barrier()
    else:
        for _ in range(3):
            dist.barrier()
    dist.barrier()
    saves = []
    for options in ({}, {"alone": True}):
        fill(state, -1)
        with opened(path, **options) as loader:
            assert loader.load(state).step == 3
            latest = loader.latest()
            assert latest is not None
            saves += [float(tensors(state)[0].flatten()[0]), float(latest.step)]
    return saves


def alone_with_a_part(rank: int, path: str) -> list[str]:
    """What is told of states of which this process holds a part, or nothing; a load reads that part."""
    mesh = init_device_mesh("cpu", (2,))
    one_row = distribute_tensor(torch.ones(1, 8), mesh, [Shard(0)])
    flat = fs.Shard(torch.ones(4), (8,), (4 * rank,))
    reported = []
    with opened(f"{path}-{rank}", alone=True, on_error="continue") as saver:
        for step, state in enumerate((state_of("rows"), state_of("flat"), {"x": {"one": one_row}}, {"x": {"w": flat}})):
            reported.append(str(outcome(saver, step, state)))
    with opened(path) as shared:
        state = state_of("rows")
        fill(state, 7)
        shared.save(1, state).committed.result(60)
    with opened(path, alone=True) as loader:
        fill(state, 0)
        loader.load(state)
        assert all(bool((tensor == 7).all()) for tensor in tensors(state))
    return reported


def one_more_on_rank_0(rank: int, path: str) -> list[int]:
    """Beside the job's own, rank 0 constructs Checkpointers: one that it never uses, one that cannot be made."""
    state = state_of("rows")
    steps = []
    if rank == 0:
        opened(path).close()
        with suppress(fs.ArgumentError):
            opened(path, engine="fast")
    with opened(path) as shared:
        for step in (1, 2):
            fill(state, step)
            shared.save(step, state).committed.result(60)
            if rank == 0:
                with opened(path), opened(path, alone=True) as alone:
                    latest = alone.latest()
                    assert latest is not None
                    steps.append(latest.step)
            assert shared.load(state).step == step
    with opened(path, on_error="continue", deadline_s=1.0) as shared:
        if rank == 0:
            with suppress(fs.RankError):
                shared.latest()
        dist.barrier()
        shared.save(3, state).committed.result(60)
        steps.append(shared.load(state).step)
    return steps
