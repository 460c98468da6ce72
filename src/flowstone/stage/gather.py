"""What a device gathers when a save begins: samples of what is captured lazily, and small pieces whole.

One kernel for each device, on the current stream, writes all of it into pinned host memory (native/gather_kernel.h):
no call for each piece, no memory of the device's, no wait. Another one does so for strided memory
(native/pack_kernel.h). The engine reads what is gathered once its own stream comes there. In the place of samples, a
further kernel makes digests of all their chunks (native/digest_kernel.h). Imported once a device is in use.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES, GATHERED_BYTES_MAX, PACKED_BELOW_BYTES
from flowstone.plan.write import WritePlan
from flowstone.stage.device import Reach, SideStream

_ALIGNMENT = np.uint64(_native.GATHERED_ALIGNMENT_BYTES)


def gather_for(
    plan: WritePlan, reach: Reach, lazy: NDArray[np.bool_], seeds: NDArray[np.uint64], *, digests: bool
) -> Reach:
    """Have each device gather what a save of `plan` needs: how the pieces are read then. Columns, one row for each.

    lazy     which are captured after `save` has returned
    digests  of all lazy bytes, where a device can make them, in the place of samples

    raises  StateError, StorageError  as `SideStream.wait_current`
    """
    source, layout, device = reach.address, reach.layout, reach.device
    can_digest = reach.are_digested()
    small = (device >= 0) & ~lazy & (plan.length < PACKED_BELOW_BYTES) & can_digest  # for others a table would be long
    small &= np.cumsum(np.where(small, _rounded(plan.length), np.uint64(0))) <= GATHERED_BYTES_MAX
    address, samples, digested = source.copy(), [], []
    order = plan.order - len(plan.segments)
    order = order[order >= 0]  # the others are headers
    for at, stream in enumerate(reach.streams):
        late = order[lazy[order] & (device[order] == at)]
        mine, made = late[can_digest[late]], None
        if digests and len(mine):
            made = stream.digest(source[mine], plan.length[mine], layout[mine], reach.layouts)
        digested.append(made)
        sampled = late if made is None else late[~can_digest[late]]
        whole = np.flatnonzero(small & (device == at))
        counts = _line_counts(plan.length[sampled])
        rows = np.concatenate([np.repeat(sampled, counts), whole])
        begin = np.zeros(len(rows), np.uint64)
        begin[: len(rows) - len(whole)] = _native.line_begins(plan.length[sampled], seeds[sampled])
        length = plan.length[rows].copy()
        length[: len(rows) - len(whole)] = _native.LINE_BYTES  # lazy pieces are longer
        found = _gather(reach, stream, rows, begin, length)
        sampled_bytes = int(counts.sum()) * _native.LINE_BYTES
        room = _rounded(plan.length[whole])
        address[whole] = found.ctypes.data + sampled_bytes + np.cumsum(room) - room
        samples.append(found[:sampled_bytes])
    return replace(
        reach, address=address, layout=np.where(small, -1, layout), samples=tuple(samples), digested=tuple(digested),
        whole=small,
    )


def sample(
    reach: Reach, stream: SideStream, rows: NDArray[np.int64], length: NDArray[np.uint64], seeds: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    """A few lines of each chunk of these pieces, in order; of one shorter than a line with zeros behind it.

    rows  of `reach`; `length` and `seeds` are of these alone
    """
    counts = _line_counts(length)
    shorter = np.repeat(np.minimum(length, np.uint64(_native.LINE_BYTES)), counts)
    begin = _native.line_begins(length.astype(np.uint64, copy=False), seeds)
    return _gather(reach, stream, np.repeat(rows, counts), begin, shorter)


def gather_whole(
    reach: Reach, stream: SideStream, rows: NDArray[np.int64], length: NDArray[np.uint64]
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """All bytes of these pieces, and where each begins among them. `rows` of `reach`; `length` is of these alone."""
    room = _rounded(length)
    found = _gather(reach, stream, rows, np.zeros(len(rows), np.uint64), length)
    return found, np.cumsum(room) - room


def reserve(
    native: _native.Device, length: NDArray[np.uint64], is_strided: NDArray[np.bool_], *, digests: bool, times: int
) -> None:
    """Have a device's memory for what it gathers of pieces of these lengths, at the begin of a save, ready.

    is_strided  those which are not one run of bytes
    times       how many saves there may be at a time
    """
    strided = 0
    if is_strided.any() and native.packs:
        strided, _ = gathered_needs(length[is_strided])
    runs, size = gathered_needs(length)
    size_bytes = length.astype(np.int64)  # of small ones, too: replicas may be digested
    rest = size_bytes % CHUNK_BYTES
    counts = -(-size_bytes // CHUNK_BYTES)
    short = int(((rest > 0) & (rest <= _native.DIGESTED_BY_HOST_MAX)).sum())
    native.reserve_launches(
        runs=runs, strided=strided, bytes=size, chunks=int(counts.sum()) * digests,
        strided_chunks=int(counts[is_strided].sum()) * digests, short_chunks=short * digests, times=times,
    )


def gathered_needs(length: NDArray[np.uint64]) -> tuple[int, int]:
    """For how many runs, and bytes, a save of pieces of these lengths needs memory at most."""
    small = length < PACKED_BELOW_BYTES
    lines = int(_line_counts(length[~small]).sum())
    whole = min(int(_rounded(length[small]).sum()), GATHERED_BYTES_MAX)
    return lines + int(small.sum()), lines * _native.LINE_BYTES + whole


def _gather(
    reach: Reach, stream: SideStream, rows: NDArray[np.int64], begin: NDArray[np.uint64], length: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    """So many bytes from `begin` on of each of these rows."""
    if not len(rows):
        return np.zeros(0, np.uint8)
    return stream.gather(
        address=reach.address[rows], begin=begin, length=length.astype(np.uint32), layout=reach.layout[rows],
        layouts=reach.layouts,
    )


def _line_counts(length: NDArray[np.uint64]) -> NDArray[np.int64]:
    return -(-length.astype(np.int64) // CHUNK_BYTES) * _native.LINES_PER_CHUNK


def _rounded(length: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (length + (_ALIGNMENT - np.uint64(1))) // _ALIGNMENT * _ALIGNMENT
