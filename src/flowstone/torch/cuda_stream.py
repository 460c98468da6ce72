"""The engine's side stream of a device, ordered relative to the current stream. Imported once a device is in use."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.errors import StorageError
from flowstone.stage.fence import FENCE_BEFORE, SAVE_OUTSIDE, recording_error


class EngineStream:
    """A stream of the engine. The driver orders its copies relative to the work in the current stream. torch does not
    know this stream, so the code that queues copies keeps their memory alive until the copies are done.

    current  the handle of the calling thread's current stream
    """

    def __init__(self, native: _native.Device, current: Callable[[], int]) -> None:
        self.native, self._current = native, current

    def wait_current(self) -> None:
        self.check_current("save or load", SAVE_OUTSIDE)
        try:
            self.native.follow(self._current())
        except OSError as error:
            raise _refusal(error) from error

    def gather(
        self, *, address: NDArray[np.uint64], begin: NDArray[np.uint64], length: NDArray[np.uint32],
        layout: NDArray[np.int64], layouts: Sequence[_native.GatherLayout],
    ) -> NDArray[np.uint8]:
        self.check_current("save", SAVE_OUTSIDE)
        try:
            return self.native.gather(
                self._current(), address=address, begin=begin, length=length, layout=layout, layouts=layouts
            )
        except OSError as error:
            raise _refusal(error) from error

    def digest(
        self, address: NDArray[np.uint64], length: NDArray[np.uint64], layout: NDArray[np.int64] | None = None,
        layouts: Sequence[_native.GatherLayout] = (),
    ) -> _native.DeviceDigests | None:
        self.check_current("save", SAVE_OUTSIDE)
        try:
            return self.native.digest(self._current(), address, length, layout, layouts)
        except OSError as error:
            raise _refusal(error) from error

    def block_current(self, *, early: bool = False) -> None:
        self.check_current("change the state", FENCE_BEFORE)
        try:
            self.native.lead(self._current(), early=early)
        except OSError:
            with suppress(OSError):  # if copies have failed, the save reports that
                self.native.synchronize()

    def synchronize(self) -> None:
        try:
            self.native.synchronize()
        except OSError as error:
            raise _refusal(error) from error

    @property
    def is_recording(self) -> bool:
        """Whether the current stream records a graph."""
        return self.native.is_recording(self._current())

    def check_current(self, action: str, remedy: str) -> None:
        if self.is_recording:
            raise recording_error(action, remedy)


def _refusal(error: OSError) -> StorageError:
    return StorageError(
        "the GPU driver refuses to copy tensors", errno=errno.EIO, reason=error.strerror,
        next="after a GPU has failed, only a new process can use it: start one, and resume from the newest checkpoint",
    )


class CudaSideStream(EngineStream):
    """A CUDA stream."""

    def __init__(self, name: str) -> None:
        if torch.version.hip is not None:
            # libcuda.so.1 may be installed nevertheless, but it handles only NVIDIA's GPUs.
            raise OSError(errno.ENOSYS, "this torch is built for ROCm")
        self._device = torch.device(name)
        native = _native.cuda_device(ordinal=self._device.index, name=name)
        super().__init__(native, lambda: torch.cuda.current_stream(self._device).cuda_stream)
