"""Side streams: copies between a device and the host, concurrent with the device's other work.

The engine's copies have a stream of their own on each device, which nothing else uses (`native/device_cuda.h`). The
CPU never touches device memory: a window with device bytes is fetched into its arena block, and continues like a copied
one when the event behind its copies is over (docs/decisions/029-events-and-own-streams.md). When `save` returns, the
current stream waits for the copies of what is not lazy. At the fence, the CPU waits until all copies are queued, and
the current stream until they are done. A load does the reverse.

**CUDA graphs.** What is put into a stream that records a graph is not executed, but becomes part of the graph, and is
executed at each replay. So a current stream that records is neither waited for nor made to wait: that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from threading import Lock
from types import MappingProxyType
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.log import log
from flowstone.stage.fence import recording_error
from flowstone.table.pieces import Memory


class SideStream(Protocol):
    """The side stream of one device. Call it on the thread that saves or loads: it refers to that current stream."""

    @property
    def native(self) -> _native.Device: ...

    def wait_current(self) -> None:
        """Copies queued from now on wait for all work that is in the current stream now.

        raises  StateError if the current stream records a graph, StorageError if the device has failed
        """

    @property
    def is_recording(self) -> bool:
        """Whether the current stream records a graph."""

    def check_current(self, what: str, remedy: str) -> None:
        """Raise StateError if the current stream records a graph: `what` cannot be done in it."""

    def block_current(self, *, early: bool = False) -> None:
        """Work put into the current stream from now on waits for the copies that are queued now.

        early   for those of early pieces alone

        raises  StateError if the current stream records a graph
        """

    def synchronize(self) -> None:
        """Wait until all copies that are queued now are over. Any thread.

        raises  StorageError if the device has failed
        """

    def gather(
        self, *, address: NDArray[np.uint64], begin: NDArray[np.uint64], length: NDArray[np.uint32],
        layout: NDArray[np.int64], layouts: Sequence[_native.GatherLayout],
    ) -> NDArray[np.uint8]:
        """Bytes from `begin` on of rows of the device's memory, as the current stream sees them: each run at the next
        multiple of GATHERED_ALIGNMENT_BYTES, all by one kernel, and one more for those that are strided. The array is
        filled before the first copy after a `wait_current`.

        layout  of each row: into `layouts`, or -1 for a row in one run
        raises  as `wait_current`
        """

    def digest(
        self, address: NDArray[np.uint64], length: NDArray[np.uint64], layout: NDArray[np.int64] | None = None,
        layouts: Sequence[_native.GatherLayout] = (),
    ) -> _native.Digested | None:
        """Digests of the chunks of rows of the device's memory, as the current stream sees them, all by one kernel, and
        one more for those that are strided, and there before the first copy after a `wait_current`. None if the device
        cannot make them.

        layout  as of `gather`, of shallow ones; None: all rows are in one run
        raises  as `wait_current`
        """


class Reach(msgspec.Struct, frozen=True, eq=False):
    """How the engine reads pieces. Keep it alive until all is captured: devices fill some of its memory behind the work
    in their current streams.

    address   of each: a device's where it has one
    layout    of each: how it is gathered from strided memory, into `layouts`; -1: it is one run
    device    of each: into `streams`; -1: the host
    hosted    copies of device memory on the host
    samples   for each device, lines of its lazy pieces, in the order of the plan's rows; if there are digests, of those
              alone that have none
    digested  for each device, digests of its lazy pieces' chunks, in that order, or None; of those whose layout is
              shallow
    whole     of each, whether its device puts it at `address`, in host memory; None: no device does so
    """

    address: NDArray[np.uint64]
    layout: NDArray[np.int64]
    layouts: Sequence[_native.GatherLayout]
    device: NDArray[np.int32]
    streams: tuple[SideStream, ...]
    hosted: tuple[Memory, ...]
    samples: tuple[NDArray[np.uint8], ...] = ()
    digested: tuple[_native.Digested | None, ...] = ()
    whole: NDArray[np.bool_] | None = None

    def are_digested(self) -> NDArray[np.bool_]:
        """Of each, whether a device that digests can digest it."""
        shallow = np.array([*(one.is_shallow for one in self.layouts), True])  # the last one for -1
        found: NDArray[np.bool_] = shallow[self.layout]
        return found


def as_on_this_thread(devices: Iterable[str]) -> Callable[[], AbstractContextManager[object]]:
    """Makes a context in which any thread has the current streams of `devices` that this thread has now."""
    kinds = {device for device in devices if device.partition(":")[0] == "cuda"}
    current = [torch.cuda.current_stream(device) for device in sorted(kinds)]

    def context() -> AbstractContextManager[object]:
        stack = ExitStack()
        for stream in current:
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return context


def _cuda(name: str) -> SideStream:
    from flowstone.stage.own_stream import CudaStream  # imported here: most processes have no GPU

    return CudaStream(name)


OPENERS: Mapping[str, Callable[[str], SideStream]] = MappingProxyType({"cuda": _cuda})
"""By device type. Memory of other types is copied by torch, through host memory of its own."""


class SideStreams:
    """The side streams of a process, each opened at its first use. Safe from any thread."""

    def __init__(self, openers: Mapping[str, Callable[[str], SideStream]]) -> None:
        self._openers, self._guard = openers, Lock()
        self._open: dict[str, SideStream | None] = {}

    def let_go(self) -> None:
        """Destroy the streams, each once nothing uses it any more; a later use makes new ones."""
        with self._guard:
            self._open = {}

    def any_recording(self) -> bool:
        """Whether a current stream of a device with a side stream records a graph."""
        return any(stream is not None and stream.is_recording for stream in list(self._open.values()))

    def of(self, device: str) -> SideStream | None:
        """The side stream of a device ("cuda:0"); None if that type has none."""
        with self._guard:
            if device not in self._open:
                self._open[device] = _opened(device, self._openers)
            return self._open[device]


@cache
def _streams() -> SideStreams:
    return SideStreams(OPENERS)


def side_stream(device: str) -> SideStream | None:
    """The side stream of a device ("cuda:0"); None if that type has none."""
    return _streams().of(device)


def records_graph() -> bool:
    """Whether a current stream of this thread records a CUDA graph, of the current device or of one with a side stream.

    Cheap: called before each step.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return True
    return _streams().any_recording()


def check_not_recording(what: str, remedy: str) -> None:
    """Raise StateError if `records_graph`: `what` cannot be done then."""
    if records_graph():
        raise recording_error(what, remedy)


def let_streams_go() -> None:
    """Destroy the side streams that are not in use; later uses make new ones."""
    _streams().let_go()


def await_pinned(owners: Iterable[object]) -> None:
    """Wait for the current stream if some of these storages are pinned host memory: a device may still write there.

    Call it on the thread that saves.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return  # so nothing is pinned
    kinds = torch.Tensor, torch.UntypedStorage
    if any(isinstance(one, kinds) and one.device.type == "cpu" and one.is_pinned() for one in owners):
        torch.cuda.current_stream().synchronize()


def _opened(device: str, openers: Mapping[str, Callable[[str], SideStream]]) -> SideStream | None:
    opener = openers.get(device.partition(":")[0])
    if opener is None:
        return None
    try:
        return opener(device)
    except OSError as error:
        log.warning("no side stream on %s (%s): its memory is copied before save returns", device, error)
        return None
