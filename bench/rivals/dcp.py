"""torch.distributed.checkpoint: save with one and two threads, and async_save.

DCP syncs its data files itself (sync_files, its default), its metadata before Python's buffer is
flushed, and the directory never; `make_durable` adds what is missing, so that all rivals promise the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench.meter import make_durable
from bench.rivals.base import SavesInDirectories, already_durable
from bench.state import State


class Dcp(SavesInDirectories):
    """Synchronous, without a process group."""

    def __init__(self, directory: Path, thread_count: int) -> None:
        super().__init__(directory)
        self._thread_count = thread_count

    def save(self, state: State, number: int) -> Callable[[], object]:
        at = self.place(number)
        writer = dcp.FileSystemWriter(at, thread_count=self._thread_count, sync_files=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
        make_durable(at)
        return already_durable

    def load(self, state: State, number: int, _how: str, /) -> None:
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.place(number)), no_dist=True)


class DcpAsync(Dcp):
    """async_save with its defaults: staged by a blocking copy, then written by a background thread."""

    def prepare(self) -> None:
        """async_save wants a process group; one process of gloo will do."""
        with tempfile.TemporaryDirectory() as meeting:
            dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=0, world_size=1)

    def save(self, state: State, number: int) -> Callable[[], object]:
        at = self.place(number)
        uploaded = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(at))

        assert isinstance(uploaded, Future), "the default stager copies before async_save returns"

        def wait() -> None:
            uploaded.result()
            make_durable(at)

        return wait

    def close(self) -> None:
        dist.destroy_process_group()


def open_rival(name: str, directory: Path) -> Dcp:
    return DcpAsync(directory, 1) if name == "dcp-async" else Dcp(directory, {"dcp-1": 1, "dcp-2": 2}[name])
