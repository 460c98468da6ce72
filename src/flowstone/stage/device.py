"""Side streams: copies between a device and the host, concurrent with the device's other work.

On each device the engine's copies have a separate stream (`native/gpu/device_cuda.h`). The CPU never touches device
memory: the stream copies it into an arena block, and the engine continues with that block when the event after the
copies has completed (docs/decisions/029-events-and-own-streams.md). Early pieces are the parts of the state that are
captured first, because training may change them once `save` returns. Before it returns, `save` makes the current stream
wait for the copies of early pieces. Before an optimizer's step, the CPU waits until all copies are queued, and the
current stream waits until they are done. In a load, the side stream waits for the current stream before it copies into
device memory, and the current stream then waits for the side stream.

**CUDA graphs.** Work in a stream that records a graph is not executed, but becomes part of the graph, and is
executed at each replay. So it is an error to wait for a current stream that records, or to make such a stream wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from threading import Lock
from types import MappingProxyType
from typing import Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import Device, DeviceDigests, GatherLayout
from flowstone.extensions import extension
from flowstone.log import log
from flowstone.stage.fence import recording_error
from flowstone.state.imported import class_if_imported
from flowstone.table.pieces import Memory


class SideStream(Protocol):
    """The side stream of one device. Its methods use the current stream of the calling thread, so call them on the
    thread that saves or loads.
    """

    @property
    def native(self) -> Device: ...

    def wait_current(self) -> None:
        """Let copies queued from now on wait for all work that is in the current stream now.

        raises  StateError if the current stream records a graph, StorageError if the device has failed
        """

    @property
    def is_recording(self) -> bool:
        """Whether the current stream records a graph."""

    def check_current(self, action: str, remedy: str) -> None:
        """Raise StateError if the current stream records a graph, as `action` cannot be done then."""

    def block_current(self, *, early: bool = False) -> None:
        """Let work put into the current stream from now on wait for the copies that are queued now.

        early   wait only for the copies of early pieces

        raises  StateError if the current stream records a graph
        """

    def synchronize(self) -> None:
        """Wait until all copies that are queued now are done. Can be called on any thread.

        raises  StorageError if the device has failed
        """

    def gather(
        self, *, address: NDArray[np.uint64], begin: NDArray[np.uint64], length: NDArray[np.uint32],
        layout: NDArray[np.int64], layouts: Sequence[GatherLayout],
    ) -> NDArray[np.uint8]:
        """Gather bytes of several ranges (rows) of the device's memory into one array on the host, in the order of the
        current stream. `begin`, `length`: which bytes of each row. The bytes of each row begin at a multiple of
        GATHERED_ALIGNMENT_BYTES in the array. One kernel gathers all contiguous rows, another all strided ones. The
        array is filled before the first copy after a `wait_current`.

        layout  for each row an index into `layouts`; -1: the row is contiguous
        raises  the errors of `wait_current`
        """

    def digest(
        self, address: NDArray[np.uint64], length: NDArray[np.uint64], layout: NDArray[np.int64] | None = None,
        layouts: Sequence[GatherLayout] = (),
    ) -> DeviceDigests | None:
        """Digest the chunks of several ranges (rows) of the device's memory, in the order of the current stream. One
        kernel digests all contiguous rows, another all strided ones. The digests are computed before the first copy
        after a `wait_current`. Returns None if the device cannot digest.

        layout  for each row an index into `layouts`, all of which must be shallow (few nested loops visit the memory,
                as for nearly all arrays); -1: the row is contiguous; None: all rows are contiguous
        raises  the errors of `wait_current`
        """


class DeviceAccess(msgspec.Struct, frozen=True, eq=False):
    """How the engine reads pieces. Keep it alive until all is captured: devices fill some of its memory later, in the
    order of their current streams.

    address   address of each piece, in host memory or on its device
    layout    for each piece an index into `layouts`, which say how to gather it from strided memory; -1: the piece is
              contiguous
    device    for each piece an index into `streams`; -1: it is in host memory
    hosted    copies on the host of device memory that no stream can copy
    samples   for each device, sampled cache lines of its lazy pieces without digests, in the order of the plan
    digested  for each device, digests of the chunks of its lazy pieces with shallow layouts (see `SideStream.digest`),
              in the order of the plan; None: the device computes no digests
    whole     for each piece, whether its device gathers all of it into host memory, at `address`; None: devices gather
              no full piece
    """

    address: NDArray[np.uint64]
    layout: NDArray[np.int64]
    layouts: Sequence[GatherLayout]
    device: NDArray[np.int32]
    streams: tuple[SideStream, ...]
    hosted: tuple[Memory, ...]
    samples: tuple[NDArray[np.uint8], ...] = ()
    digested: tuple[DeviceDigests | None, ...] = ()
    whole: NDArray[np.bool_] | None = None

    def can_digest(self) -> NDArray[np.bool_]:
        """For each piece, whether a device that can compute digests can digest it, as its layout is simple enough."""
        shallow = np.array([*(layout.is_shallow for layout in self.layouts), True])  # the last entry for -1
        digested: NDArray[np.bool_] = shallow[self.layout]
        return digested


def copy_current_streams(devices: Iterable[str]) -> Callable[[], AbstractContextManager[object]]:
    """Remember this thread's current streams on `devices`. Returns a function that makes a context (for `with`): a
    thread that enters it has these current streams until it leaves.
    """
    kinds = {device for device in devices if device.partition(":")[0] == "cuda"}
    if not kinds:
        return nullcontext
    cuda = class_if_imported("torch", "cuda")
    current = [cuda.current_stream(device) for device in sorted(kinds)]

    def context() -> AbstractContextManager[object]:
        stack = ExitStack()
        for stream in current:
            stack.enter_context(cuda.stream(stream))
        return stack

    return context


def _cuda(name: str) -> SideStream:
    return cast("SideStream", extension("torch.side_stream")(name))


OPENERS: Mapping[str, Callable[[str], SideStream]] = MappingProxyType({"cuda": _cuda})
"""How to open a side stream, by device type. torch copies the memory of devices of other types."""


class SideStreams:
    """The side streams of a process, each opened at its first use. Safe from any thread."""

    def __init__(self, openers: Mapping[str, Callable[[str], SideStream]]) -> None:
        self._openers, self._guard = openers, Lock()
        self._open: dict[str, SideStream | None] = {}

    def release(self) -> None:
        """Destroy each stream once no object uses it any more; a later use makes new ones."""
        with self._guard:
            self._open = {}

    def any_recording(self) -> bool:
        """Whether a current stream of a device with a side stream records a graph."""
        return any(stream is not None and stream.is_recording for stream in list(self._open.values()))

    def of(self, device: str) -> SideStream | None:
        """The side stream of a device, such as "cuda:0"; None if devices of its type have none."""
        with self._guard:
            if device not in self._open:
                self._open[device] = _opened(device, self._openers)
            return self._open[device]


@cache
def _streams() -> SideStreams:
    return SideStreams(OPENERS)


def side_stream(device: str) -> SideStream | None:
    """The side stream of a device, such as "cuda:0"; None if devices of its type have none."""
    return _streams().of(device)


def records_graph() -> bool:
    """Whether a current stream of this thread, on the current device or on one with a side stream, records a CUDA
    graph.

    Cheap: called before each step.
    """
    cuda = class_if_imported("torch", "cuda")
    if cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing():
        return True
    return _streams().any_recording()


def check_not_recording(action: str, remedy: str) -> None:
    """Raise StateError if a current stream records a CUDA graph, as `action` cannot be done then."""
    if records_graph():
        raise recording_error(action, remedy)


def release_streams() -> None:
    """Destroy the side streams that are not in use; later uses make new ones."""
    _streams().release()


def await_pinned(owners: Iterable[object]) -> None:
    """Wait for the current stream if some of these storages are pinned host memory, as a device may still write into
    it.

    Must be called on the thread that saves.
    """
    cuda = class_if_imported("torch", "cuda")
    if cuda is None or not cuda.is_initialized():
        return  # no memory is pinned
    kinds = class_if_imported("torch", "Tensor"), class_if_imported("torch", "UntypedStorage")
    if any(isinstance(owner, kinds) and owner.device.type == "cpu" and owner.is_pinned() for owner in owners):
        cuda.current_stream().synchronize()


def _opened(device: str, openers: Mapping[str, Callable[[str], SideStream]]) -> SideStream | None:
    opener = openers.get(device.partition(":")[0])
    if opener is None:
        return None
    try:
        return opener(device)
    except OSError as error:
        log.warning(
            "cannot create a side stream on %s (%s): tensors on this device are copied before save returns",
            device, error,
        )
        return None
