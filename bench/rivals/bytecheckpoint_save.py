"""ByteCheckpoint: save and load with framework="ddp" on one rank of gloo.

It syncs its data files before Python's buffer is flushed, and never its directories; `make_durable` adds that.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Event

import torch.distributed as dist

from bench.meter import make_durable
from bench.rivals.base import SavesInDirectories
from bench.state import State

WRITE_TIMEOUT_S = 1800.0


class Section:
    """What ByteCheckpoint takes for a module or an optimizer: nested dictionaries of tensors, loaded in place."""

    def __init__(self, content: object) -> None:
        assert isinstance(content, dict)
        self._content = content

    def state_dict(self) -> dict[str, object]:
        return dict(self._content)  # it removes keys

    def load_state_dict(self, _content: object) -> None:
        """Its tensors are the section's own."""


class ByteCheckpoint(SavesInDirectories):
    """`fast` is fast_saving: the first save of a process is synchronous all the same."""

    def __init__(self, directory: Path, *, fast: bool) -> None:
        super().__init__(directory)
        self._fast = fast
        os.environ["BYTECHECKPOINT_STORE_WORKER_COUNT"] = "2" if fast else "1"  # read when it is imported
        import bytecheckpoint
        from bytecheckpoint.distributed.rpc_context import setup_rpc_service

        self._save, self._load, self._start_server = bytecheckpoint.save, bytecheckpoint.load, setup_rpc_service

    def prepare(self, _state: State, verb: str, /) -> None:
        """The process group, and the server over which ranks report; its authors leave that out of their times too."""
        with tempfile.TemporaryDirectory() as meeting:
            dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=0, world_size=1)
        if verb == "save":
            self._start_server()

    def place(self, number: int, /) -> Path:
        return super().place(number) / f"global_step_{number}"

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path, written = self.place(number), Event()
        self._save(
            str(path.parent), _sections(state), framework="ddp", fast_saving=self._fast, global_steps=number,
            callback=written.set,
        )

        def wait() -> None:
            if not written.wait(WRITE_TIMEOUT_S):
                raise TimeoutError(f"not written after {WRITE_TIMEOUT_S:.0f} s")
            make_durable(path.parent)

        return wait

    def load(self, state: State, number: int, how: str, /) -> None:
        self._load(str(self.place(number)), _sections(state), framework="ddp", fast_loading="fast_loading" in how)

    def close(self) -> None:
        dist.destroy_process_group()


def _sections(state: State) -> dict[str, Section]:
    return {name: Section(content) for name, content in state.items()}


def open_rival(name: str, directory: Path) -> ByteCheckpoint:
    return ByteCheckpoint(directory, fast=name == "bytecheckpoint-best")
