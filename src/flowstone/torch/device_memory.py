"""Wraps device memory in torch tensors, so that torch can copy and fill it.

Most copies between a device and the host are made by Flowstone's own stream for copies, the side stream
(stage/device.py). torch makes the others: for example on devices without a side stream, and of memory that is not
contiguous.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.config import COPIED_PART_BYTES
from flowstone.table.pieces import Memory

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype for each item size: copies move bytes of any meaning."""


def on_device(memory: Memory) -> torch.Tensor:
    """Return a tensor that shares `memory`, the device memory of another tensor. The dtype of the returned tensor has
    the same element size as the other tensor's dtype, but may be another dtype.
    """
    owner = memory.owner.untyped_storage() if isinstance(memory.owner, torch.Tensor) else memory.owner
    assert isinstance(owner, torch.UntypedStorage), "a tensor owns device memory"
    # A tensor without elements has no address.
    start = 0 if 0 in memory.shape else (memory.address - owner.data_ptr()) // memory.item_bytes
    strides = tuple(stride // memory.item_bytes for stride in memory.strides_bytes)
    carrier = torch.empty(0, dtype=_CARRIERS[memory.item_bytes], device=memory.device)
    return carrier.set_(owner, start, memory.shape, strides)


def host_twin(memory: Memory) -> Memory:
    """Allocate dense host memory with the shape of `memory`. The `owner` of the result is a new tensor."""
    host = torch.empty(memory.shape, dtype=_CARRIERS[memory.item_bytes], device="cpu")  # torch's default may be a GPU
    strides = tuple(stride * memory.item_bytes for stride in host.stride())
    return Memory(host, host.data_ptr(), memory.shape, strides, memory.item_bytes)


def host_copy(memory: Memory) -> Memory:
    """Copy device memory into new host memory, and return that."""
    twin = host_twin(memory)
    assert isinstance(twin.owner, torch.Tensor)
    _copy_parts(twin.owner, on_device(memory))
    return twin


def _copy_parts(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor in parts. torch first makes strided elements contiguous in new memory of the device, and parts
    limit how much it needs.
    """
    if source.is_contiguous() or source.numel() * source.itemsize <= COPIED_PART_BYTES:
        target.copy_(source)
        return
    dim = next(dim for dim, length in enumerate(source.shape) if length > 1)  # parts of a dense target are then dense
    for to, of in zip(target.tensor_split(2, dim), source.tensor_split(2, dim), strict=True):
        _copy_parts(to, of)


def elements_of(memory: Memory, chosen: NDArray[np.int64]) -> bytes:
    """The bytes of some elements of device memory. `chosen`: their numbers in row-major order. Waits for the current
    stream.
    """
    elements = on_device(memory).reshape(-1)[torch.from_numpy(chosen).to(memory.device)]
    content: bytes = elements.cpu().numpy().tobytes()
    return content


def copy_from(memory: Memory, values: torch.Tensor) -> None:
    """Copy a tensor of the same shape and item size into device memory."""
    alone = tuple(slice(1) if stride == 0 else slice(None) for stride in memory.strides_bytes)
    carrier = on_device(memory)[alone]  # torch refuses to copy into expanded tensors
    carrier.copy_(values[alone].view(carrier.dtype))


def fill_with(memory: Memory, content: bytes) -> None:
    """Set device memory to these bytes, in row-major order."""
    carrier = on_device(memory)
    carrier.copy_(torch.frombuffer(bytearray(content), dtype=carrier.dtype).view(carrier.shape))
