"""Memory that states are staged in: shared with other processes, kept from save to save."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from flowstone import _native
from flowstone.errors import BudgetError, StateChangedError

_POPULATE_WRITE = 23  # linux/mman.h, MADV_POPULATE_WRITE
_POPULATE_BYTES = 8 << 20  # for so much at a time other threads cannot map memory: a few ms
_WAIT_S = 1.0


class StagingMemory:
    """Room for one staged state.

    Its pages belong to a memory file, so that another process which is handed a tensor in it maps that, and no byte is
    copied. For states of a device it is pinned instead, and not shared.

    raises  BudgetError where the system has no memory for it
    """

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.bytes, self.is_pinned = size_bytes, pinned
        self._held: list[weakref.ref[torch.Tensor]] = []
        self._copy: _native.GuardedCopy | None = None
        self._sources: Sequence[tuple[torch.Tensor, str]] = ()
        try:
            self._memory = _pinned(size_bytes) if pinned else _shared(size_bytes)
        except (RuntimeError, MemoryError, OSError) as error:  # the first is torch's for the second
            raise BudgetError(
                "there is no memory for a staged state", needed=f"{size_bytes} bytes",
                next="save synchronously with dcp.save, or give the process more memory",
            ) from error

    def __del__(self) -> None:
        self._settle()

    def parts(self, offsets: Sequence[int], sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors like `sources`, each so many bytes from the start, in one storage."""
        # What hands a state to another process moves its storages into shared memory. A shared one stays where it is;
        # the pinned one has to, too, so that of staged tensors is another one over it.
        whole = torch.from_numpy(self._memory.numpy()) if self.is_pinned else self._memory
        sizes = [source.numel() * source.element_size() for source in sources]
        return [
            whole[begin : begin + size].view(source.dtype).view(source.shape)
            for begin, size, source in zip(offsets, sizes, sources, strict=True)
        ]

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """In use until these are gone."""
        self._held = list(map(weakref.ref, tensors))

    def fill(self, copy: _native.GuardedCopy, sources: Sequence[tuple[torch.Tensor, str]]) -> None:
        """It is being filled, from tensors that must stay until then; each with its path in the state."""
        self._copy, self._sources = copy, sources

    def wait(self) -> None:
        """Until it is filled.

        raises  StateChangedError  a tensor's memory was taken away before it was copied
        """
        sources = self._sources
        gone = self._settle()
        if gone is not None:
            name = sources[gone][1]
            raise StateChangedError(
                f"the memory of '{name}' was freed before it was staged", path="", offset=0, length=0, names=(name,),
                gone=True, next="resize no tensor of the state while it is saved, or pass FlowstoneStager(guard=False)",
            )

    def _settle(self) -> int | None:
        """Wait for the copy; then its sources may go. Returns which of them was gone before."""
        copy = self._copy
        if copy is None:
            return None
        while not copy.wait(_WAIT_S):
            pass
        self._copy, self._sources = None, ()
        return copy.gone

    @property
    def is_free(self) -> bool:
        return not any(one() is not None for one in self._held) and (self._copy is None or self._copy.wait(0))


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _shared(size_bytes: int) -> torch.Tensor:
    """Every page is there on return: one that the system could not give later would end the process.

    Where the process may not have files of that size (`ulimit -f`), it is not shared, and torch copies it for others.
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
        # In one call for many pages: half the time of touching them. Kernels before 5.14 refuse, and it is done later.
        length = min(_POPULATE_BYTES, size_bytes - begin)
        _libc().madvise(ctypes.c_void_p(storage.data_ptr() + begin), ctypes.c_size_t(length), _POPULATE_WRITE)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
