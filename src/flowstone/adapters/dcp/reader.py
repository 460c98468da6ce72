"""FlowstoneReader: a storage reader for torch.distributed.checkpoint, used instead of FileSystemReader."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from flowstone.adapters.dcp.dcp_names import derive_dcp_names
from flowstone.adapters.dcp.dcp_record import Leaves, leaves_of, metadata_of, references
from flowstone.adapters.dcp.options import check_registry
from flowstone.adapters.dcp.reading import NamedCheckpoint, read_tensors
from flowstone.adapters.dcp.target import is_local
from flowstone.adapters.dcp.values import bytes_of
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, NoCheckpointError, RankError, UnsupportedStateError
from flowstone.reading.checkpoint import Checkpoint, open_checkpoint
from flowstone.store.local import LocalStore


class FlowstoneReader(StorageReader):
    """Reads any Flowstone checkpoint for `dcp.load`, whether this adapter saved it or not.

    path             a checkpoint, or a store (its newest checkpoint)
    accept_pickled   whether the load planner gets the bytes that a custom save planner made of objects. The planner
                     unpickles them, so allow this only for checkpoints that you trust
    engine           options of the I/O engine

    Each chunk is verified when it is read. A reader can be pickled.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, _extension_registry: object = None, *,
        accept_pickled: bool = False, engine: EngineOptions | None = None,
    ) -> None:
        super().__init__()
        check_registry(_extension_registry)
        self.path, self._accept_pickled, self._engine = path, accept_pickled, engine
        self.load_id = str(uuid.uuid4())
        self._checkpoint: Checkpoint | None = None
        self._store: LocalStore | None = None
        self._leaves = Leaves(None, {})
        self._names: Mapping[str, str] = {}  # DCP's name of a tensor -> its name in the index

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_checkpoint": None, "_store": None, "_leaves": Leaves(None, {}), "_names": {}}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = checkpoint_id
        self.load_id = str(uuid.uuid4())
        self._close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of the checkpoint. Raises NoCheckpointError, NotAStoreError, DamagedError."""
        if kwargs.get("rank") is not None:
            raise NoCheckpointError(
                f"DCP could not read the metadata of {self.path}, and asked for per-rank metadata, which no Flowstone "
                "checkpoint has",
                next="correct the error from reading the global metadata, which DCP reports before this one",
            )
        if self.path is None:
            raise ArgumentError(
                "no path to load from was given",
                next="write FlowstoneReader(path), or dcp.load(..., checkpoint_id=path)",
            )
        self._close()
        self._store = LocalStore(os.path.abspath(self.path), self._engine)
        self._checkpoint = open_checkpoint(self._store)
        self._leaves, self._names = _leaves_and_names(self._checkpoint)
        return replace(
            metadata_of(self._checkpoint.index, self._names, self._leaves),
            storage_meta=StorageMeta(self.checkpoint_id, self._checkpoint.manifest.id, self.load_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._checkpoint is None:  # another reader of the same path has read the metadata
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._open.manifest.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged. Raises RankError if ranks read different checkpoints, for example because a save
        was committed between their reads of the metadata.
        """
        for rank, plan in enumerate(plans):
            if plan.storage_data not in (None, plans[0].storage_data):
                raise RankError(
                    f"rank {rank} reads another checkpoint in the store {self.path} than the first rank",
                    rank=rank, phase="plan", next="give the path of one checkpoint instead of the path of the store",
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, then give it the objects. Raises DamagedError, which names the tensors that were
        changed.
        """
        checkpoint = self._open
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        read_tensors(NamedCheckpoint(checkpoint, self._names), tensors, planner)
        for item in objects:
            self._load_object(checkpoint, item, planner)
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load_object(self, checkpoint: Checkpoint, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        if name not in self._leaves.objects:
            raise NoCheckpointError(
                f"{checkpoint.path} has no object {name!r}, which the load planner requests",
                next="correct the load planner",
            )
        node = self._leaves.objects[name]
        if name in self._leaves.pickled:
            planner.load_bytes(item, self._bytes_as_they_are(name, node))
        else:
            planner.load_bytes(item, bytes_of(checkpoint, name, node))

    def _bytes_as_they_are(self, name: str, node: object) -> io.BytesIO:
        if not self._accept_pickled or not isinstance(node, bytes):
            raise UnsupportedStateError(
                f"the object {name!r} was pickled by a custom planner, and unpickling it could run any code",
                next="if you trust the checkpoint, pass accept_pickled=True to FlowstoneReader",
            )
        return io.BytesIO(node)

    @property
    def _open(self) -> Checkpoint:
        assert self._checkpoint is not None, "its metadata was read"
        return self._checkpoint

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_local(checkpoint_id)

    def _close(self) -> None:
        store, self._store, self._checkpoint = self._store, None, None
        if store is not None:
            store.close()


def _leaves_and_names(checkpoint: Checkpoint) -> tuple[Leaves, Mapping[str, str]]:
    """The values of a checkpoint under DCP's names; and, for its tensors: DCP's name -> name in the index."""
    leaves = leaves_of(checkpoint)
    if leaves is None:
        derived = derive_dcp_names(checkpoint)
        return derived.leaves, derived.names
    hidden = {ref.name for ref in references(leaves.objects.values())}
    return leaves, {name: name for name in checkpoint.index.rows() if name not in hidden}
