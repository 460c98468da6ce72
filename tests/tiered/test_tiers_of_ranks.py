"""Several ranks with tiers: rank 0 flushes the data of all, and all load the same checkpoint from the same tier."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from simulated import ENGINE
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in the stubs

import flowstone as fs
from flowstone.commit import catalog
from flowstone.errors import ArgumentError, FlowstoneError, RankError, SaveFailedError, StorageError
from flowstone.ranks import Job as RankJob
from flowstone.ranks import group as rank_group
from flowstone.store.local import LocalStore
from flowstone.store.memory.store import MemoryStore, SharedMemoryDirectory
from flowstone.store.wrap import FaultInjectingStore

RANKS = 2
DEADLINE_S = 30.0
ROWS = 300_000


def _part(step: int, rank: int) -> dict[str, Any]:
    shard = fs.Shard(torch.full((ROWS,), float(10 * step + rank)), (RANKS * ROWS,), (rank * ROWS,))
    return {"weights": shard, "step": step}


def _group(*lists: list[Any]) -> list[fs.Checkpointer]:
    board, group = HashStore(), []
    for rank, tiers in enumerate(lists):
        with mock.patch.object(rank_group, "this_job", lambda rank=rank: RankJob(rank, RANKS, board)):
            group.append(fs.Checkpointer(tiers, engine=ENGINE, deadline_s=DEADLINE_S))
    return group


def _each(group: list[fs.Checkpointer], act: Callable[[int, fs.Checkpointer], Any]) -> list[Any]:
    """What all ranks do at once; what each of them returned or raised."""
    outcomes: list[Any] = [None] * len(group)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = act(rank, group[rank])
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(group))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _save(step: int) -> Callable[[int, fs.Checkpointer], Any]:
    return lambda rank, value: value.save(step, _part(step, rank)).committed.result()


def test_what_all_ranks_wrote_is_flushed_and_loaded_together(tmp_path: Path) -> None:
    tiers = [tmp_path / "near", tmp_path / "far"]
    group = _group(tiers, tiers)
    for step in (1, 2):
        assert all(isinstance(item, fs.Checkpoint) for item in _each(group, _save(step)))
    assert _each(group, lambda _, value: value.drain()) == [{}, {}]
    assert _each(group, lambda _, value: value.close()) == [None, None]
    assert catalog.steps(LocalStore(tmp_path / "far")) == (1, 2)
    assert fs.open(tmp_path / "far").verify().sound
    with (tmp_path / "near/step-00000002/rank-00001.safetensors").open("r+b") as file:
        file.seek(700_000)
        file.write(b"damage")
    group = _group(tiers, tiers)
    parts = [_part(0, rank) for rank in range(RANKS)]
    reports = _each(group, lambda rank, value: value.load(parts[rank]))
    for rank, report in enumerate(reports):
        assert (report.step, report.tier) == (2, str(tmp_path / "far")), report
        assert (parts[rank]["weights"].tensor == 20.0 + rank).all()
        assert str(tmp_path / "near") in report.why
    assert [value.step for value in _each(group, lambda _, value: value.latest())] == [2, 2]
    _each(group, lambda _, value: value.close())


def test_ranks_with_different_lists_are_told(tmp_path: Path) -> None:
    tiers = [tmp_path / "near", tmp_path / "far"]
    group = _group(tiers, tiers)
    _each(group, _save(1))
    _each(group, lambda _, value: value.close())
    group = _group(tiers, [*tiers, tmp_path / "third"])
    outcomes = _each(group, lambda _, value: value.latest())
    assert isinstance(outcomes[0], fs.Checkpoint)
    assert isinstance(outcomes[1], ArgumentError)
    assert "this rank has 3 tiers, but rank 0 has 2" in str(outcomes[1])
    _each(group, lambda _, value: value.close())


def test_only_rank_0_knows_what_is_durable_behind_memory(tmp_path: Path) -> None:
    contents = SharedMemoryDirectory()
    lists = [[MemoryStore(contents, location="memory"), tmp_path / "far"] for _ in range(RANKS)]
    group = _group(*lists)
    saves = _each(group, lambda rank, value: value.save(1, _part(1, rank)))
    assert saves[0].durable.result(60).path.startswith(str(tmp_path / "far"))
    assert isinstance(saves[1].durable.exception(60), SaveFailedError)
    assert _each(group, lambda _, value: value.close()) == [None, None]


# Disks that each node has for itself


def _disk(contents: SharedMemoryDirectory, location: str) -> MemoryStore:
    """What outlives the machine."""
    disk = MemoryStore(contents, location=location)
    disk.capabilities = msgspec.structs.replace(disk.capabilities, volatile=False)
    return disk


def _own_disks(
    memory: SharedMemoryDirectory, disks: list[SharedMemoryDirectory], order: tuple[int, ...] = (0, 1)
) -> list[fs.Checkpointer]:
    """A rank for each disk, in that order, with the memory of all before it."""
    def tiers(node: int) -> list[MemoryStore]:
        return [MemoryStore(memory, location="memory"), _disk(disks[node], "disk")]

    return _group(*map(tiers, order))


def test_what_was_flushed_to_one_nodes_disk_is_not_overlooked_by_a_rank_0_on_another_node() -> None:
    memory, disks = SharedMemoryDirectory(), [SharedMemoryDirectory(), SharedMemoryDirectory()]
    group = _own_disks(memory, disks)
    assert not [item for item in _each(group, _save(1)) if isinstance(item, BaseException)]
    assert group[0].drain(60) == {}
    for entry in reversed(group):
        entry.close()
    assert catalog.steps(MemoryStore(disks[0])) == (1,)
    assert not catalog.steps(MemoryStore(disks[1])), "rank 0 flushes"
    # the memory of all nodes is lost, and ranks are on other ones
    again = _own_disks(SharedMemoryDirectory(), disks, (1, 0))
    for error in _each(again, lambda rank, value: value.latest()):
        assert isinstance(error, RankError), error
        assert "rank 1 sees step 1 in disk, but rank 0 sees no checkpoint" in str(error)
    for entry in reversed(again):
        entry.close()
    back = _own_disks(SharedMemoryDirectory(), disks)
    for error in _each(back, lambda rank, value: value.load(_part(0, rank))):
        assert isinstance(error, FlowstoneError), "the other rank's disk does not have it"
    for entry in reversed(back):
        entry.close()


def test_several_nodes_that_have_nothing_begin() -> None:
    group = _own_disks(SharedMemoryDirectory(), [SharedMemoryDirectory(), SharedMemoryDirectory()])
    assert _each(group, lambda rank, value: value.latest()) == [None, None]
    for item in reversed(group):
        item.close()


def test_a_save_into_a_disk_of_each_node_is_refused_by_name() -> None:
    disks = [_disk(SharedMemoryDirectory(), "disk") for _ in range(RANKS)]
    for disk in disks:
        disk.make_directory()
    group = _group(*([disk, MemoryStore(location="memory")] for disk in disks))
    for error in _each(group, _save(1)):
        assert isinstance(error, FlowstoneError), error
        assert "rank 0 cannot see the file that rank 1 wrote" in str(error)
    for item in reversed(group):
        with suppress(FlowstoneError):
            item.close()


@pytest.mark.parametrize("down", range(RANKS))
def test_a_rank_that_cannot_look_at_its_disk_ends_the_call_of_all_ranks(down: int) -> None:
    refuses = [False]

    def look(verb: str, path: str) -> StorageError | None:
        return StorageError("no route to the disk", errno=errno.EIO) if refuses[0] else None

    disks: list[Any] = [_disk(SharedMemoryDirectory(), "disk"), _disk(SharedMemoryDirectory(), "disk")]
    disks[down] = FaultInjectingStore(disks[down], look)
    group = _group(*([MemoryStore(SharedMemoryDirectory(), location="memory"), disk] for disk in disks))
    refuses[0] = True
    begun = time.monotonic()
    errors = _each(group, lambda _, value: value.latest())
    assert time.monotonic() - begun < DEADLINE_S / 2, "nobody has waited for it in vain"
    assert isinstance(errors[down], StorageError), errors
    assert isinstance(errors[1 - down], RankError), errors
    assert "another tier does not answer" in str(errors[1 - down])
    refuses[0] = False
    assert _each(group, lambda _, value: value.latest()) == [None, None], "the next call finds all ranks in step"
    for item in reversed(group):
        item.close()
