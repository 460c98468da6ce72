"""Measure the time of a save, and predict the time of the next one with encoding (`EngineOptions.compress`, "auto").

A save takes as long as the slower of two parallel parts: the writes to the device, and the work of the engine's
threads, which copy, compute digests and encode beside training. All rates are measured in the last saves, so they
account for other users of the device, and for training's use of the processors.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import CHUNK_BYTES, PHASES, encode_planes, xxh3_64
from flowstone.plan.write import WritePlan
from flowstone.store.base import Receipt
from flowstone.table.chunks import Chunks

_TRIAL_CHUNKS = 8


class Costs(msgspec.Struct, frozen=True):
    """The costs of a save.

    data_bytes    bytes that the save would write without encoding: bytes that an earlier checkpoint does not have, and
                  that cannot be derived from other tensors
    device_bytes  bytes that the save wrote
    device_s      seconds in which its write requests were in progress, or its files were synced
    copying_s     time that all threads together took to copy and compute digests
    threads       number of threads
    engine_s      time from the first capture until the last request ended, plus the time to sync files
    """

    data_bytes: int
    device_bytes: int
    device_s: float
    copying_s: float
    threads: int
    engine_s: float = 0.0

    @property
    def busy_share(self) -> float:
        """The part of `engine_s` in which a thread copied or computed digests, as a fraction, on average. It is high if
        training uses the processors, since the threads then take longer.
        """
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
        """The expected time of a save that encodes `coded_bytes` and so writes `saved_bytes` less, as a share of the
        time of a save without encoding.
        """
        writing = (self.data_bytes - saved_bytes) * self.device_s_per_byte
        coded = np.maximum(writing, (self.copying_s + coded_bytes * coder_s_per_byte) / self.threads)
        plain = self.plain_s()
        return coded / plain if plain else np.ones_like(coded)


def measure_costs(plan: WritePlan, receipt: Receipt) -> Costs:
    """The costs of the save with this plan, from the spans of its engine."""
    begin_s, end_s = receipt.synced or (0.0, 0.0)
    writes, copying_s = [], 0.0
    bounds: list[int] = []  # begins and ends of the engine's spans, in nanoseconds
    for phase, begin, end, _, _ in receipt.spans:
        captures = phase == PHASES.index("capture")
        copying_s += float((end - begin)[captures].sum()) / 1e9
        bounds += [int(begin.min()), int(end.max())] if len(begin) else []
        written = phase == PHASES.index("write")
        writes.append(np.stack([begin[written], end[written]], axis=1))
    encoded = receipt.encoded
    device_bytes = plan.file_bytes if encoded is None else sum(encoded.file_bytes)
    device_s = _covered_s(np.concatenate(writes)) + end_s - begin_s if writes else 0.0
    engine_s = (max(bounds) - min(bounds)) / 1e9 + end_s - begin_s if bounds else 0.0
    return Costs(
        int(new_bytes(plan, receipt).sum()), device_bytes, device_s, copying_s, receipt.io.workers or 1, engine_s
    )


def new_bytes(plan: WritePlan, receipt: Receipt) -> NDArray[np.int64]:
    """For each piece, how many bytes a save without encoding would write: bytes that an earlier checkpoint does not
    have, and that cannot be derived from other tensors.
    """
    if receipt.encoded is None:
        return plan.length.astype(np.int64)
    length = Chunks.unwritten(plan.segment, plan.length).stored_lengths().astype(np.int64)
    return sum_by_piece(plan, np.where(receipt.encoded.same | receipt.encoded.derived, 0, length))


def sum_by_piece(plan: WritePlan, of_chunks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum the chunks' values for each piece."""
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_chunks)])
    first = np.append(plan.chunk.astype(np.int64), plan.chunks)
    totals: NDArray[np.int64] = sums[first[1:]] - sums[first[:-1]]
    return totals


def encoding_s(receipt: Receipt) -> float:
    sums = [(end - begin)[phase == PHASES.index("encode")].sum() for phase, begin, end, _, _ in receipt.spans]
    return float(sum(sums)) / 1e9


def _covered_s(spans: NDArray[np.int64]) -> float:
    """Seconds covered by at least one of the spans (begin, end), which are in nanoseconds."""
    if not len(spans):
        return 0.0
    ordered = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(ordered[:, 1])
    gaps = np.maximum(ordered[1:, 0] - ends[:-1], 0)
    return float(ends[-1] - ordered[0, 0] - gaps.sum()) / 1e9


def trial_per_copy() -> float:
    """Measure, with a few chunks, the time to encode floats as a multiple of the time to copy them and compute digests.
    Takes milliseconds.
    """
    values = np.random.default_rng(0).standard_normal(_TRIAL_CHUNKS * CHUNK_BYTES // 4, np.float32)
    chunks = values.view(np.uint8).reshape(_TRIAL_CHUNKS, -1)
    into = np.zeros_like(chunks)
    copying, coding = [], []
    for chunk, buffer in zip(chunks, into, strict=True):
        begin = time.monotonic()
        np.copyto(buffer, chunk)
        xxh3_64(buffer)
        copied = time.monotonic()
        encode_planes(buffer, 4)
        copying.append(copied - begin)
        coding.append(time.monotonic() - copied)
    return min(coding) / min(copying)
