"""Megatron's sharded state dicts as DCP takes them: each key once, with all of its parts that a rank holds."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from flowstone.adapters.megatron.package import MEGATRON
from flowstone.errors import UnsupportedStateError

_MAPPING: Any = MEGATRON.load("megatron.core.dist_checkpointing.mapping")
ShardedTensor: Any = _MAPPING.ShardedTensor
ShardedObject: Any = _MAPPING.ShardedObject
_STREAM = "stream of bytes"  # what an io.BytesIO is stored under


class Parts(torch.Tensor):
    """All parts of one tensor that this rank holds. DCP asks it what to write and where to read to."""

    of: list[Any]

    @staticmethod
    def __new__(cls, of: list[Any]) -> Parts:
        first = of[0]
        made: Parts = torch.Tensor._make_wrapper_subclass(cls, torch.Size(first.global_shape), dtype=first.dtype)
        made.of = of
        return made

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets, at), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(part.data), self.size()),
            )
            for at, (part, chunk) in enumerate(zip(self.of, self.__create_chunk_list__(), strict=True))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(one.global_offset), _shape(one)) for one in self.of]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = index.index  # of two parts that lie at one place each is asked for by its number
        numbered = self.of[at : at + 1] if at is not None else []
        for part in [*numbered, *self.of]:
            if torch.Size(part.global_offset) == index.offset:
                found: torch.Tensor = part.data.detach().view(_shape(part))
                return found
        raise ValueError(f"no part of {index.fqn} begins at {index.offset} on this rank")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it so, whatever its stub says
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> Any:
        raise NotImplementedError(f"{func} is not for the parts of a tensor")


def _shape(part: Any) -> torch.Size:
    """Of a part, with the axes that stand before its own."""
    return torch.Size((1,) * part.prepend_axis_num + tuple(part.local_shape))


def leaves_of(state: object) -> Iterator[Any]:
    """The ShardedTensors and ShardedObjects in nested dicts and lists, in order.

    raises  UnsupportedStateError  something else is among them
    """
    if isinstance(state, Mapping):
        for value in state.values():
            yield from leaves_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from leaves_of(value)
    elif isinstance(state, ShardedTensor | ShardedObject):
        yield state
    else:
        raise UnsupportedStateError(
            f"a {type(state).__name__} is no sharded tensor and no sharded object",
            next="call megatron.core.dist_checkpointing.save or load, which take a state apart",
        )


def with_leaves(state: Any, made: Callable[[Any], object]) -> Any:
    """The same nested dicts and lists, with what is made of each leaf."""
    if isinstance(state, Mapping):
        return {key: with_leaves(value, made) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [with_leaves(value, made) for value in state]
    return made(state)


def to_save(state: object) -> dict[str, object]:
    """What this rank writes, by key: tensors of which it holds the main replica, and objects' values.

    raises  UnsupportedStateError  a part without data
    """
    tensors: dict[str, list[Any]] = {}
    objects: dict[str, object] = {}
    for leaf in leaves_of(state):
        if not _MAPPING.is_main_replica(leaf.replica_id):
            continue
        if isinstance(leaf, ShardedObject):
            objects[leaf.unique_key] = _stored(leaf.data)
        elif leaf.data is None:
            raise UnsupportedStateError(f"the sharded tensor {leaf.key!r} has no data", next="give it its tensor")
        else:
            tensors.setdefault(leaf.key, []).append(leaf)
    return {**{key: Parts(parts) for key, parts in tensors.items()}, **objects}


def to_load(state: object) -> dict[str, object]:
    """What this rank reads, by key; tensors without data get memory. Of objects there is a place alone."""
    tensors: dict[str, list[Any]] = {}
    objects: dict[str, object] = {}
    for leaf in leaves_of(state):
        if isinstance(leaf, ShardedObject):
            objects[leaf.unique_key] = None
            continue
        if leaf.data is None:
            leaf.init_data("cpu", torch.zeros if leaf.allow_shape_mismatch else torch.empty)
        elif leaf.allow_shape_mismatch:
            leaf.data.detach().zero_()  # what the stored tensor does not reach
        tensors.setdefault(leaf.key, []).append(leaf)
    return {**{key: Parts(parts) for key, parts in tensors.items()}, **objects}


def loaded(state: object, found: Mapping[str, object]) -> Any:
    """The state with tensors and values in the places of their descriptions."""
    return with_leaves(
        state, lambda leaf: _value(found[leaf.unique_key]) if isinstance(leaf, ShardedObject) else leaf.data
    )


def _stored(value: object) -> object:
    """An object's value as Flowstone stores it: without pickle. A stream, as Transformer Engine has, is its bytes."""
    return {_STREAM: value.getvalue()} if isinstance(value, io.BytesIO) else [value]


def _value(stored: Any) -> object:
    return io.BytesIO(stored[_STREAM]) if isinstance(stored, dict) else stored[0]
