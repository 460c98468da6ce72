"""The copies of one state. All are planned before the first is made, so that it is known whether the memory suffices.
"""

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

from flowstone._native import GuardedCopy
from flowstone.adapters.dcp.staging_memory import StagingMemory
from flowstone.config import BLOCK_BYTES
from flowstone.errors import UnsupportedStateError
from flowstone.format.objects import unsupported_error
from flowstone.torch.tensors import resolved

_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class StagedCopies:
    """The values given to `plan`, copied by `run`.

    bytes   total size of the copies, for a StagingMemory
    has_device_tensors  whether some values are on a device
    """

    def __init__(self) -> None:
        self.bytes, self.has_device_tensors = 0, False
        self._sources: list[tuple[torch.Tensor, str]] = []
        self._offsets: list[int] = []
        # numbers of sources that are parts of another tensor, such as the local tensor of a DTensor
        self._parts: set[int] = set()
        self._numbers: dict[int, int] = {}  # id of a tensor that is not a part of another one -> number of its source
        self._results: list[torch.Tensor] = []
        self._in_memory: list[torch.Tensor] = []

    def plan(self, value: object, path: str) -> Callable[[], Any]:
        """Plan the copy of `value`. Returns a function that returns the copy, once `run` was called.

        raises  UnsupportedStateError  a tensor or an object cannot be copied; the error names it
        """
        if isinstance(value, torch.Tensor):
            return self._plan_tensor(value, path)
        kind = type(value)
        if kind in (dict, OrderedDict):
            items = [(k, self.plan(v, f"{path}.{k}")) for k, v in cast("dict[object, object]", value).items()]
            attributes = copy.deepcopy(vars(value)) if kind is OrderedDict else {}
            return partial(_dict_of, kind, items, attributes)
        if kind in (list, tuple):
            parts = [self.plan(v, f"{path}.{index}") for index, v in enumerate(cast("list[object]", value))]
            return lambda: cast("type[list[object]]", kind)(make() for make in parts)
        try:
            return partial(_identity, copy.deepcopy(value))
        except Exception as error:
            raise unsupported_error(path, value, f"cannot be copied ({type(error).__name__}: {error})") from error

    def _plan_tensor(self, tensor: torch.Tensor, path: str) -> Callable[[], torch.Tensor]:
        if isinstance(tensor, ShardedTensor):
            return self._plan_shards(tensor, path)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
            return self._plan_parts(cast("Any", tensor), path)
        if (refusal := _refusal(tensor, path)) is not None:
            raise refusal
        if _is_opaque(tensor):
            return partial(_identity, tensor.detach().clone().cpu())
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = self._add(tensor, path)
        return lambda: self._results[number]

    def _plan_parts(self, tensor: Any, path: str) -> Callable[[], torch.Tensor]:
        """Plan the copy of a tensor that wraps other tensors, such as a DTensor."""
        names, context = tensor.__tensor_flatten__()
        numbers, others = dict[str, int](), dict[str, object]()
        for name in names:
            part = getattr(tensor, name)
            if not isinstance(part, torch.Tensor):
                # not a tensor but, for example, a device mesh, which must not be copied: the copy shares it
                others[name] = part
            elif _refusal(part, path) is None and not _is_opaque(part):
                numbers[name] = self._add(part, f"{path}.{name}")
                self._parts.add(numbers[name])
            else:
                others[name] = self.plan(part, f"{path}.{name}")()
        remake = partial(_rebuild, type(tensor), others, context, tensor.shape, tensor.stride())

        def make() -> torch.Tensor:
            made = remake({name: self._results[number] for name, number in numbers.items()})
            # Otherwise torch would copy the parts into shared memory again, where they already are.
            shared = {name: self._in_memory[number] for name, number in numbers.items()}
            cast("Any", made).__reduce_ex__ = lambda _: (remake, (shared,))
            return made

        return make

    def _plan_shards(self, tensor: ShardedTensor, path: str) -> Callable[[], torch.Tensor]:
        """Plan the copy of a ShardedTensor, such as FSDP's. In the copy, all shards are marked as being in host memory.
        """
        shards = [
            (copy.deepcopy(shard.metadata), self.plan(shard.tensor, f"{path}.{index}"))
            for index, shard in enumerate(tensor.local_shards())
        ]
        whole_metadata = copy.deepcopy(tensor.metadata())
        for metadata in (*(own for own, _ in shards), *whole_metadata.shards_metadata):
            assert metadata.placement is not None, "each shard has a rank"
            metadata.placement._device = torch.device("cpu")
        group = tensor._process_group

        def make() -> torch.Tensor:
            own = [Shard(part(), metadata) for metadata, part in shards]
            return ShardedTensor._init_from_local_shards_and_global_metadata(own, whole_metadata, process_group=group)

        return make

    @property
    def tensors(self) -> int:
        """The number of tensors to copy, including empty ones."""
        return len(self._sources)

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        source = resolved(tensor.detach())
        self._sources.append((source, path))
        self._offsets.append(self.bytes)
        self.bytes += -(-source.numel() * source.element_size() // BLOCK_BYTES) * BLOCK_BYTES
        self.has_device_tensors = self.has_device_tensors or source.is_cuda
        return len(self._sources) - 1

    def run(self, memory: StagingMemory, *, guard: bool) -> None:
        """Copy the values. The state may change once this returns.

        With `guard`, some copies may be made after this returns. Until a value is copied, it is write-protected.
        `memory.wait` waits for all copies.
        """
        self._in_memory = memory.parts(self._offsets, [source for source, _ in self._sources])
        rows: list[int] = []
        for number, (source, _) in enumerate(self._sources):
            if source.is_cpu and source.is_contiguous() and not _is_pinned(source):
                rows.append(number)
            else:
                self._in_memory[number].copy_(source, non_blocking=source.is_cuda)
        # If the part of a DTensor does not begin at the start of its storage, torch treats the DTensor like a tensor
        # with data of its own.
        self._results = [
            _with_own_storage(part) if n in self._parts else part for n, part in enumerate(self._in_memory)
        ]
        memory.set_users([*self._results, *(part for n, part in enumerate(self._in_memory) if n in self._parts)])
        sources = [self._sources[number] for number in rows]
        memory.fill(
            GuardedCopy(
                source=_addresses(source for source, _ in sources),
                length=np.array([source.numel() * source.element_size() for source, _ in sources], np.uint64),
                target=_addresses(self._in_memory[number] for number in rows), guard=guard,
            ),
            sources,
        )
        for device in {source.device for source, _ in self._sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _addresses(tensors: Any) -> Any:
    return np.array([tensor.data_ptr() for tensor in tensors], np.uint64)


def _refusal(tensor: torch.Tensor, path: str) -> UnsupportedStateError | None:
    if type(tensor) in _TENSORS:
        return None
    return unsupported_error(
        path, tensor, "is a kind of tensor that cannot be staged", "stage it with torch's DefaultStager: "
        "dcp.async_save(..., async_stager=DefaultStager())",
    )


def _is_opaque(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are not a plain array, so that only torch can copy it."""
    return tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta


def _is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a device may write into the tensor's memory. Page protection does not stop a device."""
    return torch.cuda.is_available() and tensor.is_pinned()


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():  # a rank's part is empty if the tensor has fewer rows than there are ranks
        return torch.empty_like(tensor)
    raw = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return raw.view(tensor.dtype).view(tensor.shape)


def _rebuild(
    kind: Any, others: Mapping[str, object], context: object, shape: object, strides: object,
    parts: Mapping[str, object],
) -> torch.Tensor:
    return cast("torch.Tensor", kind.__tensor_unflatten__({**others, **parts}, context, shape, strides))


def _dict_of(kind: Any, items: Any, attributes: dict[str, object]) -> Any:
    """A dict of the class `kind`. Each of `items` is a key and a function that makes the value. `attributes` are set on
    the dict: they are those that the original has, such as `_metadata` of a module's state_dict().
    """
    made = kind((key, make()) for key, make in items)
    if attributes:
        vars(made).update(attributes)
    return made


def _identity(value: object) -> Any:
    return value
