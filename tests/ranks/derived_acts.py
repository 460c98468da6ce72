"""Functions that ranks run in tests of saves that leave out what follows from other tensors."""

from __future__ import annotations

import torch
from acts import opened

import flowstone as fs

ROWS, COLUMNS = 1201, 700  # no number of ranks divides them evenly


def whole(step: int) -> dict[str, torch.Tensor]:
    """Of each step other masters, their working copies, and an average that is equal to them."""
    torch.manual_seed(step)
    master = torch.randn(ROWS, COLUMNS)
    return {"master": master, "working": master.bfloat16(), "average": master.clone()}


def cut(rank: int, ranks: int, step: int) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """What a rank holds of them, and its tensors."""
    begin, end = (ROWS * offset // ranks for offset in (rank, rank + 1))
    mine = {name: tensor[begin:end].clone() for name, tensor in whole(step).items()}
    parts = {name: {"w": fs.Shard(tensor, (ROWS, COLUMNS), (begin, 0))} for name, tensor in mine.items()}
    return {**parts, "step": step}, mine


def saves(rank: int, path: str, ranks: int) -> None:
    with opened(path, engine=fs.EngineOptions(compress="derived")) as saver:
        for step in (1, 2):
            saver.save(step, cut(rank, ranks, step)[0]).committed.result(120)


def loads(rank: int, path: str, ranks: int, step: int) -> bool:
    """Whether a rank has its part of that step, bit for bit, in both orders of verification."""
    _, expected = cut(rank, ranks, step)
    actual = []
    for verify_first in (False, True):
        state, mine = cut(rank, ranks, 9)
        with opened(path) as loader:
            loader.load(state, step=step, verify_first=verify_first)
        actual += [torch.equal(mine[name].view(torch.uint8), item.view(torch.uint8)) for name, item in expected.items()]
    return all(actual)
