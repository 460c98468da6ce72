"""Translate Megatron's sharded state dicts for DCP, where each key occurs once, with all parts that this rank has."""

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
_STREAM = "stream of bytes"  # marks a stored io.BytesIO


class TensorParts(torch.Tensor):
    """All parts of one tensor on this rank. DCP gets the items to write, and the memory to read into, from this object.
    """

    @staticmethod
    def __new__(cls, of: list[Any]) -> TensorParts:
        first = of[0]
        made: TensorParts = torch.Tensor._make_wrapper_subclass(cls, torch.Size(first.global_shape), dtype=first.dtype)
        return made

    def __init__(self, of: list[Any]) -> None:
        self.shards = of

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets, number), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(part.data), self.size()),
            )
            for number, (part, chunk) in enumerate(zip(self.shards, self.__create_chunk_list__(), strict=True))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(part.global_offset), _shape(part)) for part in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        number = index.index  # tells parts with the same offset apart
        numbered = self.shards[number : number + 1] if number is not None else []
        for part in [*numbered, *self.shards]:
            if torch.Size(part.global_offset) == index.offset:
                shard: torch.Tensor = part.data.detach().view(_shape(part))
                return shard
        raise ValueError(f"this rank has no part of {index.fqn} at {index.offset}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub differs from its call
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> Any:
        raise NotImplementedError(f"{func} is not supported for parts of a tensor")


def _shape(part: Any) -> torch.Size:
    """The shape of a part, with the axes that Megatron prepends."""
    return torch.Size((1,) * part.prepend_axis_num + tuple(part.local_shape))


def leaves_of(state: object) -> Iterator[Any]:
    """The ShardedTensors and ShardedObjects in nested dicts and lists, in order.

    raises  UnsupportedStateError  for any other value
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
            f"expected a ShardedTensor or ShardedObject, got a {type(state).__name__}",
            next="call megatron.core.dist_checkpointing.save or load, which split the state",
        )


def map_leaves(state: Any, made: Callable[[Any], object]) -> Any:
    """The same nested dicts and lists, in which each leaf is replaced by the result of `made`."""
    if isinstance(state, Mapping):
        return {key: map_leaves(value, made) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [map_leaves(value, made) for value in state]
    return made(state)


def to_save(state: object) -> dict[str, object]:
    """The values that this rank writes: key -> tensor or object. These are the values whose main replica is on this
    rank.

    raises  UnsupportedStateError  a part of a tensor has no data
    """
    tensors: dict[str, list[Any]] = {}
    objects: dict[str, object] = {}
    for leaf in leaves_of(state):
        if not _MAPPING.is_main_replica(leaf.replica_id):
            continue
        if isinstance(leaf, ShardedObject):
            objects[leaf.unique_key] = _stored(leaf.data)
        elif leaf.data is None:
            raise UnsupportedStateError(f"the sharded tensor {leaf.key!r} has no data", next="set its `data`")
        else:
            tensors.setdefault(leaf.key, []).append(leaf)
    return {**{key: TensorParts(parts) for key, parts in tensors.items()}, **objects}


def to_load(state: object) -> dict[str, object]:
    """The values that this rank reads: key -> tensor, or None for an object. Tensors without data are allocated."""
    tensors: dict[str, list[Any]] = {}
    objects: dict[str, object] = {}
    for leaf in leaves_of(state):
        if isinstance(leaf, ShardedObject):
            objects[leaf.unique_key] = None
            continue
        if leaf.data is None:
            leaf.init_data("cpu", torch.zeros if leaf.allow_shape_mismatch else torch.empty)
        elif leaf.allow_shape_mismatch:
            leaf.data.detach().zero_()  # zeros, for elements that the stored tensor does not have
        tensors.setdefault(leaf.key, []).append(leaf)
    return {**{key: TensorParts(parts) for key, parts in tensors.items()}, **objects}


def with_loaded_values(state: object, values: Mapping[str, object]) -> Any:
    """The state with loaded tensors and values instead of their descriptions."""
    return map_leaves(
        state, lambda leaf: _value(values[leaf.unique_key]) if isinstance(leaf, ShardedObject) else leaf.data
    )


def _stored(value: object) -> object:
    """An object's value in a form that can be stored without pickle. A stream, such as Transformer Engine's, becomes
    its bytes.
    """
    return {_STREAM: value.getvalue()} if isinstance(value, io.BytesIO) else [value]


def _value(stored: Any) -> object:
    return io.BytesIO(stored[_STREAM]) if isinstance(stored, dict) else stored[0]
