"""The copies of one state: planned first, so that their memory is known to suffice before the first is made."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard

from flowstone import _native
from flowstone.adapters.dcp.staging_memory import StagingMemory
from flowstone.config import BLOCK_BYTES
from flowstone.errors import UnsupportedStateError
from flowstone.format.objects import unsupported
from flowstone.state.tensors import resolved

_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class StagedCopies:
    """What `plan` was given, as `run` copies it.

    bytes   that the copies take, in one StagingMemory
    is_far  some come from a device
    """

    def __init__(self) -> None:
        self.bytes, self.is_far = 0, False
        self._sources: list[tuple[torch.Tensor, str]] = []
        self._offsets: list[int] = []
        self._parts: set[int] = set()  # sources that are parts of a tensor, such as a DTensor's
        self._numbers: dict[int, int] = {}  # of a tensor that is no part of one: its source
        self._made: list[torch.Tensor] = []
        self._in_memory: list[torch.Tensor] = []

    def plan(self, value: object, path: str) -> Callable[[], Any]:
        """What makes the copy of `value`, once `run` was called.

        raises  UnsupportedStateError  a tensor or an object that cannot be copied, by name
        """
        if isinstance(value, torch.Tensor):
            return self._plan_tensor(value, path)
        kind = type(value)
        if kind in (dict, OrderedDict):
            items = [(k, self.plan(v, f"{path}.{k}")) for k, v in cast("dict[object, object]", value).items()]
            attributes = copy.deepcopy(vars(value)) if kind is OrderedDict else {}
            return partial(_dict_of, kind, items, attributes)
        if kind in (list, tuple):
            parts = [self.plan(v, f"{path}.{at}") for at, v in enumerate(cast("list[object]", value))]
            return lambda: cast("type[list[object]]", kind)(make() for make in parts)
        try:
            return partial(_itself, copy.deepcopy(value))
        except Exception as error:
            raise unsupported(path, value, f"cannot be copied ({type(error).__name__}: {error})") from error

    def _plan_tensor(self, tensor: torch.Tensor, path: str) -> Callable[[], torch.Tensor]:
        if isinstance(tensor, ShardedTensor):
            return self._plan_shards(tensor, path)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
            return self._plan_parts(cast("Any", tensor), path)
        if (refusal := _refusal(tensor, path)) is not None:
            raise refusal
        if _is_opaque(tensor):
            return partial(_itself, tensor.detach().clone().cpu())
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = self._add(tensor, path)
        return lambda: self._made[number]

    def _plan_parts(self, tensor: Any, path: str) -> Callable[[], torch.Tensor]:
        """Of a tensor that wraps others, such as a DTensor."""
        names, context = tensor.__tensor_flatten__()
        numbers, others = dict[str, int](), dict[str, object]()
        for name in names:
            part = getattr(tensor, name)
            if not isinstance(part, torch.Tensor):
                others[name] = part  # the same on all ranks, such as a device mesh; a copy would be another one
            elif _refusal(part, path) is None and not _is_opaque(part):
                numbers[name] = self._add(part, f"{path}.{name}")
                self._parts.add(numbers[name])
            else:
                others[name] = self.plan(part, f"{path}.{name}")()
        remake = partial(_remade, type(tensor), others, context, tensor.shape, tensor.stride())

        def make() -> torch.Tensor:
            made = remake({name: self._made[number] for name, number in numbers.items()})
            # Torch would move its parts into shared memory, byte by byte, where they are already.
            shared = {name: self._in_memory[number] for name, number in numbers.items()}
            cast("Any", made).__reduce_ex__ = lambda _: (remake, (shared,))
            return made

        return make

    def _plan_shards(self, tensor: ShardedTensor, path: str) -> Callable[[], torch.Tensor]:
        """Of a ShardedTensor, such as FSDP's: its copy says of all shards that they lie in host memory."""
        shards = [
            (copy.deepcopy(shard.metadata), self.plan(shard.tensor, f"{path}.{at}"))
            for at, shard in enumerate(tensor.local_shards())
        ]
        known = copy.deepcopy(tensor.metadata())
        for metadata in (*(own for own, _ in shards), *known.shards_metadata):
            assert metadata.placement is not None, "each shard has a rank"
            metadata.placement._device = torch.device("cpu")
        group = tensor._process_group

        def make() -> torch.Tensor:
            own = [Shard(part(), metadata) for metadata, part in shards]
            return ShardedTensor._init_from_local_shards_and_global_metadata(own, known, process_group=group)

        return make

    @property
    def tensors(self) -> int:
        """How many are copied, those without elements included."""
        return len(self._sources)

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        source = resolved(tensor.detach())
        self._sources.append((source, path))
        self._offsets.append(self.bytes)
        self.bytes += -(-source.numel() * source.element_size() // BLOCK_BYTES) * BLOCK_BYTES
        self.is_far = self.is_far or source.is_cuda
        return len(self._sources) - 1

    def run(self, memory: StagingMemory, *, guard: bool) -> None:
        """On return the state may change: all is copied, or with `guard` the rest is protected, and `memory.wait` waits
        for it.
        """
        self._in_memory = memory.parts(self._offsets, [source for source, _ in self._sources])
        rows: list[int] = []
        for at, (source, _) in enumerate(self._sources):
            if source.is_cpu and source.is_contiguous() and not _is_pinned(source):
                rows.append(at)
            else:
                self._in_memory[at].copy_(source, non_blocking=source.is_cuda)
        # Torch takes a DTensor for one with data of its own, if its part does not begin its storage.
        self._made = [
            _with_own_storage(one) if at in self._parts else one for at, one in enumerate(self._in_memory)
        ]
        memory.hold([*self._made, *(one for at, one in enumerate(self._in_memory) if at in self._parts)])
        sources = [self._sources[at] for at in rows]
        memory.fill(
            _native.GuardedCopy(
                source=_addresses(source for source, _ in sources),
                length=np.array([source.numel() * source.element_size() for source, _ in sources], np.uint64),
                target=_addresses(self._in_memory[at] for at in rows), guard=guard,
            ),
            sources,
        )
        for device in {source.device for source, _ in self._sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _addresses(tensors: Any) -> Any:
    return np.array([one.data_ptr() for one in tensors], np.uint64)


def _refusal(tensor: torch.Tensor, path: str) -> UnsupportedStateError | None:
    if type(tensor) in _TENSORS:
        return None
    return unsupported(
        path, tensor, "is a kind of tensor that cannot be staged", "stage it by torch's DefaultStager: "
        "dcp.async_save(..., async_stager=DefaultStager())",
    )


def _is_opaque(tensor: torch.Tensor) -> bool:
    """Whether its bytes are no plain array: torch copies it."""
    return tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta


def _is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a device may write into it, which no protection of pages holds back."""
    return torch.cuda.is_available() and tensor.is_pinned()


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():  # what a rank has of a tensor with fewer rows than ranks
        return torch.empty_like(tensor)
    raw = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return raw.view(tensor.dtype).view(tensor.shape)


def _remade(
    kind: Any, others: Mapping[str, object], context: object, shape: object, strides: object,
    parts: Mapping[str, object],
) -> torch.Tensor:
    return cast("torch.Tensor", kind.__tensor_unflatten__({**others, **parts}, context, shape, strides))


def _dict_of(kind: Any, items: Any, attributes: dict[str, object]) -> Any:
    """A dict of the copies that `items` make; as a module's state_dict() has them, with attributes."""
    made = kind((key, make()) for key, make in items)
    if attributes:
        vars(made).update(attributes)
    return made


def _itself(value: object) -> Any:
    return value
