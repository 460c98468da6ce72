"""Whether a save encodes what it writes: `EngineOptions.compress`.

With "auto" that follows from what the saves before took. A save takes as long as the slowest of what goes on at once:
the device that takes its bytes, and the engine's threads, which copy, digest and encode beside training. Encoding pays
where the device is the slowest by so much that it still is when it gets fewer bytes. All rates are those of the last
saves, so that a device that others use, or processors that training uses, count as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import Compress
from flowstone.events import Compressed
from flowstone.format.codec import QUANTIZED_ELEMENTS
from flowstone.pipeline.deriving import Deriving
from flowstone.pipeline.messages import Assignment
from flowstone.plan.write import Coded, Derived, WritePlan
from flowstone.quantize import Quantize
from flowstone.store.base import Receipt
from flowstone.table.chunks import Chunks
from flowstone.table.dtype import DType
from flowstone.table.pieces import Pieces, Places

_BEGINS_BELOW, _ENDS_ABOVE = 0.9, 0.97  # of the time without: what encoding has to gain, and what it may lose of that
_WORTH_BELOW = 0.97  # of a piece's bytes: what of it is stored, for it to be encoded again
_FIRST_SHARES = {2: 0.7, 4: 0.85, 8: 0.93}  # of floats, by their bytes, until they have been encoded (measured: AdamW)
_TRIAL_CHUNKS = 4


class Costs(msgspec.Struct, frozen=True):
    """What a save took.

    data_bytes    that it captured
    device_s      for which requests of it were under way, or its files were synced
    copying_s     of all threads together, to copy and digest
    threads       how many there are
    """

    data_bytes: int
    device_bytes: int
    device_s: float
    copying_s: float
    threads: int

    def gain(self, coded_bytes: int, saved_bytes: int, coder_s_per_byte: float) -> float:
        """The time of a save that encodes so many bytes, and writes so many less, as a part of one that does not."""
        per_byte = self.device_s / max(self.device_bytes, 1)
        copying = self.copying_s / self.threads
        plain = max(self.data_bytes * per_byte, copying)
        coded = max((self.data_bytes - saved_bytes) * per_byte, copying + coded_bytes * coder_s_per_byte / self.threads)
        return coded / plain if plain else 1.0


def costs_of(plan: WritePlan, receipt: Receipt) -> Costs:
    """What the save with this plan took, from the spans of its engine."""
    begin_s, end_s = receipt.synced or (0.0, 0.0)
    writes, copying_s = [], 0.0
    for phase, begin, end, _, _ in receipt.spans:
        captures = phase == _native.PHASES.index("capture")
        copying_s += float((end - begin)[captures].sum()) / 1e9
        written = phase == _native.PHASES.index("write")
        writes.append(np.stack([begin[written], end[written]], axis=1))
    encoded = receipt.encoded
    device_bytes = plan.file_bytes if encoded is None else sum(encoded.file_bytes)
    device_s = _covered_s(np.concatenate(writes)) + end_s - begin_s if writes else 0.0
    return Costs(plan.bytes, device_bytes, device_s, copying_s, receipt.io.workers or 1)


def _covered_s(spans: NDArray[np.int64]) -> float:
    """Seconds in which at least one of the spans (begin, end), in nanoseconds, is under way."""
    if not len(spans):
        return 0.0
    ordered = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(ordered[:, 1])
    gaps = np.maximum(ordered[1:, 0] - ends[:-1], 0)
    return float(ends[-1] - ordered[0, 0] - gaps.sum()) / 1e9


def compressed(step: int, plan: WritePlan, receipt: Receipt) -> Compressed | None:
    """The event of a save that has encoded some of its pieces."""
    encoded, coded = receipt.encoded, plan.coded
    if encoded is None or not coded.any():
        return None
    new = plan.of_chunks(coded) & ~encoded.same
    length = Chunks.to_come(plan.segment, plan.length).stored_lengths()
    return Compressed(step, int(length[new].sum()), int(encoded.length[new].sum()), _encoding_s(receipt))


def _encoding_s(receipt: Receipt) -> float:
    found = [(end - begin)[phase == _native.PHASES.index("encode")].sum() for phase, begin, end, _, _ in receipt.spans]
    return float(sum(found)) / 1e9


class _Keeping:
    """Holds what chunks were, of the newest plan only. A save under way by an older plan keeps nothing more."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._newest: tuple[Pieces, _native.KeptChunks] | None = None

    def of(self, plan: WritePlan) -> _native.KeptChunks | None:
        """For chunks of these pieces; None if nothing is kept."""
        if not self._budget_bytes:
            return None
        newest = self._newest
        if newest is None or not (newest[0] is plan.pieces or newest[0] == plan.pieces):
            if newest is not None:
                newest[1].let_go()  # not only its own save's plan refers to it, and both would not fit
            self._newest = newest = plan.pieces, _native.KeptChunks(plan.chunks, budget_bytes=self._budget_bytes)
        return newest[1]


