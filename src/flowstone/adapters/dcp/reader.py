"""FlowstoneReader: the storage reader of torch.distributed.checkpoint, in the place of FileSystemReader."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from flowstone.adapters.dcp.derived import derive
from flowstone.adapters.dcp.layout import Leaves, leaves_of, metadata_of, references
from flowstone.adapters.dcp.options import check_registry
from flowstone.adapters.dcp.reading import Stored, read_tensors
from flowstone.adapters.dcp.target import is_local
from flowstone.adapters.dcp.values import bytes_of
from flowstone.checkpoint import Checkpoint, open_checkpoint
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, NoCheckpointError, RankError, UnsupportedStateError
from flowstone.store.local import LocalStore


class FlowstoneReader(StorageReader):
    """Reads any Flowstone checkpoint, saved by this adapter or not, for `dcp.load`.

    path             of the checkpoint; or of a store, whose newest one it is then
    accept_pickled   give the planner bytes that a planner of the user's has made, if the checkpoint holds some.
                     DCP's planners unpickle them: for checkpoints that you trust
    engine           how bytes move

    Each chunk of bytes is verified as it is read. May be pickled.
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
        self._names: Mapping[str, str] = {}  # of tensors, in DCP and in the index

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
        """What is in the checkpoint. Raises NoCheckpointError, NotAStoreError, DamagedError."""
        if kwargs.get("rank") is not None:
            raise NoCheckpointError(
                f"no rank has a checkpoint of its own in {self.path}", next="read the error above: it is the cause"
            )
        if self.path is None:
            raise ArgumentError(
                "there is no path to load from",
                next="write FlowstoneReader(path), or dcp.load(..., checkpoint_id=path)",
            )
        self._close()
        self._store = LocalStore(os.path.abspath(self.path), self._engine)
        self._checkpoint = open_checkpoint(self._store)
        self._leaves, self._names = _leaves_and_names(self._checkpoint)
        metadata = metadata_of(self._checkpoint.index, self._names, self._leaves)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=self._checkpoint.manifest.id, load_id=self.load_id
        )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._checkpoint is None:  # the metadata came from another reader of the same path
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan.storage_data = self._open.manifest.id
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises RankError where ranks read different checkpoints: a store has got a newer one in between."""
        for rank, plan in enumerate(plans):
            if plan.storage_data not in (None, plans[0].storage_data):
                raise RankError(
                    f"rank {rank} reads another checkpoint in {self.path} than the first rank", rank=rank, phase="plan",
                    next="give the path of one checkpoint, not that of the store",
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, then give it the objects. Raises DamagedError, which names what has changed."""
        checkpoint = self._open
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        read_tensors(Stored(checkpoint, self._names), tensors, planner)
        for item in objects:
            self._load_object(checkpoint, item, planner)
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load_object(self, checkpoint: Checkpoint, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        if name not in self._leaves.objects:
            raise NoCheckpointError(f"no object {name!r} in {checkpoint.path}", next="correct the planner")
        node = self._leaves.objects[name]
        if name in self._leaves.pickled:
            planner.load_bytes(item, self._bytes_as_they_are(name, node))
        else:
            planner.load_bytes(item, bytes_of(checkpoint, name, node))

    def _bytes_as_they_are(self, name: str, node: object) -> io.BytesIO:
        if not self._accept_pickled or not isinstance(node, bytes):
            raise UnsupportedStateError(
                f"the object {name!r} is bytes that a planner has made, and planners run what is in such bytes",
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
    """What DCP calls the values of a checkpoint, and what the index calls its tensors."""
    leaves = leaves_of(checkpoint)
    if leaves is None:
        derived = derive(checkpoint)
        return derived.leaves, derived.names
    hidden = {ref.name for ref in references(leaves.objects.values())}
    return leaves, {name: name for name in checkpoint.index.rows() if name not in hidden}
