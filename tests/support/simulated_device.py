"""A simulated accelerator: `DelayedDevice` runs its copies on a thread, and torch sees its memory as host memory.

For Flowstone, such a tensor is on the device "delayed:0", at an address at which any access kills the process. From
there on it takes the path of CUDA memory; only the stream is simulated, and the processor does the device's own work.
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

from flowstone.stage import device
from flowstone.table.pieces import Memory
from flowstone.torch import device_memory, framework, tensors
from flowstone.torch.cuda_stream import EngineStream

NAME = "delayed:0"


class SimulatedDevice(EngineStream):
    """The device, and its side stream.

    name  of the device
    sync  `block_current` makes the processor wait for the work in the current stream, because the processor also does
          the device's later work. If off, a test inspects the queue and waits by itself
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
        self.native.settle()  # the test's next writes, by the processor, happen after a save's kernel
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
        """Give the next tensor the memory of this one, which was created last."""
        self._used = tensor.data_ptr() - self.native.inside


@contextmanager
def visible_device(*fars: SimulatedDevice) -> Iterator[SimulatedDevice]:
    """Make Flowstone see the tensors of these at device addresses. Yields the first."""
    own, own_reader, own_carrier = tensors.memory_of, tensors._reader, device_memory.on_device

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
        mock.patch.object(framework, "memory_of", memory_of),
        mock.patch.object(tensors, "_reader", reader),
        mock.patch.object(device, "_streams", return_value=streams),
        mock.patch.object(device_memory, "on_device", on_device),
    ):
        yield fars[0]
