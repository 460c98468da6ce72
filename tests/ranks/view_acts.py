"""Functions for ranks with shards that are views of each rank's own memory."""

from __future__ import annotations

import pytest
import torch
from acts import opened

import flowstone as fs

Parts = dict[str, object]


def parts(rank: int, ranks: int, *, start: float) -> tuple[torch.Tensor, Parts]:
    """A flat tensor of each rank's own, and shards of two tensors that are views of it, turned the one."""
    flat = torch.arange(start, start + 24) + 100 * rank
    rows, columns = fs.Shard(flat[:12].view(3, 4), (3 * ranks, 4), (3 * rank, 0)), flat[12:].view(3, 4).t()
    shard = fs.Shard(columns, (4 * ranks, 3), (4 * rank, 0))
    return flat, {"flat": fs.PerRank(flat), "rows": rows, "columns": shard}


def save_views(rank: int, path: str, ranks: int) -> None:
    with opened(path) as checkpointer:
        checkpointer.save(1, parts(rank, ranks, start=1)[1]).committed.result(60)


def load_views(rank: int, path: str, ranks: int) -> None:
    flat, state = parts(rank, ranks, start=-50)
    with opened(path) as checkpointer:
        checkpointer.load(state)
    assert torch.equal(flat, parts(rank, ranks, start=1)[0])


def refuse_views(rank: int, path: str, ranks: int) -> None:
    """The last rank's rows are views of its flat tensor in another place: that rank alone has found a difference."""
    flat, state = parts(rank, ranks, start=-50)
    if rank == ranks - 1:
        state["rows"] = fs.Shard(flat[8:20].view(3, 4), (3 * ranks, 4), (3 * rank, 0))
    before = flat.clone()
    with opened(path) as checkpointer:
        with pytest.raises((fs.MismatchError, fs.RankError), match=f"rows: shares memory with flat@{ranks - 1}"):
            checkpointer.load(state)
        assert torch.equal(flat, before)
        checkpointer.save(2, parts(rank, ranks, start=1)[1]).committed.result(60)  # nothing forbids it
