"""Tensors on a device that there is none of: `DelayedDevice` plays it, and torch sees its memory from inside.

To Flowstone such a tensor lies at an address where an access kills the process, on the device "delayed:0". Everything
from there on is the way that CUDA memory goes; only the stream is another one, and the device's own work is done by
the processor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from delayed_device import DelayedDevice
from msgspec.structs import replace

from flowstone.stage import bounce, capture, device
from flowstone.stage.own_stream import OwnStream
from flowstone.state import tensors
from flowstone.table.pieces import Memory

NAME = "delayed:0"


class Far(OwnStream):
    """The device, and its side stream.

    name  of the device
    sync  the processor waits in `block_current` for what the current stream holds: with that it plays the device's own
          work, which comes after. Off: a test looks at what is queued, and waits by itself
    """

    native: DelayedDevice

    def __init__(
        self, memory_bytes: int, delay_s: float = 0.0, name: str = NAME, *, refuses_kernels: bool = False
    ) -> None:
        native = DelayedDevice(memory_bytes=memory_bytes, delay_s=delay_s, refuses_kernels=refuses_kernels)
        super().__init__(native, lambda: native.current)
        self.name = name
        self.sync = True
        self.blocked_currents = 0
        self._bytes = memory_bytes
        self._used = 0

    def block_current(self, *, early: bool = False) -> None:
        super().block_current(early=early)
        self.native.settle()  # what a test writes now, with the processor, comes behind the kernel of a save
        self.blocked_currents += 1
        if self.sync:
            self.native.wait_for(self.native.current)

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A copy of a dense tensor, on the device."""
        size = like.numel() * like.element_size()
        start, self._used = self._used, self._used + -(-size // 512) * 512
        assert self._used <= self._bytes
        raw = (ctypes.c_uint8 * size).from_address(self.native.inside + start)
        made = torch.frombuffer(raw, dtype=like.dtype).view(like.shape)
        return made.copy_(like.detach())

    def strided(self, like: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor without gaps, on the device, with the same strides."""
        order = sorted(range(like.dim()), key=lambda dim: (-like.stride(dim), dim))
        made = self.tensor(like.permute(order).contiguous()).permute([order.index(dim) for dim in range(like.dim())])
        assert made.stride() == like.stride()
        return made

    def take(self, module: torch.nn.Module) -> None:
        """Move a module to the device."""
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = self.tensor(tensor)

    def take_slots(self, optimizer: torch.optim.Optimizer) -> None:
        for slots in optimizer.state.values():
            for name, value in slots.items():
                if value.dim():
                    slots[name] = self.tensor(value)

    def holds(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.native.inside < self._bytes

    def free(self, tensor: torch.Tensor) -> None:
        """Let the next tensor have the memory of this one, which was made last."""
        self._used = tensor.data_ptr() - self.native.inside


@contextmanager
def shown(*fars: Far) -> Iterator[Far]:
    """Let Flowstone see the tensors of these where a device's would be. Yields the first."""
    own, own_reader, own_carrier = tensors.memory_of, tensors._reader, capture.on_device

    def memory_of(tensor: torch.Tensor) -> Memory:
        memory = own(tensor)
        for far in fars:
            if far.holds(tensor):
                address = memory.address - far.native.inside + far.native.address
                return replace(memory, address=address, device=far.name)
        return memory

    def reader() -> Callable[[list[torch.Tensor]], tensors._Read | None]:
        read = own_reader()

        def read_there(block: list[torch.Tensor]) -> tensors._Read | None:
            address, *others, numbers, names = read(block) or tensors._read_each(block)
            for far in fars:
                inside = address - np.uint64(far.native.inside) < np.uint64(far._bytes)
                if inside.any():
                    address = address + np.uint64((far.native.address - far.native.inside) % (1 << 64)) * inside
                    numbers, names = np.where(inside, np.int32(len(names)), numbers), [*names, far.name]
            return address, *others, numbers, names  # type: ignore[return-value]

        return read_there

    def on_device(memory: Memory) -> torch.Tensor:
        for far in fars:
            if memory.device == far.name:
                address = memory.address - far.native.address + far.native.inside
                memory = replace(memory, address=address, device="cpu")
        return own_carrier(memory)

    by_name = {far.name: far for far in fars}
    streams = device.SideStreams({**device.OPENERS, "delayed": by_name.__getitem__})
    with (
        mock.patch.object(tensors, "memory_of", memory_of),
        mock.patch.object(tensors, "_reader", reader),
        mock.patch.object(device, "_streams", return_value=streams),
        mock.patch.object(bounce, "on_device", on_device),
        mock.patch.object(capture, "on_device", on_device),
    ):
        yield fars[0]
