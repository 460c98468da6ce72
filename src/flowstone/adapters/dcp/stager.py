"""FlowstoneStager: copies a state into memory that is kept from save to save, in the place of DefaultStager."""

from __future__ import annotations

import copy
import ctypes
import gc
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard

from flowstone.config import BLOCK_BYTES, DEADLINE_S, whole_number
from flowstone.errors import ArgumentError, BudgetError, ClosedError
from flowstone.format.objects import unsupported
from flowstone.state.tensors import resolved

_BUFFERS_MAX = 2  # one is written to the disk while the next save is staged into the other
_PATIENCE_S = 0.02  # before a second one is made: the thread of the save before may be about to let go of the first
_POLL_S = 0.002
_COLLECT_S = 0.5  # of waiting, until what only the garbage collector can free is freed


class FlowstoneStager:
    """Stages for `dcp.async_save`. Fresh memory takes ten times as long as a copy into memory that was touched before,
    so the copies of one save are used again by a later one: once nothing holds its staged tensors any more.

    budget_bytes  of host memory for staged states; None: as much as two of them take
    in_background  `stage` returns a Future at once, so that `async_save` returns an AsyncSaveResponse: wait for its
                   `staging_completion` before anything of the state changes
    deadline_s    how long to wait for memory that an earlier save still uses

    What was staged does not change with the state, in whatever executor it is written. A FlowstoneWriter stages by one
    of its own. Calls from one thread at a time. `close` gives the memory back.
    """

    _synchronize_after_execute = False

    def __init__(
        self, *, budget_bytes: int | None = None, in_background: bool = False, deadline_s: float = DEADLINE_S
    ) -> None:
        self._budget_bytes = None if budget_bytes is None else whole_number("budget_bytes", budget_bytes)
        if self._budget_bytes is not None and self._budget_bytes < 1:
            raise ArgumentError(f"budget_bytes {budget_bytes} is no room at all", next="leave it out")
        self._deadline_s, self._buffers, self._is_closed = deadline_s, list[_Buffer](), False
        self._thread = ThreadPoolExecutor(1, "flowstone-stage") if in_background else None
        self._last: Future[dict[str, Any]] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: Mapping[str, Any], **_: object) -> dict[str, Any] | Future[dict[str, Any]]:
        """A copy of the state, whose tensors lie in host memory; a Future of it, if in the background.

        raises  BudgetError  there is no memory for it, or an earlier save holds all of it until the deadline
                UnsupportedStateError  a tensor or an object that cannot be copied, by name
        """
        if self._is_closed:
            raise ClosedError("this FlowstoneStager is closed", next="make another one")
        if self._thread is None:
            return self._staged(state_dict)
        self._last = self._thread.submit(self._staged, state_dict)
        return self._last

    def synchronize_staging(self) -> None:
        """Wait until the state may change."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Give the memory back, once nothing uses what was staged."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._buffers.clear()

    def _staged(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        copies = _Copies()
        planned = {key: copies.plan(value, str(key)) for key, value in state_dict.items()}
        if copies.bytes:
            buffer = self._buffer(copies.bytes, pinned=copies.is_far)
            copies.run(buffer)
        return {key: make() for key, make in planned.items()}

    def _buffer(self, size_bytes: int, *, pinned: bool) -> _Buffer:
        """Memory that nothing uses. Waits for what an earlier save does use."""
        if self._budget_bytes is not None and size_bytes > self._budget_bytes:
            raise BudgetError(
                "a staged state does not fit into its budget", expected=f"{self._budget_bytes} bytes",
                found=f"{size_bytes} bytes", next="raise budget_bytes of FlowstoneStager",
            )
        begin, collected = time.monotonic(), False
        while True:
            waited = time.monotonic() - begin
            may_grow = not self._buffers or waited > _PATIENCE_S
            found = self._free_buffer(size_bytes, pinned=pinned, may_grow=may_grow)
            if found is not None:
                return found
            if waited > self._deadline_s:
                raise BudgetError(
                    f"earlier saves hold all staging memory since {waited:.0f} s", needed=f"{size_bytes} bytes",
                    next="wait for the future of the save before the last, and let go of staged states",
                )
            if waited > _COLLECT_S and not collected:
                gc.collect()
                collected = True
            time.sleep(_POLL_S)

    def _free_buffer(self, size_bytes: int, *, pinned: bool, may_grow: bool) -> _Buffer | None:
        for buffer in self._buffers:
            if buffer.is_free and buffer.bytes >= size_bytes and buffer.is_pinned == pinned:
                return buffer
        if not may_grow:
            return None
        kept = [buffer for buffer in self._buffers if not buffer.is_free]
        used = sum(buffer.bytes for buffer in kept)
        if len(kept) == _BUFFERS_MAX or (self._budget_bytes is not None and used + size_bytes > self._budget_bytes):
            return None
        self._buffers = kept  # those that are too small go before the new one comes
        kept.append(_Buffer(size_bytes, pinned=pinned))
        return kept[-1]


class _Buffer:
    """Memory for one staged state. It is free once all tensors that lie in it are gone."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        try:
            memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except (RuntimeError, MemoryError) as error:  # the former is torch's for the latter
            raise BudgetError(
                "there is no memory for a staged state", needed=f"{size_bytes} bytes",
                next="save synchronously with dcp.save, or give the process more memory",
            ) from error
        self.bytes, self.is_pinned = size_bytes, pinned
        # Staged tensors have storages of their own over this memory: what hands a state to another process moves their
        # storages into shared memory, and this one has to stay where it is.
        self.memory = memory.numpy()
        self.held: list[weakref.ref[torch.Tensor]] = []

    @property
    def is_free(self) -> bool:
        return not any(one() is not None for one in self.held)


