"""Bounce buffers: memory that bytes are read to first, if they cannot be read straight into their target.

That is the case when values are converted (cast), when a device cannot take the stored layout, and when a load
verifies everything before it changes anything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Mapping, Sequence

import msgspec
import numpy as np
import torch

from flowstone.errors import BudgetError
from flowstone.stage.capture import host_twin, on_device
from flowstone.stage.device import SideStream, side_stream
from flowstone.state import tensors
from flowstone.store.mount import available_bytes
from flowstone.table.dtype import DType
from flowstone.table.pieces import Memory, Pieces, Places


class BounceBuffer(msgspec.Struct, frozen=True, eq=False):
    """`buffer` receives a piece's bytes as stored; `copy_back` copies them to their target, converted if necessary.
    """

    buffer: torch.Tensor
    target: Memory
    wanted: DType

    def copy_back(self) -> None:
        values = self.buffer
        if tensors.dtype_of(values) != self.wanted:
            values = values.to(tensors.torch_dtype(self.wanted))
        if self.target.device != "cpu":
            carrier = on_device(self.target)
            carrier.copy_(values.view(carrier.dtype))
            return
        source = tensors.memory_of(values.contiguous())
        host_array(self.target)[...] = host_array(source)


class Destinations(msgspec.Struct, frozen=True, eq=False):
    """Where the bytes of the requested pieces are read to.

    places   parallel to the pieces
    bounced  position -> BounceBuffer, for pieces that are not read straight into their target
    streams  of the devices that the places are on, by name
    """

    places: Places
    bounced: Mapping[int, BounceBuffer]
    streams: Mapping[str, SideStream]


def choose_destinations(
    wanted: Pieces, places: Places, stored: Sequence[DType], scattered: Container[int] = (), *, verify_first: bool
) -> Destinations:
    """Choose where each requested piece is read to.

    stored        the dtypes in the checkpoint
    scattered     positions of pieces on devices that stored pieces do not fill in one run each
    verify_first  all pieces use bounce buffers
    raises        BudgetError if the buffers need more than the available memory
    """
    if verify_first:
        needed, available = sum(piece.bytes for piece in wanted), available_bytes()
        if needed > available:
            raise BudgetError(
                f"load(verify_first=True) needs {needed} bytes beside the state", found=f"{available} bytes available",
                next="load with verify_first=False: every chunk is still verified as it is read",
            )
    far = {at: memory for at, memory in places.apart.items() if memory.device != "cpu"}
    streams = _streams(far, scattered)
    device = {
        at for at, memory in far.items() if memory.device not in streams or not memory.contiguous or at in scattered
    }
    if not verify_first and not device and tuple(stored) == wanted.dtypes:
        return Destinations(places, {}, streams)
    address, apart, owners = places.address.copy(), dict(places.apart), list(places.owners)
    bounced = {}
    for at, (dtype, kind) in enumerate(zip(stored, wanted.dtypes, strict=True)):
        if dtype is kind and not verify_first and at not in device:
            continue
        piece = wanted[at]
        target = places.memory(at, piece)
        if dtype != kind or verify_first:
            buffer = tensors.empty(dtype, piece.box.shape)
        else:
            twin = host_twin(target)
            assert isinstance(twin.owner, torch.Tensor)
            buffer = twin.owner.view(tensors.torch_dtype(dtype))
        apart.pop(at, None)
        address[at], owners[at] = buffer.data_ptr(), buffer
        bounced[at] = BounceBuffer(buffer, target, kind)
    left = {memory.device for memory in apart.values()}
    return Destinations(
        Places(address, apart, owners), bounced, {name: s for name, s in streams.items() if name in left}
    )


def fill_with_zeros(memory: Memory) -> None:
    """Set all bytes of host or device memory to zero. The caller keeps the owner alive."""
    if memory.device != "cpu":
        on_device(memory).zero_()
    else:
        host_array(memory)[...] = 0


def _streams(far: Mapping[int, Memory], scattered: Container[int]) -> Mapping[str, SideStream]:
    """The streams of devices that can take at least one piece straight from the engine."""
    names = dict.fromkeys(memory.device for at, memory in far.items() if memory.contiguous and at not in scattered)
    return {name: stream for name in names if (stream := side_stream(name)) is not None}


_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def host_array(memory: Memory) -> np.ndarray:
    """Host memory as an array with elements of the same size; the caller keeps the owner alive."""
    reach = [(n - 1) * s for n, s in zip(memory.shape, memory.strides_bytes, strict=True)]
    if 0 in memory.shape:
        return np.empty(memory.shape, _CARRIERS[memory.item_bytes])
    below, above = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
    raw = (ctypes.c_char * (above - below + memory.item_bytes)).from_address(memory.address + below)
    return np.ndarray(memory.shape, _CARRIERS[memory.item_bytes], memoryview(raw), -below, memory.strides_bytes)
