"""Functions for tests in which ranks read for each other."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from acts import opened

import flowstone as fs
from flowstone.config import MIB, EngineOptions
from flowstone.node_reads import node_reads, shared_ring
from flowstone.store.local import LocalStore

SIZES = [12 * MIB // 4 + 5, 700, 30 * MIB // 4, 3, 20 * MIB // 4 + 1, 0]


@contextmanager
def small_windows() -> Iterator[None]:
    """So that a few megabytes take several batches, wherever the store is."""
    with (
        mock.patch("flowstone.node_reads.sharing.SHARED_READ_BYTES_MIN", 1),
        mock.patch.object(node_reads, "RING_HALF_BYTES", 8 * MIB),
        mock.patch.object(LocalStore, "reads_past_cache", return_value=True),
    ):
        yield


def pattern(position: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + position


def state_of(rank: int, *, own: bool = True) -> dict[str, object]:
    """Replicas, one of them strided. `own`: also a shard of the rank's own, and a tensor that rank 0 alone wants."""
    tensors: dict[str, object] = {f"t{index}": torch.full((size,), -1.0) for index, size in enumerate(SIZES)}
    tensors["t2"] = torch.full((SIZES[2], 2), -1.0)[:, 0]
    if own and rank != 0:
        del tensors["t4"]
    if own:
        tensors["shard"] = fs.Shard(torch.full((MIB, 1), -1.0), (MIB, 3), (0, rank))
    return tensors


def save(rank: int, path: str) -> None:
    """One rank saves the whole."""
    state: dict[str, object] = {f"t{index}": pattern(index, size) for index, size in enumerate(SIZES)}
    state["shard"] = torch.arange(3 * MIB, dtype=torch.float32).view(MIB, 3)
    with opened(path) as checkpointer:
        checkpointer.save(1, state).committed.result(60)


def check(rank: int, state: dict[str, object]) -> None:
    for i, size in enumerate(SIZES):
        assert torch.equal(state.get(f"t{i}", pattern(i, size)), pattern(i, size)), i  # type: ignore[arg-type]
    if "shard" in state:
        whole = torch.arange(3 * MIB, dtype=torch.float32).view(MIB, 3)
        assert torch.equal(state["shard"].tensor, whole[:, rank : rank + 1])  # type: ignore[attr-defined]


def load(rank: int, path: str, share: bool) -> list[int]:
    """The bytes that this rank has read, and those that it has taken out of windows."""
    state = state_of(rank)
    with small_windows(), opened(path, engine=EngineOptions(share_reads=share)) as checkpointer:
        report = checkpointer.load(state)
    check(rank, state)
    assert not [name for name in os.listdir("/dev/shm") if "flowstone-ring" in name], "it has no name"
    return [report.bytes, report.shared_bytes]


def load_replicas(rank: int, path: str) -> list[int]:
    state = state_of(rank, own=False)
    with small_windows(), opened(path) as checkpointer:
        report = checkpointer.load(state, rules=[fs.Skip("shard")])
    check(rank, state)
    return [report.bytes, report.shared_bytes]


def load_through_the_cache(rank: int, path: str) -> list[int]:
    state = state_of(rank, own=False)
    with opened(path, engine=EngineOptions(direct="off")) as checkpointer:
        report = checkpointer.load(state, rules=[fs.Skip("shard")])
    check(rank, state)
    return [report.bytes, report.shared_bytes]


def load_strangers(rank: int, path: str) -> list[int]:
    """One rank cannot look into the others' processes: each reads for itself."""
    refused = mock.patch.object(shared_ring.PeerRing, "__init__", side_effect=PermissionError(13, "Permission denied"))
    with refused if rank == 1 else mock.patch.object(shared_ring, "_MESSAGE_AT", shared_ring._MESSAGE_AT):
        return load(rank, path, True)


def load_with_few_threads(rank: int, path: str) -> list[int]:
    """One rank has no threads to copy out of the others' windows: nothing of what it has opened stays open."""
    def refuse(**_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    closed: list[object] = []
    close = shared_ring.PeerRing.close

    def count(self: shared_ring.PeerRing) -> None:
        closed.append(self)
        close(self)

    native = SimpleNamespace(Engine=refuse) if rank == 1 else node_reads._native
    with mock.patch.object(shared_ring.PeerRing, "close", count), mock.patch.object(node_reads, "_native", native):
        read = load(rank, path, True)
    assert len(closed) == 3
    return read


def load_damaged(rank: int, path: str) -> str:
    """A rank reads damaged bytes, into memory that is not the state's yet."""
    state = state_of(rank, own=False)
    with small_windows(), opened(path, on_error="continue") as checkpointer:
        try:
            checkpointer.load(state, rules=[fs.Skip("shard")])
        except fs.FlowstoneError as error:
            message = f"{type(error).__name__}: {error}"
        try:
            checkpointer.save(2, state)
        except fs.DamagedError:
            return message
    return "saved"


def load_and_die(rank: int, path: str, victim: int) -> None:
    """One rank is killed when it has filled its first window. What the others are told."""
    state = state_of(rank, own=False)
    if rank == victim:
        tell = shared_ring.SharedRing.set_counter

        def die(self: shared_ring.SharedRing, counter: shared_ring.RingCounter, value: int) -> None:
            tell(self, counter, value)
            os.kill(os.getpid(), signal.SIGKILL)

        shared_ring.SharedRing.set_counter = die  # type: ignore[method-assign]
    with small_windows():
        checkpointer = opened(path, deadline_s=8.0)
        try:
            checkpointer.load(state, rules=[fs.Skip("shard")])
        except fs.FlowstoneError as error:
            Path(f"{path}.told-{rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)
