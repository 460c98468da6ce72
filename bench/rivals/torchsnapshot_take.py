"""TorchSnapshot: take and async_take of the full state, and one take for each tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torchsnapshot import Snapshot, StateDict

from bench.meter import make_durable
from bench.rivals.base import SavesInDirectories, already_durable
from bench.state import State, flatten


class TorchSnapshot(SavesInDirectories):
    """Nothing is synced by TorchSnapshot itself; `make_durable` is inside the timer."""

    def __init__(self, directory: Path, *, background: bool) -> None:
        super().__init__(directory)
        self._background = background

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path, stateful = self.place(number), _stateful(state)
        if not self._background:
            Snapshot.take(str(path), stateful)
            make_durable(path)
            return already_durable
        pending = Snapshot.async_take(str(path), stateful)

        def wait() -> None:
            pending.wait()
            make_durable(path)

        return wait

    def load(self, state: State, number: int, _how: str, /) -> None:
        Snapshot(str(self.place(number))).restore(_stateful(state))


class TorchSnapshotEach(SavesInDirectories):
    """A snapshot, and so a directory with a metadata file, for each tensor."""

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path = self.place(number)
        for name, tensor in flatten(state).items():
            Snapshot.take(str(path / name), {"x": StateDict(x=tensor)})
        make_durable(path)
        return already_durable

    def load(self, state: State, number: int, _how: str, /) -> None:
        for name, tensor in flatten(state).items():
            Snapshot(str(self.place(number) / name)).restore({"x": StateDict(x=tensor)})


def _stateful(state: State) -> dict[str, StateDict]:
    """Sections as TorchSnapshot wants them; restored in place, since the tensors are the state's own."""
    return {section: StateDict(content=content) for section, content in state.items()}


def open_rival(name: str, directory: Path) -> SavesInDirectories:
    os.environ["TORCHSNAPSHOT_DISABLE_BATCHING"] = str(name in ("torchsnapshot-best", "torchsnapshot-each"))
    if name == "torchsnapshot-each":
        return TorchSnapshotEach(directory)
    return TorchSnapshot(directory, background=name == "torchsnapshot-async")
