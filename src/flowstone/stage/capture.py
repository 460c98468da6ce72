"""Capture: from live memory and a plan to segments on their way to the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import BLOCK_BYTES
from flowstone.format.digest import digest
from flowstone.format.segment import encode_header
from flowstone.pieces import Memory
from flowstone.plan.write import WritePlan, place
from flowstone.store.base import FilePlan, Store, Writing

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Segments that are being written.

    offsets  file offset of each piece's bytes, in plan order
    headers  the digest of each segment's header
    sources  what the writers read from: keep it until captured
    """

    writing: Writing
    offsets: NDArray[np.uint64]
    headers: tuple[str, ...]
    sources: tuple[object, ...]


def start_capture(
    store: Store, directory: str, plan: WritePlan, memory: Sequence[Memory], arena: _native.Arena
) -> Staged:
    """Start capturing `memory` (parallel to the plan's pieces) into segments in `directory`.

    Returns without waiting; the memory must stay alive and unchanged until
    `writing.wait_captured()` returns. Raises StorageError when the segments cannot be created.
    """
    sources = [_on_host(m) for m in memory]
    address = np.array([m.address for m in sources], np.uint64)
    strided = np.array([not m.contiguous for m in sources], np.bool_)
    phases = np.where(strided, 0, address % BLOCK_BYTES).astype(np.uint64)
    offsets = place(plan, phases)
    headers = [_header(plan, segment, offsets) for segment in range(len(plan.segments))]
    layouts, layout = _layouts(sources, strided)
    header_rows = np.array([np.frombuffer(h, np.uint8).ctypes.data for h in headers], np.uint64)
    count = len(plan.segments)
    nothing = np.zeros(count, np.uint64)
    order = np.lexsort((  # headers first, then by offset; an empty piece before the one it shares its offset with
        np.concatenate([nothing, plan.length]), np.concatenate([nothing, offsets]),
        np.concatenate([np.arange(count), plan.segment]),
    ))

    def column(first: object, rest: NDArray[Any], kind: type[_Number]) -> NDArray[_Number]:
        return np.concatenate([np.asarray(first, kind), rest.astype(kind)])[order]

    no_digest = np.full(count, _native.NO_DIGEST, np.uint64)
    rows = _native.WriteRows(
        file=column(np.arange(count), plan.segment, np.uint32),
        offset=column(nothing, offsets, np.uint64),
        length=column([len(header) for header in headers], plan.length, np.uint64),
        address=column(header_rows, address, np.uint64),
        chunk=column(no_digest, plan.chunk, np.uint64),
        layout=column(np.full(count, -1), layout, np.int64),
        layouts=layouts, chunks=plan.chunks,
    )
    files = [FilePlan(f"{directory}/{segment.name}", segment.bytes) for segment in plan.segments]
    writing = store.write(files, rows, arena)
    return Staged(writing, offsets, tuple(map(digest, headers)), (tuple(sources), tuple(headers)))


def _header(plan: WritePlan, segment: int, offsets: NDArray[np.uint64]) -> bytes:
    file = plan.segments[segment]
    pieces = sorted(file.pieces, key=lambda p: (int(offsets[p]), int(plan.length[p])))
    rows = ((plan.text[p], int(offsets[p]), int(plan.length[p])) for p in pieces)
    return encode_header(rows, header_bytes=file.header_bytes, file_bytes=file.bytes)


def _layouts(
    sources: Sequence[Memory], strided: NDArray[np.bool_]
) -> tuple[list[_native.GatherLayout], NDArray[np.int64]]:
    layout = np.full(len(sources), -1, np.int64)
    layouts: list[_native.GatherLayout] = []
    for position in np.flatnonzero(strided).tolist():
        memory = sources[position]
        layout[position] = len(layouts)
        layouts.append(
            _native.GatherLayout(item_bytes=memory.item_bytes, shape=memory.shape, strides_bytes=memory.strides_bytes)
        )
    return layouts, layout


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A type of each item size: copies between devices move bytes, whatever they mean."""


def on_device(memory: Memory) -> torch.Tensor:
    """The tensor that `memory`, owned by a storage, describes; of a carrier type of its item size."""
    assert isinstance(memory.owner, torch.UntypedStorage), "device memory is owned by its storage"
    start = (memory.address - memory.owner.data_ptr()) // memory.item_bytes
    strides = tuple(stride // memory.item_bytes for stride in memory.strides_bytes)
    carrier = torch.empty(0, dtype=_CARRIERS[memory.item_bytes], device=memory.device)
    return carrier.set_(memory.owner, start, memory.shape, strides)


def host_twin(memory: Memory) -> Memory:
    """Fresh, dense host memory of the same shape; its owner is the tensor."""
    host = torch.empty(memory.shape, dtype=_CARRIERS[memory.item_bytes])
    strides = tuple(stride * memory.item_bytes for stride in host.stride())
    return Memory(host, host.data_ptr(), memory.shape, strides, memory.item_bytes)


def _on_host(memory: Memory) -> Memory:
    """Device memory is brought to the host first; host memory is taken from where it lies."""
    if memory.device == "cpu":
        return memory
    twin = host_twin(memory)
    assert isinstance(twin.owner, torch.Tensor)
    twin.owner.copy_(on_device(memory))
    return twin