class _Copies:
    """The copies of one state: planned first, so that their memory is known to suffice before the first is made.

    bytes   that they take, in one buffer
    is_far  some come from a device
    """

    def __init__(self) -> None:
        self.bytes, self.is_far = 0, False
        self._sources: list[tuple[torch.Tensor, int, bool]] = []
        self._numbers: dict[int, int] = {}  # of a tensor that is no part of one: its source
        self._made: list[torch.Tensor] = []

    def plan(self, value: object, path: str, *, is_part: bool = False) -> Callable[[], Any]:
        """What makes the copy of `value`, once `run` has copied the tensors in it. `is_part`: of a tensor."""
        if isinstance(value, torch.Tensor):
            return self._plan_tensor(value, path, is_part=is_part)
        kind = type(value)
        if kind in (dict, OrderedDict):
            items = [(k, self.plan(v, f"{path}.{k}")) for k, v in cast("dict[object, object]", value).items()]
            return lambda: cast("type[dict[object, object]]", kind)((k, make()) for k, make in items)
        if kind in (list, tuple):
            parts = [self.plan(v, f"{path}.{at}") for at, v in enumerate(cast("list[object]", value))]
            return lambda: cast("type[list[object]]", kind)(make() for make in parts)
        try:
            return partial(_itself, copy.deepcopy(value))
        except Exception as error:
            raise unsupported(path, value, f"cannot be copied ({type(error).__name__}: {error})") from error

    def _plan_tensor(self, tensor: torch.Tensor, path: str, *, is_part: bool) -> Callable[[], torch.Tensor]:
        if isinstance(tensor, ShardedTensor):
            return self._plan_shards(tensor, path)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
            return self._plan_parts(cast("Any", tensor), path)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise unsupported(
                path, tensor, "is a kind of tensor that cannot be staged", "stage it by torch's DefaultStager: "
                "dcp.async_save(..., async_stager=DefaultStager())",
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            return partial(_itself, tensor.detach().clone().cpu())
        if not is_part and id(tensor) in self._numbers:
            known = self._numbers[id(tensor)]
            return lambda: self._made[known]
        source = resolved(tensor.detach())
        at, number = self.bytes, len(self._sources)
        if not is_part:
            self._numbers[id(tensor)] = number
        self.bytes += -(-source.numel() * source.element_size() // BLOCK_BYTES) * BLOCK_BYTES
        self.is_far = self.is_far or source.is_cuda
        self._sources.append((source, at, is_part))
        return lambda: self._made[number]

    def _plan_parts(self, tensor: Any, path: str) -> Callable[[], torch.Tensor]:
        """Of a tensor that wraps others, such as a DTensor."""
        names, context = tensor.__tensor_flatten__()
        parts = {name: self.plan(getattr(tensor, name), f"{path}.{name}", is_part=True) for name in names}
        shape, strides = tensor.shape, tensor.stride()

        def make() -> torch.Tensor:
            inner = {name: part() for name, part in parts.items()}
            return cast("torch.Tensor", type(tensor).__tensor_unflatten__(inner, context, shape, strides))

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

    def run(self, buffer: _Buffer) -> None:
        """Copy all of it; on return nothing reads the state any more."""
        made: list[torch.Tensor] = []
        whole = torch.from_numpy(buffer.memory)
        for source, at, is_part in self._sources:
            size = source.numel() * source.element_size()
            # torch takes a DTensor for one with data of its own, if its part does not begin its storage.
            raw = torch.from_numpy(buffer.memory[at : at + size]) if is_part else whole[at : at + size]
            into = raw.view(source.dtype).view(source.shape)
            if source.is_cpu and source.is_contiguous():
                # On this thread alone: torch's copies wait for all their threads, which others' work holds up.
                ctypes.memmove(into.data_ptr(), source.data_ptr(), size)
            else:
                into.copy_(source, non_blocking=source.is_cuda)
            made.append(into)
        buffer.held = list(map(weakref.ref, made))
        for device in {source.device for source, _, _ in self._sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._made = made


def _itself(value: object) -> Any:
    return value
