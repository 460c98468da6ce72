"""A job that saves by `dcp.save` through FlowstoneWriter into the simulated disk; sim_world.Job has a Checkpointer.

Each rank is a thread with a writer of its own. DCP's collectives are DCP's own code. Only the four calls that move
objects between ranks are replaced, since a process has one rank in torch.distributed.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from sim_disk import Disk, PowerLoss
from sim_turns import RankDisk, Turns
from sim_world import STORE, Oracle, WatchedStore, engine, state
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _DistWrapper

from flowstone import Keep
from flowstone.adapters.dcp import FlowstoneWriter, claim, resources
from flowstone.commit.entries import step_directory
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError
from flowstone.events.phases import Event


class Rows(torch.Tensor):
    """Rows of a matrix, which other ranks have the rest of, as DCP asks tensors what they are parts of."""

    begin: int
    whole: torch.Size

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size((self.begin, 0)), self.shape)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self), self.whole)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def part_of(whole: dict[str, dict[str, object]], rank: int, size: int) -> dict[str, Any]:
    """What one rank has of a state: rows of one tensor, and replicas of the rest."""
    if size == 1:
        return whole
    wide = whole["model"]["wide"]
    assert isinstance(wide, torch.Tensor)
    cuts = [0, 15, wide.shape[0]]
    rows = wide[cuts[rank] : cuts[rank + 1]].clone().as_subclass(Rows)
    rows.begin, rows.whole = cuts[rank], wide.shape
    return {**whole, "model": {**whole["model"], "wide": rows}}


class Collectives(_DistWrapper):
    """DCP's collectives between threads. A rank that died, or has left, closes its connections."""

    def __init__(self, rank: int, turns: Turns, mail: dict[tuple[int, int, int], bytes]) -> None:
        self.group, self.use_dist, self.coordinator_rank, self.global_coordinator_rank = None, True, 0, 0
        self.rank, self.is_coordinator = rank, rank == 0
        self._turns, self._mail = turns, mail
        self._counts: dict[tuple[int, int], int] = {}

    def get_world_size(self) -> int:
        return self._turns.size

    def gather_object(self, object: Any) -> list[Any] | None:
        self._send(0, object)
        return [self._receive(rank) for rank in range(self._turns.size)] if self.is_coordinator else None

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        for rank, item in enumerate(object_list or ()):
            self._send(rank, item)
        return self._receive(0)

    def broadcast_object(self, object: Any) -> Any:
        return self.scatter_object([object] * self._turns.size if self.is_coordinator else None)

    def _send(self, to: int, value: object) -> None:
        self._turns.check(self.rank)
        self._mail[self.rank, to, self._next(self.rank, to)] = pickle.dumps(value)
        self._turns.posted()

    def _receive(self, source: int) -> Any:
        key = (source, self.rank, self._next(source, self.rank, is_received=True))
        while True:
            has_left = self._turns.has_left(source)
            self._turns.looks(self.rank)
            if key in self._mail:
                return pickle.loads(self._mail.pop(key))
            if has_left:
                raise ConnectionError(f"rank {source} has closed the connection")
            self._turns.sleep(0)

    def _next(self, source: int, to: int, *, is_received: bool = False) -> int:
        """The number of a message, as its sender and its receiver count them."""
        way = (source, to + self._turns.size * is_received)
        self._counts[way] = self._counts.get(way, 0) + 1
        return self._counts[way]


