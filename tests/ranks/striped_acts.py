"""Functions that ranks run in tests of stores over several paths."""

from __future__ import annotations

import torch
from acts import opened
from torch import nn

import flowstone as fs


def day(rank: int, path: str, first: int) -> list[str]:
    """One day of a job whose ranks have a layer each, and one in common: load what is there, save twice, load that. The
    names of all segments.
    """
    torch.manual_seed(1)
    own = nn.Linear(600, 512, bias=False)
    common = nn.Linear(512, 512, bias=False)
    parts = {f"rank{rank}.{index}": own.weight.detach()[128 * index : 128 * (index + 1)] for index in range(4)}
    state = {"common": common, "own": parts, "step": first}
    store = fs.Striped([f"{path}/one", f"{path}/two"], weights=[1, 1])
    with opened(store, keep=2) as saver:
        if first > 1:
            saver.load(state)
        for step in (first, first + 1):
            with torch.no_grad():
                common.weight.fill_(step)
                own.weight.fill_(step + rank / 10)
            made = saver.save(step, {**state, "step": step}).committed.result(120)
        with torch.no_grad():
            own.weight.fill_(-1)
            common.weight.fill_(-1)
        saver.load(state)
        assert (own.weight == torch.tensor(first + 1 + rank / 10)).all()
        assert (common.weight == first + 1).all()
    return [row.name for row in made.manifest.segments]
