"""safetensors save_file, then fsync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bench.meter import make_durable
from bench.rivals.base import SavesInDirectories, already_durable
from bench.state import State, flatten


class SafetensorsFile(SavesInDirectories):
    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path = self.place(number)
        path.mkdir()
        save_file(flatten(state), path / "state.safetensors")
        make_durable(path)
        return already_durable

    def load(self, state: State, number: int, how: str, /) -> None:
        """Then a copy into the state's tensors, as load_state_dict does: of all at the end, or of each in turn."""
        path = self.place(number) / "state.safetensors"
        if how == "load_file":
            loaded = load_file(path)
            for name, tensor in flatten(state).items():
                tensor.copy_(loaded.pop(name))
        else:
            with safe_open(path, framework="pt") as file:
                for name, tensor in flatten(state).items():
                    tensor.copy_(file.get_tensor(name))


def open_rival(_name: str, directory: Path) -> SafetensorsFile:
    return SafetensorsFile(directory)
