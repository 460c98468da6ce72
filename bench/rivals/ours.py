"""Flowstone, with its defaults and in the settings of the goals. Digests cannot be switched off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import torch
import torch.distributed as dist

from bench.rivals import BUFFERED, REPLICAS, SHARED
from bench.state import State
from flowstone import Checkpointer, LoadReport, Shard
from flowstone.config import GIB, MIB, SHARED_READ_BYTES_MIN, EngineOptions
from flowstone.store.local import LocalStore

SMALL_ARENA_BYTES = 256 * MIB
UNBOUNDED_ARENA_BYTES = 16 * GIB  # touched only as far as the state needs
POSIX = "flowstone-posix"

# Engine options by name: an option that this version lacks is an error that says so, in the row.
SETTINGS: Mapping[str, tuple[int | None, Mapping[str, bool]]] = {
    "flowstone": (None, {}),
    "flowstone-in-place": (None, {"read_in_place": True}),
    "flowstone-arena": (UNBOUNDED_ARENA_BYTES, {"read_in_place": True}),
    "flowstone-arena-256": (SMALL_ARENA_BYTES, {}),
    "flowstone-small": (None, {}),
    "flowstone-ranks": (None, {}),
    REPLICAS: (None, {}),
    POSIX: (None, {}),
}


class _Io(msgspec.Struct):
    backend: str


class _Manifest(msgspec.Struct):
    io: _Io


class Flowstone:
    """One Checkpointer for all saves of a process, as a training job has it. In a job of several ranks, one of each."""

    def __init__(self, name: str, store: Path) -> None:
        self._name, self._store = name, store
        self._budget_bytes, options = SETTINGS[name]
        self._options = EngineOptions(**options)  # type: ignore[arg-type]
        self._checkpointer: Checkpointer | None = None
        is_job = dist.is_initialized()
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if is_job else (0, 1)

    def prepare(self, _state: State, _what: str, /) -> None:
        pass

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        checkpointer = self._opened()
        if self._ranks == 1:
            save = checkpointer.save(number, state)
            save.captured.result()
        else:
            save = checkpointer.save(number, self._held(state), fence="manual")
            checkpointer.fence()
        return save.committed.result

    def place(self, number: int, /) -> Path:
        return self._store / f"step-{number:08d}"

    def load(self, state: State, number: int, how: str, /) -> None:
        report = self._load_replicas(state, how) if self._name == REPLICAS else self._opened().load(self._held(state))
        assert report.step == number

    def _load_replicas(self, state: State, how: str) -> LoadReport:
        """Shared wherever that is asked, also where the product would not."""
        self._options = replace(self._options, share_reads=SHARED in how, direct="off" if BUFFERED in how else "auto")
        with mock.patch.object(LocalStore, "reads_past_cache", return_value=True):
            report = self._opened().load(state)
        is_worth_it = max(report.bytes, report.shared_bytes) >= SHARED_READ_BYTES_MIN
        assert (report.shared_bytes > 0) == (SHARED in how and is_worth_it), f"{how}: {report.shared_bytes}"
        return report

    def note(self, number: int, /) -> str:
        """From the manifest: which backend wrote."""
        io = msgspec.json.decode((self.place(number) / "manifest.json").read_bytes(), type=_Manifest).io
        if self._name == POSIX and io.backend != "posix":
            raise AssertionError(f"io_uring was refused, and the manifest says {io.backend}")
        return io.backend

    def close(self) -> None:
        self._opened().close()

    def _held(self, state: State) -> State:
        """The state as a job has it: of several ranks each tensor is a replica, or this rank's rows of one that all
        hold together.
        """
        if self._ranks == 1 or self._name == REPLICAS:
            return state

        def share(node: object) -> object:
            if not isinstance(node, torch.Tensor):
                assert isinstance(node, dict)
                return {key: share(value) for key, value in node.items()}
            rows, *rest = node.shape
            return Shard(node, (rows * self._ranks, *rest), (rows * self._rank, *(0 for _ in rest)))

        return {section: share(value) for section, value in state.items()}

    def _opened(self) -> Checkpointer:
        """Opened inside the timer, by the first save or load."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(self._store, budget_bytes=self._budget_bytes, engine=self._options)
        return self._checkpointer


def open_rival(name: str, directory: Path) -> Flowstone:
    return Flowstone(name, directory / "store")
