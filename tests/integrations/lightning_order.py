"""The order of samples in Lightning's recipes: a resumed run continues after the samples that were used."""

from __future__ import annotations

from collections.abc import Iterator

import prelude
import torch
from torch.utils.data import Sampler

_SAMPLES = 40


class Order(Sampler[int]):
    """One rank's share of each epoch's permutation. `begin`: how many samples of it were seen, in all epochs."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.begin = ranks, 0

    def __len__(self) -> int:
        return _SAMPLES // self.ranks

    def __iter__(self) -> Iterator[int]:
        epoch, done = divmod(self.begin, len(self))
        self.begin += len(self) - done
        order = torch.randperm(_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        return iter(order[prelude.RANK :: self.ranks][done:].tolist())
