"""torch.save to a path (which writes from C++; a Python file object is slower), then fsync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from bench.meter import make_durable
from bench.rivals.base import SavesInDirectories, already_durable
from bench.state import State, flatten


class TorchSave(SavesInDirectories):
    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path = self.place(number)
        path.mkdir()
        torch.save(state, path / "state.pt")
        make_durable(path)
        return already_durable

    def load(self, state: State, number: int, how: str, /) -> None:
        """Then a copy into the state's tensors, as load_state_dict does."""
        loaded = flatten(torch.load(self.place(number) / "state.pt", mmap="mmap" in how, weights_only=True))
        for name, tensor in flatten(state).items():
            tensor.copy_(loaded.pop(name))


def open_rival(name: str, directory: Path) -> TorchSave:
    torch.serialization.set_crc32_options(name != "torch-plain")
    return TorchSave(directory)
