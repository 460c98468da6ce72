"""Functions that ranks run in tests of saves that encode."""

from __future__ import annotations

import torch
from acts import opened

import flowstone as fs

ROWS, COLUMNS = 300, 1000


def part(rank: int) -> torch.Tensor:
    """Random numbers on rank 0, of which nothing is gained, and zeros elsewhere."""
    torch.manual_seed(rank)
    drawn = torch.randint(-(2**31), 2**31 - 1, (ROWS, COLUMNS), dtype=torch.int32)
    return drawn if rank == 0 else torch.zeros_like(drawn)


def saves(rank: int, path: str, ranks: int) -> bool:
    """Two saves of a tensor in parts, and a load. Whether each rank has its part back."""
    mine = part(rank)
    state = {"m": {"table": fs.Shard(mine, (ranks * ROWS, COLUMNS), (rank * ROWS, 0))}, "n": 1}
    with opened(path, engine=fs.EngineOptions(compress="max")) as saver:
        for step in (1, 2):
            saver.save(step, state).committed.result(120)
        mine.fill_(5)
        saver.load(state)
    return torch.equal(mine, part(rank))


def by_rules(rank: int, path: str, pattern: str) -> str:
    """A save by a rule for this name, of tensors that each rank has its own of. What went wrong; "" if nothing did."""
    state = {"m": {f"table{rank}": torch.randn(ROWS, 100)}}
    with opened(path, rules=fs.Quantize(pattern)) as saver:
        save = saver.save(1, state)
        failure = save.committed.exception(120)
    return "" if failure is None else f"{type(failure).__name__}: {failure}"
