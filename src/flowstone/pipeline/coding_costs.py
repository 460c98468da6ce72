"""What a save took, and what the next one would take if it encoded pieces (`EngineOptions.compress`, "auto").

A save takes as long as the slowest of what goes on at once: the device that takes its bytes, and the engine's threads,
which copy, digest and encode beside training. All rates are those of the last saves, so that a device that others use,
or processors that training uses, count as they are.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.plan.write import WritePlan
from flowstone.store.base import Receipt
from flowstone.table.chunks import Chunks

_TRIAL_CHUNKS = 8


class Costs(msgspec.Struct, frozen=True):
    """What a save took.

    data_bytes    that it would write if it encoded nothing: neither the base has them, nor do they follow from others
    device_bytes  that it wrote
    device_s      for which requests of it were under way, or its files were synced
    copying_s     of all threads together, to copy and digest everything
    threads       how many there are
    engine_s      from the first capture until the last request ended, and for which files were synced
    """

    data_bytes: int
    device_bytes: int
    device_s: float
    copying_s: float
    threads: int
    engine_s: float = 0.0

    @property
    def busy(self) -> float:
        """The part of the time for which the engine's threads copied; where others use the processors, most of it."""
        return self.copying_s / self.threads / self.engine_s if self.engine_s else 0.0

    @property
    def device_s_per_byte(self) -> float:
        return self.device_s / max(self.device_bytes, 1)

    def plain_s(self) -> float:
        """The time of a save that encodes nothing."""
        return max(self.data_bytes * self.device_s_per_byte, self.copying_s / self.threads)

    def gain(
        self, coded_bytes: NDArray[np.float64], saved_bytes: NDArray[np.float64], coder_s_per_byte: float
    ) -> NDArray[np.float64]:
        """The time of a save that encodes so many bytes, and writes so many less, as a part of one that does not."""
        writing = (self.data_bytes - saved_bytes) * self.device_s_per_byte
        coded = np.maximum(writing, (self.copying_s + coded_bytes * coder_s_per_byte) / self.threads)
        plain = self.plain_s()
        return coded / plain if plain else np.ones_like(coded)


def costs_of(plan: WritePlan, receipt: Receipt) -> Costs:
    """What the save with this plan took, from the spans of its engine."""
    begin_s, end_s = receipt.synced or (0.0, 0.0)
    writes, copying_s = [], 0.0
    bounds: list[int] = []  # of what the engine did, in nanoseconds
    for phase, begin, end, _, _ in receipt.spans:
        captures = phase == _native.PHASES.index("capture")
        copying_s += float((end - begin)[captures].sum()) / 1e9
        bounds += [int(begin.min()), int(end.max())] if len(begin) else []
        written = phase == _native.PHASES.index("write")
        writes.append(np.stack([begin[written], end[written]], axis=1))
    encoded = receipt.encoded
    device_bytes = plan.file_bytes if encoded is None else sum(encoded.file_bytes)
    device_s = _covered_s(np.concatenate(writes)) + end_s - begin_s if writes else 0.0
    engine_s = (max(bounds) - min(bounds)) / 1e9 + end_s - begin_s if bounds else 0.0
    return Costs(
        int(new_bytes(plan, receipt).sum()), device_bytes, device_s, copying_s, receipt.io.workers or 1, engine_s
    )


def new_bytes(plan: WritePlan, receipt: Receipt) -> NDArray[np.int64]:
    """For each piece what of it is neither the base's, nor follows from others: it would be written as it is."""
    if receipt.encoded is None:
        return plan.length.astype(np.int64)
    length = Chunks.to_come(plan.segment, plan.length).stored_lengths().astype(np.int64)
    return of_pieces(plan, np.where(receipt.encoded.same | receipt.encoded.derived, 0, length))


def of_pieces(plan: WritePlan, of_chunks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sums over the chunks of each piece."""
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_chunks)])
    first = np.append(plan.chunk.astype(np.int64), plan.chunks)
    found: NDArray[np.int64] = sums[first[1:]] - sums[first[:-1]]
    return found


def encoding_s(receipt: Receipt) -> float:
    found = [(end - begin)[phase == _native.PHASES.index("encode")].sum() for phase, begin, end, _, _ in receipt.spans]
    return float(sum(found)) / 1e9


def _covered_s(spans: NDArray[np.int64]) -> float:
    """Seconds in which at least one of the spans (begin, end), in nanoseconds, is under way."""
    if not len(spans):
        return 0.0
    ordered = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(ordered[:, 1])
    gaps = np.maximum(ordered[1:, 0] - ends[:-1], 0)
    return float(ends[-1] - ordered[0, 0] - gaps.sum()) / 1e9


def trial_per_copy() -> float:
    """How many times as long it takes to encode floats as to copy and digest them, by a few chunks. Milliseconds."""
    values = np.random.default_rng(0).standard_normal(_TRIAL_CHUNKS * _native.CHUNK_BYTES // 4, np.float32)
    chunks = values.view(np.uint8).reshape(_TRIAL_CHUNKS, -1)
    into = np.zeros_like(chunks)
    copying, coding = [], []
    for chunk, room in zip(chunks, into, strict=True):
        begin = time.monotonic()
        np.copyto(room, chunk)
        _native.xxh3_64(room)
        copied = time.monotonic()
        _native.encode_planes(room, 4)
        copying.append(copied - begin)
        coding.append(time.monotonic() - copied)
    return min(coding) / min(copying)
