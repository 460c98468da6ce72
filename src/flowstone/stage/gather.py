"""What a device gathers when a save begins: samples of what is captured lazily, and small pieces whole.

One kernel for each device, on the current stream, writes all of it into pinned host memory (native/gather_kernel.h):
no call for each piece, no memory of the device's, no wait. The engine reads that memory once its own stream comes
there. In the place of samples, a second kernel makes digests of all their chunks (native/digest_kernel.h).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES, GATHERED_BYTES_MAX, PACKED_BELOW_BYTES
from flowstone.plan.write import WritePlan
from flowstone.stage.device import SideStream

_ALIGNMENT = np.uint64(_native.GATHERED_ALIGNMENT_BYTES)


class Gathered(msgspec.Struct, frozen=True, eq=False):
    """Memory that devices fill behind the work in their current streams: keep it alive until all is captured.

    samples  for each device, lines of its lazy pieces, in the order of the plan's rows; none, if there are digests
    digested  for each device, digests of its lazy pieces' chunks, in that order, or None
    whole    for each piece, whether it is gathered whole
    address  of each piece: where it is gathered, or as before
    """

    samples: tuple[NDArray[np.uint8], ...]
    digested: tuple[_native.Digested | None, ...]
    whole: NDArray[np.bool_]
    address: NDArray[np.uint64]


def gather_for(
    plan: WritePlan, streams: Sequence[SideStream], device: NDArray[np.int32], address: NDArray[np.uint64],
    seeds: NDArray[np.uint64], *, digests: bool,
) -> Gathered:
    """Have each device gather what a save of `plan` needs. Columns, one row for each piece; `device`: into `streams`.

    digests  of all lazy bytes, where a device can make them, in the place of samples

    raises  StateError, StorageError  as `SideStream.wait_current`
    """
    if not streams:
        return Gathered((), (), np.zeros(len(address), np.bool_), address)
    small = (device >= 0) & ~plan.lazy & (plan.length < PACKED_BELOW_BYTES)
    small &= np.cumsum(np.where(small, _rounded(plan.length), np.uint64(0))) <= GATHERED_BYTES_MAX
    address, samples, digested = address.copy(), [], []
    order = plan.order - len(plan.segments)
    order = order[order >= 0]  # the others are headers
    for at, stream in enumerate(streams):
        lazy = order[plan.lazy[order] & (device[order] == at)]
        made = stream.digest(address[lazy], plan.length[lazy]) if digests and len(lazy) else None
        digested.append(made)
        lazy = lazy[:0] if made is not None else lazy
        lines, whole = lines_of(address[lazy], plan.length[lazy], seeds[lazy]), np.flatnonzero(small & (device == at))
        sampled_bytes = len(lines) * _native.LINE_BYTES
        line_lengths = np.full(len(lines), _native.LINE_BYTES, np.uint64)  # lazy pieces are longer
        runs = np.concatenate([lines, address[whole]])
        found = _gather(stream, runs, np.concatenate([line_lengths, plan.length[whole]]))
        room = _rounded(plan.length[whole])
        address[whole] = found.ctypes.data + sampled_bytes + np.cumsum(room) - room
        samples.append(found[:sampled_bytes])
    return Gathered(tuple(samples), tuple(digested), small, address)


def sample(
    stream: SideStream, address: NDArray[np.uint64], length: NDArray[np.uint64], seeds: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    """A few lines of each chunk of these pieces, in order; of one shorter than a line with zeros behind it."""
    shorter = np.repeat(np.minimum(length, np.uint64(_native.LINE_BYTES)), _line_counts(length))
    return _gather(stream, lines_of(address, length, seeds), shorter)


def lines_of(
    address: NDArray[np.uint64], length: NDArray[np.uint64], seeds: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Where the sampled lines of pieces begin in memory."""
    counts = _line_counts(length)
    return np.repeat(address, counts) + _native.line_begins(length.astype(np.uint64, copy=False), seeds)


def reserve(native: _native.Device, length: NDArray[np.uint64], *, digests: bool, times: int) -> None:
    """Have a device's memory for what it gathers of pieces of these lengths, at the begin of a save, ready.

    times  how many saves there may be at a time
    """
    runs, size = gathered_needs(length)
    rest = length.astype(np.int64) % CHUNK_BYTES
    chunks = int((-(-length.astype(np.int64) // CHUNK_BYTES)).sum())  # of small ones, too: replicas may be digested
    short = int(((rest > 0) & (rest <= _native.DIGESTED_BY_HOST_MAX)).sum())
    native.reserve_launches(
        runs=runs, bytes=size, chunks=chunks * digests, short_chunks=short * digests, times=times
    )


def gathered_needs(length: NDArray[np.uint64]) -> tuple[int, int]:
    """For how many runs, and bytes, a save of pieces of these lengths needs memory at most."""
    small = length < PACKED_BELOW_BYTES
    lines = int(_line_counts(length[~small]).sum())
    whole = min(int(_rounded(length[small]).sum()), GATHERED_BYTES_MAX)
    return lines + int(small.sum()), lines * _native.LINE_BYTES + whole


def _gather(stream: SideStream, address: NDArray[np.uint64], length: NDArray[np.uint64]) -> NDArray[np.uint8]:
    return stream.gather(address, length.astype(np.uint32)) if len(address) else np.zeros(0, np.uint8)


def _line_counts(length: NDArray[np.uint64]) -> NDArray[np.int64]:
    return -(-length.astype(np.int64) // CHUNK_BYTES) * _native.LINES_PER_CHUNK


def _rounded(length: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (length + (_ALIGNMENT - np.uint64(1))) // _ALIGNMENT * _ALIGNMENT