class DcpJob:
    """Saves as ranks do, each by one writer for all its saves."""

    def __init__(
        self, sandbox: Path, disk: Disk, oracle: Oracle, *, ranks: int = 1, keep: Keep | None = None, number: int = 0,
        attempt: str = "a", by_wait: bool = False, again: bool = False,
    ) -> None:
        assert keep is None, "dcp.save keeps all"
        self.root, self.oracle, self.attempt = sandbox / STORE, oracle, attempt
        self.events: list[Event] = []
        self.turns = Turns(ranks, disk, number=number)
        self.disks = [RankDisk(disk, self.turns, rank) for rank in range(ranks)]
        self.stores: list[WatchedStore] = []
        self._here = threading.local()
        self._disk = disk
        self._writers = [FlowstoneWriter(engine=engine(number)) for _ in range(ranks)]

    # In the place of what a rank of its own process has

    def open_store(self, root: Path, options: EngineOptions) -> WatchedStore:
        self.stores.append(WatchedStore(root, options, self.disks[self._here.rank]))
        return self.stores[-1]

    def open_collectives(self, *_: object) -> Collectives:
        return self._here.collectives

    # What sim_world.Job does

    def save(self, step: int) -> None:
        """Save on all ranks, over what has the name. Raises what the save did."""
        tag = f"{step}{self.attempt}"
        self.oracle.begun(step, tag)
        self.oracle.must.pop(step, None)  # either of the two is there from now on, as what is the newest says
        mail: dict[tuple[int, int, int], bytes] = {}
        outcomes: list[BaseException | None] = [None] * self.turns.size

        def act(rank: int) -> None:
            self._here.rank, self._here.collectives = rank, Collectives(rank, self.turns, mail)
            try:
                dcp.save(
                    part_of(state(tag), rank, self.turns.size), checkpoint_id=self.root / step_directory(step),
                    storage_writer=self._writers[rank],
                )
            except BaseException as error:
                outcomes[rank] = error
            finally:
                self.turns.done(rank)

        self.turns.begin()
        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(self.turns.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.settle()
        self._judge(outcomes)
        self.oracle.committed(step, tag, ())

    def _judge(self, outcomes: list[BaseException | None]) -> None:
        """Raise what went wrong: the error of the rank where it did, which all ranks are told."""
        causes = [_causes(outcome) for outcome in outcomes]
        for error in [item for each in causes for item in each.values()]:
            if not isinstance(error, ConnectionError):
                assert all(causes) or self._has_deaths, f"ranks were told different things: {outcomes}"
                raise error
        if any(causes):
            raise FlowstoneError("a rank has died")

    @property
    def _has_deaths(self) -> bool:
        return any(self.turns.is_dead(rank) for rank in range(self.turns.size))

    def settle(self) -> None:
        self._disk.check_power()
        if all(self.turns.is_dead(rank) for rank in range(self.turns.size)):
            raise PowerLoss

    def wait(self) -> None:
        pass

    def try_again(self, attempt: str) -> None:
        self.attempt = attempt

    def heard(self, path: str) -> bool:
        """Whether a failure there is no failure of a save: what goes after it, or because of another one, is swept."""
        return path.startswith(str(STORE / ".saving-"))

    def end(self) -> None:
        """Ranks that live close their writers; of the others the kernel closes all that they had open."""
        for rank, writer in enumerate(self._writers):
            if self.turns.is_dead(rank):
                if writer._resources._abandon is not None:
                    writer._resources._abandon.detach()
            else:
                self._here.rank = rank
                self.turns.over()
                writer.close()
        for store in self.stores:
            store.abandon()
        for held in list(claim._claims().values()):
            held.forget()


def _causes(outcome: BaseException | None) -> Mapping[int, BaseException]:
    """What a rank was told, by the rank where it went wrong."""
    if isinstance(outcome, CheckpointException):
        return {rank: failure[0] for rank, failure in outcome.failures.items()}
    return {} if outcome is None else {-1: outcome}


@contextmanager
def dcp_job(sandbox: Path, disk: Disk, oracle: Oracle, **options: object) -> Iterator[DcpJob]:
    job = DcpJob(sandbox, disk, oracle, **options)  # type: ignore[arg-type]
    with (
        mock.patch.object(resources, "LocalStore", job.open_store),
        mock.patch.object(state_dict_saver, "_DistWrapper", job.open_collectives), warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)  # that torch.distributed is not initialised
        try:
            yield job
        finally:
            job.end()
