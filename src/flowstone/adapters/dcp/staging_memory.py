"""Memory for staged (copied) states. It is shared with other processes, and reused from save to save."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from flowstone._native import GuardedCopy
from flowstone.errors import BudgetError, StateChangedError

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE in linux/mman.h
_POPULATE_BYTES = 8 << 20  # bytes for each call, which takes a few ms; meanwhile other threads cannot map memory
_WAIT_S = 1.0


class StagingMemory:
    """Memory for one staged state.

    Its pages belong to a file in memory. A process that receives a staged tensor maps that file, instead of copying the
    tensor. For states on a device, the memory is pinned instead, and not shared.

    raises  BudgetError  the system does not have enough memory
    """

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.bytes, self.is_pinned = size_bytes, pinned
        self._users: list[weakref.ref[torch.Tensor]] = []
        self._copy: GuardedCopy | None = None
        self._sources: Sequence[tuple[torch.Tensor, str]] = ()
        try:
            self._memory = _pinned(size_bytes) if pinned else _shared(size_bytes)
        except (RuntimeError, MemoryError, OSError) as error:  # torch raises RuntimeError if memory is short
            raise BudgetError(
                "not enough memory for a staged state", needed=f"{size_bytes} bytes",
                next="save synchronously with dcp.save, or give the process more memory",
            ) from error

    def __del__(self) -> None:
        self._finish_copy()

    def parts(self, offsets: Sequence[int], sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors like `sources`, at these offsets (in bytes) of one storage."""
        # When a state is sent to another process, torch moves its storages into shared memory, except those
        # that are there already. A pinned storage must not be moved, so staged tensors use another storage for the same
        # memory.
        whole = torch.from_numpy(self._memory.numpy()) if self.is_pinned else self._memory
        sizes = [source.numel() * source.element_size() for source in sources]
        return [
            whole[begin : begin + size].view(source.dtype).view(source.shape)
            for begin, size, source in zip(offsets, sizes, sources, strict=True)
        ]

    def set_users(self, tensors: Sequence[torch.Tensor]) -> None:
        """Mark the memory as in use until these tensors no longer exist."""
        self._users = list(map(weakref.ref, tensors))

    def fill(self, copy: GuardedCopy, sources: Sequence[tuple[torch.Tensor, str]]) -> None:
        """Record that `copy` is filling the memory from `sources` (each with its path). The sources are kept alive
        until the copy has ended.
        """
        self._copy, self._sources = copy, sources

    def wait(self) -> None:
        """Wait until the memory is filled.

        raises  StateChangedError  the memory of a tensor was freed before the tensor was copied
        """
        sources = self._sources
        gone = self._finish_copy()
        if gone is not None:
            name = sources[gone][1]
            raise StateChangedError(
                f"the memory of '{name}' was freed before it was staged", path="", offset=0, length=0, names=(name,),
                gone=True, next="do not resize tensors during a save, or pass FlowstoneStager(guard=False)",
            )

    def _finish_copy(self) -> int | None:
        """Wait for the copy, then drop its sources. Returns the position of a source that was freed too early; None if
        none was.
        """
        copy = self._copy
        if copy is None:
            return None
        while not copy.wait(_WAIT_S):
            pass
        self._copy, self._sources = None, ()
        return copy.gone

    @property
    def is_free(self) -> bool:
        return not any(ref() is not None for ref in self._users) and (self._copy is None or self._copy.wait(0))


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _shared(size_bytes: int) -> torch.Tensor:
    """Shared memory with all pages allocated. If a page could not be allocated later, on access, the process would be
    killed.

    If the process may not create files of that size (`ulimit -f`), the memory is not shared, and torch copies it for
    other processes.
    """
    fd = os.memfd_create("flowstone-staged", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EFBIG:
            raise
        return torch.zeros(size_bytes, dtype=torch.uint8)
    try:
        storage: Any = torch.UntypedStorage._new_shared_fd_cpu(fd, size_bytes)  # type: ignore[attr-defined]
    finally:
        os.close(fd)
    for begin in range(0, size_bytes, _POPULATE_BYTES):
        # One call for many pages takes half the time of touching each page. Kernels before 5.14 refuse the call; there,
        # pages are allocated when they are first accessed.
        length = min(_POPULATE_BYTES, size_bytes - begin)
        _libc().madvise(ctypes.c_void_p(storage.data_ptr() + begin), ctypes.c_size_t(length), _POPULATE_WRITE)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
