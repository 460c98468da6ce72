"""The device of a session: a CUDA GPU, or the simulated device of the tests.

The simulated one checks the session itself on a machine without a GPU. Its measurements have no meaning.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from bench.gpu.options import Options

MIB = 1 << 20


class Accelerator(Protocol):
    """The operations of stages on a device. Seconds are the device's own, between two marks in its current stream."""

    @property
    def name(self) -> str: ...

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move a module to the device."""

    def slots(self, optimizer: torch.optim.Optimizer) -> None:
        """Move an optimizer's state to the device, if it is not there."""

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A copy of a dense host tensor, on the device."""

    def strided(self, like: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor without gaps, on the device, with the same strides."""

    def pinned(self, count: int) -> torch.Tensor:
        """Host memory of `count` bytes, pinned and touched."""

    def work(self, seconds: float) -> None:
        """Put matrix products of about that many seconds into the current stream."""

    def mark(self) -> Callable[[], float]:
        """A point in the current stream. The call waits until the device has passed it, and returns that time."""

    def copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: int) -> float:
        """Copy each (target, source), alternating over that many streams; returns the seconds from first to last."""

    def synchronize(self) -> None: ...

    def fill_up(self) -> object:
        """Allocate the device's remaining memory, until the result is dropped."""

    def break_down(self) -> None:
        """Make the device fail like a kernel's assertion, after which all calls fail."""


class Cuda:
    """The first GPU that torch sees."""

    def __init__(self) -> None:
        self.device = torch.device("cuda:0")
        torch.cuda.set_device(self.device)
        self._matrix = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
        self._seconds = self._measured()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.to(self.device)

    def slots(self, optimizer: torch.optim.Optimizer) -> None:
        """Moments are created on the parameters' device."""

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        return like.to(self.device)

    def strided(self, like: torch.Tensor) -> torch.Tensor:
        return like.to(self.device)

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True).fill_(1)

    def work(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / self._seconds))):
            torch.mm(self._matrix, self._matrix)

    def mark(self) -> Callable[[], float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()

        def passed() -> float:
            event.synchronize()
            return self._origin.elapsed_time(event) / 1e3

        return passed

    def copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: int) -> float:
        own = [torch.cuda.Stream(self.device) for _ in range(streams)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number, (target, source) in enumerate(pairs):
            with torch.cuda.stream(own[number % streams]):
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def fill_up(self) -> object:
        torch.cuda.empty_cache()
        held: list[torch.Tensor] = []
        size = torch.cuda.mem_get_info()[0]
        while size >= MIB:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            except torch.OutOfMemoryError:
                size //= 2
        return held

    def break_down(self) -> None:
        torch.zeros(1, device=self.device)[torch.tensor([1 << 20], device=self.device)]

    def _measured(self) -> float:
        """Seconds of one matrix product; also the origin of all marks."""
        self._origin = torch.cuda.Event(enable_timing=True)
        for count in 3, 20:  # the first ones load the library
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(count):
                torch.mm(self._matrix, self._matrix)
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3 / count
        self._origin.record()
        return seconds


class Simulated:
    """The device of tests/support/simulated_device.py: any access to its memory kills the process."""

    def __init__(self, memory_bytes: int) -> None:
        from simulated_device import SimulatedDevice

        self.far = SimulatedDevice(memory_bytes, delay_s=0.0002)
        self._held: list[torch.Tensor] = []

    name = "simulated"

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        self.far.take(module)
        return module

    def slots(self, optimizer: torch.optim.Optimizer) -> None:
        self.far.take_slots(optimizer)

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        return self.far.tensor(like)

    def strided(self, like: torch.Tensor) -> torch.Tensor:
        return self.far.strided(like)

    def pinned(self, count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.uint8)

    def work(self, seconds: float) -> None:
        time.sleep(seconds)

    def mark(self) -> Callable[[], float]:
        now = time.perf_counter()
        return lambda: now

    def copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: int) -> float:
        assert streams > 0
        begin = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        """The processor has done its work."""

    def fill_up(self) -> object:
        """The simulated device needs no memory of its own."""
        return None

    def break_down(self) -> None:
        self.far.native.fail_after(0)


@contextmanager
def opened(options: Options) -> Iterator[Accelerator]:
    """The session's device. Raises RuntimeError if torch sees no GPU."""
    if not options.simulate:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device; --simulate plays one")
        yield Cuda()
        return
    with simulated(options.device_bytes) as device:
        yield device


@contextmanager
def simulated(memory_bytes: int) -> Iterator[Simulated]:
    """The simulated device, which Flowstone uses meanwhile. Only in a checkout, since it is part of the tests."""
    tests = str(Path(__file__).resolve().parents[2] / "tests" / "support")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    from simulated_device import visible_device

    device = Simulated(memory_bytes)
    with visible_device(device.far):
        yield device