class Coding:
    """Chooses the pieces that the next save of a rank encodes. `learn` and `chosen` may be called by any thread.

    mode        whether those are encoded that are not quantized
    quantize    which are quantized
    kept_bytes  of host memory for what chunks were, so that later saves encode what has changed of them
    """

    def __init__(self, mode: Compress, quantize: Sequence[Quantize] = (), kept_bytes: int = 0) -> None:
        self._mode, self._quantize, self._keeping = mode, quantize, _Keeping(kept_bytes)
        self._deriving, self._looks = Deriving(), True
        self._is_on = False
        self._coder_s_per_byte = 0.0
        self._found: tuple[Pieces, NDArray[np.float64]] | None = None  # the stored share of each piece, once encoded

    def from_afar(self) -> Coding:
        """The same, for a plan that is made while the state may change: it looks at no memory. Both keep one budget."""
        found = copy(self)
        found._looks = False
        return found

    def derived(self, pieces: Pieces, assignment: Assignment, places: Places) -> Derived | None:
        """Which of the pieces need not be stored. `places`: the memory of what this rank holds."""
        if self._mode == "off":
            return None
        return self._deriving.derived(pieces, assignment, places if self._looks else None)

    def coded(self, pieces: Pieces, derived: Derived | None = None) -> Coded:
        """How each of the pieces is encoded."""
        planes, block = self.chosen(pieces), ()
        if self._quantize:
            tensors = pieces.tensors
            pairs = zip(tensors.names, tensors.dtypes, strict=True)
            blocks = np.array([_block(name, dtype, self._quantize) for name, dtype in pairs], np.uint16)
            block = blocks[pieces.tensor].tolist()
        return Coded(() if planes is None else planes.tolist(), block, derived)

    def kept_of(self, plan: WritePlan) -> _native.KeptChunks | None:
        """What the chunks of these pieces were; None if that is not kept, or none of them is encoded."""
        return self._keeping.of(plan) if plan.width.any() else None

    def chosen(self, pieces: Pieces) -> NDArray[np.bool_] | None:
        """Which of the pieces are encoded by planes, unless they are quantized; None: none is."""
        if self._mode == "max":
            return np.ones(len(pieces), np.bool_)
        if self._mode != "auto" or not self._is_on:
            return None
        found: NDArray[np.bool_] = self._shares(pieces) < _WORTH_BELOW
        return found if found.any() else None

    def _shares(self, pieces: Pieces) -> NDArray[np.float64]:
        """For each piece, what would be stored of it."""
        if self._found is not None and (self._found[0] is pieces or self._found[0] == pieces):
            return self._found[1]
        shares = [_first_share(dtype.name, dtype.number_bytes) for dtype in pieces.tensors.dtypes]
        return np.array(shares, np.float64)[pieces.tensor]

    def learn(self, step: int, plan: WritePlan, receipt: Receipt) -> Compressed | None:
        """Decide about the next save, from one whose segments are durable. What that one has encoded, if anything."""
        self._deriving.learn(plan, receipt)
        if self._mode == "auto" and plan.bytes:
            self._decide(plan, receipt)
        return compressed(step, plan, receipt)

    def _decide(self, plan: WritePlan, receipt: Receipt) -> None:
        costs, shares = costs_of(plan, receipt), self._shares(plan.pieces)
        if receipt.encoded is not None and plan.width.any():
            shares = self._learn_shares(plan, receipt, shares)
        elif not self._coder_s_per_byte:
            self._coder_s_per_byte = trial_s_per_byte()
        worth = plan.slotted & (plan.block == 0) & (shares < _WORTH_BELOW)
        coded_bytes = int(plan.length[worth].sum())
        saved_bytes = int((plan.length * (1 - shares))[worth].sum())
        gain = costs.gain(coded_bytes, saved_bytes, self._coder_s_per_byte)
        self._is_on = gain < (_ENDS_ABOVE if self._is_on else _BEGINS_BELOW)

    def _learn_shares(self, plan: WritePlan, receipt: Receipt, before: NDArray[np.float64]) -> NDArray[np.float64]:
        """The shares of the pieces that were encoded; and at which rate."""
        assert receipt.encoded is not None, "something was encoded"
        coded, encoded = plan.width > 0, receipt.encoded
        chunks = Chunks.to_come(plan.segment, plan.length)
        sums = np.concatenate([np.zeros(1), np.cumsum(np.where(encoded.same, 0, encoded.length))])
        stored = sums[chunks.first[1:]] - sums[chunks.first[:-1]]
        shares = np.where(coded, stored / np.maximum(plan.length, 1), before)
        self._coder_s_per_byte = _encoding_s(receipt) / max(int(plan.length[coded].sum()), 1)
        self._found = plan.pieces, shares
        return shares


def _block(name: str, dtype: DType, rules: Sequence[Quantize]) -> int:
    """The block of the first rule that matches; 0: none does, or the dtype cannot be quantized."""
    return next((rule.block for rule in rules if rule.matches(name)), 0) if dtype.name in QUANTIZED_ELEMENTS else 0


def _first_share(name: str, number_bytes: int) -> float:
    return _FIRST_SHARES.get(number_bytes, 1.0) if name.startswith(("float", "bfloat", "complex")) else 1.0


def trial_s_per_byte() -> float:
    """Seconds that encoding a byte of floats takes on this machine now, by a few chunks. A few milliseconds."""
    values = np.random.default_rng(0).standard_normal(_native.CHUNK_BYTES // 4, np.float32)
    spent = []
    for _ in range(_TRIAL_CHUNKS):
        begin = time.monotonic()
        _native.encode_planes(values.view(np.uint8), 4)
        spent.append(time.monotonic() - begin)
    return min(spent) / values.nbytes
