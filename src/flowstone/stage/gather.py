"""What devices gather at the start of a save: samples of lazy pieces, and all bytes of small pieces.

On each device one kernel in the current stream gathers these bytes into pinned host memory
(native/gpu/gather_kernel.h). So there is no call for each piece, no extra device memory, and no wait. A second kernel
gathers strided memory (native/gpu/pack_kernel.h). The engine reads the result after its own stream has waited for the
kernel. If digests are used instead of samples, a third kernel digests all chunks (native/gpu/digest_kernel.h). This
module is imported once a device is in use.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone._native import (
    DIGESTED_BY_HOST_MAX,
    GATHERED_ALIGNMENT_BYTES,
    LINE_BYTES,
    LINES_PER_CHUNK,
    Device,
    line_begins,
)
from flowstone.config import CHUNK_BYTES, GATHERED_BYTES_MAX, PACKED_BELOW_BYTES
from flowstone.plan.write import WritePlan
from flowstone.stage.device import DeviceAccess, SideStream

_ALIGNMENT = np.uint64(GATHERED_ALIGNMENT_BYTES)


def gather_for(
    plan: WritePlan, reach: DeviceAccess, lazy: NDArray[np.bool_], seeds: NDArray[np.uint64], *, digests: bool
) -> DeviceAccess:
    """Let each device gather small pieces, and samples of lazy pieces, for a save of `plan`. Returns how the engine
    then reads each piece.

    lazy     for each piece, whether it is captured after `save` has returned
    digests  whether devices digest all lazy bytes, if they can, instead of sampling them

    raises  StateError, StorageError  see `SideStream.wait_current`
    """
    source, layout, device = reach.address, reach.layout, reach.device
    can_digest = reach.can_digest()
    small = (device >= 0) & ~lazy & (plan.length < PACKED_BELOW_BYTES) & can_digest  # others would need a long table
    small &= np.cumsum(np.where(small, _rounded(plan.length), np.uint64(0))) <= GATHERED_BYTES_MAX
    address, samples, digested = source.copy(), [], []
    order = plan.order - len(plan.segments)
    order = order[order >= 0]  # negative numbers are headers
    for number, stream in enumerate(reach.streams):
        late = order[lazy[order] & (device[order] == number)]
        mine, made = late[can_digest[late]], None
        if digests and len(mine):
            made = stream.digest(source[mine], plan.length[mine], layout[mine], reach.layouts)
        digested.append(made)
        sampled = late if made is None else late[~can_digest[late]]
        whole = np.flatnonzero(small & (device == number))
        counts = _line_counts(plan.length[sampled])
        rows = np.concatenate([np.repeat(sampled, counts), whole])
        begin = np.zeros(len(rows), np.uint64)
        begin[: len(rows) - len(whole)] = line_begins(plan.length[sampled], seeds[sampled])
        length = plan.length[rows].copy()
        length[: len(rows) - len(whole)] = LINE_BYTES  # a line of each lazy piece; all these are longer than a line
        gathered = _gather(reach, stream, rows, begin, length)
        sampled_bytes = int(counts.sum()) * LINE_BYTES
        lengths = _rounded(plan.length[whole])
        address[whole] = gathered.ctypes.data + sampled_bytes + np.cumsum(lengths) - lengths
        samples.append(gathered[:sampled_bytes])
    return replace(
        reach, address=address, layout=np.where(small, -1, layout), samples=tuple(samples), digested=tuple(digested),
        whole=small,
    )


def sample(
    reach: DeviceAccess, stream: SideStream, rows: NDArray[np.int64], length: NDArray[np.uint64],
    seeds: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    """A few cache lines of each chunk of these pieces, in order. A piece shorter than a line is padded with zeros.

    rows           numbers of the pieces in `reach`
    length, seeds  for each of these pieces, its length in bytes, and a seed that selects the lines
    """
    counts = _line_counts(length)
    shorter = np.repeat(np.minimum(length, np.uint64(LINE_BYTES)), counts)
    begin = line_begins(length.astype(np.uint64, copy=False), seeds)
    return _gather(reach, stream, np.repeat(rows, counts), begin, shorter)


def gather_whole(
    reach: DeviceAccess, stream: SideStream, rows: NDArray[np.int64], length: NDArray[np.uint64]
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """All bytes of the pieces with the numbers `rows` in `reach`, and the position at which each piece begins.
    `length`: the length of each of these pieces, in bytes.
    """
    rounded = _rounded(length)
    gathered = _gather(reach, stream, rows, np.zeros(len(rows), np.uint64), length)
    return gathered, np.cumsum(rounded) - rounded


def reserve(
    native: Device, length: NDArray[np.uint64], is_strided: NDArray[np.bool_], *, digests: bool, times: int
) -> None:
    """Allocate the memory that a device needs to gather from pieces of these lengths at the start of a save.

    is_strided  for each piece, whether it is not contiguous
    times       how many gather operations may run at the same time
    """
    strided = 0
    if is_strided.any() and native.packs:
        strided, _ = gathered_needs(length[is_strided])
    runs, size = gathered_needs(length)
    size_bytes = length.astype(np.int64)  # small pieces are included, as replicas of any length may be digested
    rest = size_bytes % CHUNK_BYTES
    counts = -(-size_bytes // CHUNK_BYTES)
    short = int(((rest > 0) & (rest <= DIGESTED_BY_HOST_MAX)).sum())
    native.reserve_launches(
        runs=runs, strided=strided, bytes=size, chunks=int(counts.sum()) * digests,
        strided_chunks=int(counts[is_strided].sum()) * digests, short_chunks=short * digests, times=times,
    )


def gathered_needs(length: NDArray[np.uint64]) -> tuple[int, int]:
    """Upper bounds of what a save of pieces of these lengths gathers: the number of runs (ranges of adjacent bytes),
    and the number of bytes.
    """
    small = length < PACKED_BELOW_BYTES
    lines = int(_line_counts(length[~small]).sum())
    whole = min(int(_rounded(length[small]).sum()), GATHERED_BYTES_MAX)
    return lines + int(small.sum()), lines * LINE_BYTES + whole


def _gather(
    reach: DeviceAccess, stream: SideStream, rows: NDArray[np.int64], begin: NDArray[np.uint64],
    length: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    """Gather bytes of each of the pieces with the numbers `rows` in `reach`: `length` bytes from `begin` on."""
    if not len(rows):
        return np.zeros(0, np.uint8)
    return stream.gather(
        address=reach.address[rows], begin=begin, length=length.astype(np.uint32), layout=reach.layout[rows],
        layouts=reach.layouts,
    )


def _line_counts(length: NDArray[np.uint64]) -> NDArray[np.int64]:
    return -(-length.astype(np.int64) // CHUNK_BYTES) * LINES_PER_CHUNK


def _rounded(length: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (length + (_ALIGNMENT - np.uint64(1))) // _ALIGNMENT * _ALIGNMENT
