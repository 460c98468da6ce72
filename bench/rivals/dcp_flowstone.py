"""torch.distributed.checkpoint through Flowstone: the gain of users who keep dcp.save and dcp.async_save."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch.distributed.checkpoint as dcp

from bench.rivals.base import already_durable
from bench.rivals.dcp import Dcp, DcpAsync
from bench.state import State
from flowstone.adapters.dcp import FlowstoneReader, FlowstoneWriter


class Saved(Dcp):
    """dcp.save by one writer for all saves. Durable when it returns."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, thread_count=1)
        self._writer = FlowstoneWriter()

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        dcp.save(state, checkpoint_id=self.place(number), storage_writer=self._writer, no_dist=True)
        return already_durable

    def load(self, state: State, number: int, _how: str, /) -> None:
        dcp.load(state, storage_reader=FlowstoneReader(self.place(number)), no_dist=True)


class SavedAsync(DcpAsync):
    """dcp.async_save by the same, which stages, too."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, thread_count=1)
        self._writer = FlowstoneWriter()

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        saved = dcp.async_save(state, checkpoint_id=self.place(number), storage_writer=self._writer)
        assert isinstance(saved, Future), "the writer copies before async_save returns"
        return saved.result

    def load(self, state: State, number: int, _how: str, /) -> None:
        dcp.load(state, storage_reader=FlowstoneReader(self.place(number)), no_dist=True)


def open_rival(name: str, directory: Path) -> Dcp:
    return SavedAsync(directory) if name == "dcp-flowstone-async" else Saved(directory)
