"""torch.distributed.checkpoint: save with one and two threads, and async_save.

DCP syncs its data files itself (sync_files, its default), its metadata before Python's buffer is flushed, and never the
directory; `make_durable` adds what is missing, so that all rivals make the same promise.
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

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path = self.place(number)
        writer = dcp.FileSystemWriter(path, thread_count=self._thread_count, sync_files=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
        make_durable(path)
        return already_durable

    def load(self, state: State, number: int, _how: str, /) -> None:
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.place(number)), no_dist=True)


class DcpAsync(Dcp):
    """async_save: staged by a blocking copy, then written by a background thread.

    With `thread_count` 1 all are defaults; with more, plans are kept from save to save too. (Staging memory
    that is kept must be pinned, which needs an accelerator.)
    """

    def prepare(self, _state: State, _what: str, /) -> None:
        """async_save wants a process group; one process of gloo will do."""
        with tempfile.TemporaryDirectory() as meeting:
            dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=0, world_size=1)

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path = self.place(number)
        writer = dcp.FileSystemWriter(path, thread_count=self._thread_count)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=self._thread_count > 1)
        uploaded = dcp.async_save(state, storage_writer=writer, planner=planner)

        assert isinstance(uploaded, Future), "the default stager copies before async_save returns"

        def wait() -> None:
            uploaded.result()
            make_durable(path)

        return wait

    def close(self) -> None:
        dist.destroy_process_group()


def open_rival(name: str, directory: Path) -> Dcp:
    kind, threads = {
        "dcp-1": (Dcp, 1), "dcp-2": (Dcp, 2), "dcp-async": (DcpAsync, 1), "dcp-async-best": (DcpAsync, 2),
    }[name]
    return kind(directory, threads)
