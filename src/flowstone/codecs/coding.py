"""Choose the pieces (a rank's parts of tensors) that a save encodes: `EngineOptions.compress`.

With "auto", the choice for each piece depends on the measured costs of previous saves (coding_costs.py). Encoding pays
if the device is the bottleneck, and remains so with fewer bytes. Then the pieces with the best compression are encoded,
as many as make the save fastest; none if the gain is too small. So a save does not take longer than a raw save. Pieces
that can be derived from others are omitted (deriving.py) if the engine's threads have time to check them. They have no
time if training uses the processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.codecs.coding_costs import Costs, encoding_s, measure_costs, new_bytes, sum_by_piece, trial_per_copy
from flowstone.codecs.deriving import DerivationFinder
from flowstone.codecs.quantize import Quantize
from flowstone.config import Compress
from flowstone.coordination.messages import Assignment
from flowstone.events.rare_events import Compressed
from flowstone.format.codec import CODECS, QUANTIZED_ELEMENTS
from flowstone.plan.write import Derivations, PieceEncoding, WritePlan
from flowstone.store.base import Receipt
from flowstone.table.chunks import Chunks, distinct
from flowstone.table.dtype import DType
from flowstone.table.pieces import Pieces, Places

# Encoding begins if the save's expected time is below the first share of the time without encoding; it ends above the
# second share.
_BEGINS_BELOW, _ENDS_ABOVE = 0.9, 0.97
_WORTH_BELOW = 0.97  # a piece is worth encoding if its encoded length is at most this share of its length
# Bytes per float -> assumed share of its bytes after encoding, until it is measured (values from training with AdamW)
_FIRST_SHARES = {2: 0.7, 4: 0.85, 8: 0.93}
_BETTER_BY = 0.03  # another choice of pieces must save at least this share of the time of a save without encoding
# If the engine's threads copy during more than the first share of a save's time, derived pieces are stored. Below the
# second share, they are omitted again. Measured shares: 0.25 to 0.5 with free processors, 0.5 to 0.85 beside training
# on all processors.
_BUSY_ABOVE, _FREE_BELOW = 0.6, 0.5
_BUSY_SAVES = 2  # the decision changes only after so many such saves in a row, as a change needs a new plan


def compressed_event(step: int, plan: WritePlan, receipt: Receipt, why: str) -> Compressed:
    """The event of a save with `compress`, whether it encoded pieces or not."""
    encoded, coded = receipt.encoded, plan.is_encoded
    if encoded is None or not coded.any():
        return Compressed(step, 0, 0, 0.0, why)
    new = plan.per_chunk(coded) & ~encoded.same
    length, codec = Chunks.unwritten(plan.segment, plan.length).stored_lengths()[new], encoded.codec[new]
    stored = encoded.length[new]
    by_codec = {
        CODECS[codec_id].name: (int(length[codec == codec_id].sum()), int(stored[codec == codec_id].sum()))
        for codec_id in distinct(codec).tolist()
    }
    return Compressed(step, int(length.sum()), int(stored.sum()), encoding_s(receipt), why, by_codec)


class _RetainedChunks:
    """Keeps the previous bytes of chunks, for the newest plan only. A running save with an older plan adds no bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._newest: tuple[Pieces, _native.BaseCache] | None = None

    def of(self, plan: WritePlan) -> _native.BaseCache | None:
        """The retained chunks of this plan's pieces; None if no memory is given for them."""
        if not self._budget_bytes:
            return None
        newest = self._newest
        if newest is None or not (newest[0] is plan.pieces or newest[0] == plan.pieces):
            if newest is not None:
                newest[1].release()  # older plans may still refer to this memory; old and new would exceed the budget
            self._newest = newest = plan.pieces, _native.BaseCache(plan.chunks, budget_bytes=self._budget_bytes)
        return newest[1]


class EncodingChooser:
    """Chooses the pieces that the next save of a rank encodes.

    Any thread may call `learn_from_save` and `chosen_pieces`.

    mode        `EngineOptions.compress`, for pieces that are not quantized
    quantize    rules for the pieces to quantize
    kept_bytes  host memory for the previous bytes of chunks, so that later saves encode only the differences
    """

    def __init__(self, mode: Compress, quantize: Sequence[Quantize] = (), kept_bytes: int = 0) -> None:
        self._mode, self._quantize, self._retained = mode, quantize, _RetainedChunks(kept_bytes)
        self._deriving, self._reads_memory = DerivationFinder(), True
        # With "auto": whether derived pieces are omitted, and how many saves in a row have spoken against that
        self._derives, self._against = True, 0
        # The pieces of the layout, and whether "auto" encodes each of them; None: it encodes no piece
        self._chosen: tuple[Pieces, NDArray[np.bool_]] | None = None
        self._why = "no save has been measured yet"
        self._coder_per_copy = 0.0  # time of encoding as a multiple of copying; 0: not known yet
        self._learned: tuple[Pieces, NDArray[np.float64]] | None = None  # for each piece, stored bytes per byte of data

    def without_memory_access(self) -> EncodingChooser:
        """A copy that makes the same choices without reading the state's memory, for a plan that is made while the
        state may change. The copy and the original share one memory budget.
        """
        twin = copy(self)
        twin._reads_memory = False
        return twin

    @property
    def why(self) -> str:
        """The reason for the next save's choice, as text."""
        return f"auto: {self._why}" if self._mode == "auto" else self._mode

    def derivations_of(self, pieces: Pieces, assignment: Assignment, places: Places) -> Derivations | None:
        """The pieces that can be computed from others, so that they need not be stored; None: no piece can. `places`:
        the memory of this rank's pieces.
        """
        if self._mode == "off" or not self._derives:
            return None
        return self._deriving.find_for(pieces, assignment, places if self._reads_memory else None)

    def encoding_of(self, pieces: Pieces, derived: Derivations | None = None) -> PieceEncoding:
        """How each of the pieces is encoded."""
        planes, block = self.chosen_pieces(pieces), ()
        if self._quantize:
            tensors = pieces.tensors
            pairs = zip(tensors.names, tensors.dtypes, strict=True)
            blocks = np.array([_block(name, dtype, self._quantize) for name, dtype in pairs], np.uint16)
            block = blocks[pieces.tensor].tolist()
        return PieceEncoding(() if planes is None else planes.tolist(), block, derived)

    def previous_chunks(self, plan: WritePlan) -> _native.BaseCache | None:
        """The previous bytes of the plan's chunks; None if they are not kept, or if no piece is encoded."""
        return self._retained.of(plan) if plan.width.any() else None

    def chosen_pieces(self, pieces: Pieces) -> NDArray[np.bool_] | None:
        """For each piece, whether it is encoded with the codec `planes`, unless it is quantized; None: no piece is."""
        if self._mode == "max":
            return np.ones(len(pieces), np.bool_)
        if self._mode != "auto" or self._chosen is None:
            return None
        chosen = self._chosen_of(pieces, self._shares(pieces))
        return chosen if chosen.any() else None

    def _chosen_of(self, pieces: Pieces, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
        """The last choice of pieces to encode. If the pieces have changed since that choice, all pieces that encoding
        is expected to shorten. `shares`: expected stored bytes per byte of data.
        """
        last = self._chosen
        if last is not None and (last[0] is pieces or last[0] == pieces):
            return last[1]
        chosen: NDArray[np.bool_] = shares < _WORTH_BELOW
        return chosen

    def _shares(self, pieces: Pieces) -> NDArray[np.float64]:
        """For each piece, the expected stored length if it is encoded, as a share of its length."""
        if self._learned is not None and (self._learned[0] is pieces or self._learned[0] == pieces):
            return self._learned[1]
        shares = [_first_share(dtype.name, dtype.number_bytes) for dtype in pieces.tensors.dtypes]
        return np.array(shares, np.float64)[pieces.tensor]

    def learn_from_save(self, step: int, plan: WritePlan, receipt: Receipt, why: str = "") -> Compressed | None:
        """Choose what the next save encodes, from the measured times of a save whose segment files are durable. Returns
        the event about that save, with the text `why`; None if that save was not asked to encode.
        """
        self._deriving.drop_unconfirmed(plan, receipt)
        if self._mode == "auto" and plan.bytes:
            self._decide(plan, receipt)
        return compressed_event(
            step, plan, receipt, why
        ) if self._mode in ("auto", "max") or plan.is_encoded.any() else None

    def _decide(self, plan: WritePlan, receipt: Receipt) -> None:
        costs, shares, new = measure_costs(plan, receipt), self._shares(plan.pieces), new_bytes(plan, receipt)
        self._decide_derived(costs)
        copying_s_per_byte = costs.copying_s / max(plan.bytes, 1)
        if receipt.encoded is not None and plan.width.any():
            shares = self._learn_shares(plan, receipt, shares, new, copying_s_per_byte)
        self._coder_per_copy = self._coder_per_copy or trial_per_copy()
        coder_s_per_byte = self._coder_per_copy * copying_s_per_byte
        candidates = np.flatnonzero(plan.slotted & (plan.block == 0) & (shares < _WORTH_BELOW) & (new > 0))
        candidates = candidates[np.argsort(shares[candidates], kind="stable")]
        sizes, saved_bytes = new[candidates], (new * (1 - shares))[candidates]
        gains = costs.gain(np.cumsum(sizes), np.cumsum(saved_bytes), coder_s_per_byte)
        number = int(np.argmin(gains)) + 1 if len(candidates) else 0
        chosen, gain = np.zeros(len(plan.pieces), np.bool_), float(gains[number - 1]) if number else 1.0
        chosen[candidates[:number]] = True
        was_on = self._chosen is not None
        if was_on:  # keep the last choice unless it is clearly worse: another choice needs a new plan
            again = self._chosen_of(plan.pieces, shares)[candidates]
            sums = sizes[again].sum(keepdims=True), saved_bytes[again].sum(keepdims=True)
            (unchanged_gain,) = costs.gain(*sums, coder_s_per_byte)
            if unchanged_gain < gain + _BETTER_BY:
                chosen[candidates], gain = again, float(unchanged_gain)
        is_on = bool(chosen.any()) and gain < (_ENDS_ABOVE if was_on else _BEGINS_BELOW)
        self._chosen = (plan.pieces, chosen) if is_on else None
        count = int(chosen.sum()) if is_on else 0
        self._why = _reason(costs, copying_s_per_byte, coder_s_per_byte, gain, count, len(candidates))
        if not self._derives:
            busy = f"{costs.busy_share:.0%} of the time"
            self._why += f"; derived tensors are stored in full, since the engine's threads copy {busy}"

    def _decide_derived(self, costs: Costs) -> None:
        is_against = costs.busy_share > _BUSY_ABOVE if self._derives else costs.busy_share < _FREE_BELOW
        self._against = self._against + 1 if is_against else 0
        if self._against == _BUSY_SAVES:
            self._derives, self._against = not self._derives, 0

    def _learn_shares(
        self, plan: WritePlan, receipt: Receipt, before: NDArray[np.float64], new: NDArray[np.int64],
        copying_s_per_byte: float,
    ) -> NDArray[np.float64]:
        """Learn from a save how much encoding shortens each encoded piece, and how long encoding takes.
        Returns for each piece its stored bytes per byte of data.
        """
        assert receipt.encoded is not None, "something was encoded"
        encoded = receipt.encoded
        stored = sum_by_piece(plan, np.where(encoded.same | encoded.derived, 0, encoded.length).astype(np.int64))
        coded = (plan.width > 0) & (new > 0)
        shares = np.where(coded, stored / np.maximum(new, 1), before)
        if coded.any() and copying_s_per_byte:
            self._coder_per_copy = encoding_s(receipt) / int(new[coded].sum()) / copying_s_per_byte
        self._learned = plan.pieces, shares
        return shares


def _reason(
    costs: Costs, copying_s_per_byte: float, coder_s_per_byte: float, gain: float, chosen: int, worth: int
) -> str:
    """The reason as text. `chosen`: number of encoded pieces; `worth`: number of pieces that encoding shortens."""
    if not worth:
        return "no tensor of the last save can be compressed"
    copy, encode = (_rate(seconds / costs.threads) for seconds in (copying_s_per_byte, coder_s_per_byte))
    rates = f"the device takes {_rate(costs.device_s_per_byte)}, the engine's threads copy {copy} and encode {encode}"
    if chosen:
        return (
            f"{rates}: with {chosen:,} of {worth:,} tensors encoded, a save takes {gain:.0%} of the time without "
            "encoding"
        )
    return f"{rates}: with tensors encoded, a save would take {gain:.0%} of the time without encoding"


def _rate(s_per_byte: float) -> str:
    return f"{1e-9 / s_per_byte:.1f} GB/s" if s_per_byte else "no time"


def _block(name: str, dtype: DType, rules: Sequence[Quantize]) -> int:
    """How many elements of the tensor share a scale, by the first rule that matches its name; 0: no rule matches, or
    tensors of this dtype cannot be quantized.
    """
    return next((rule.block for rule in rules if rule.matches(name)), 0) if dtype.name in QUANTIZED_ELEMENTS else 0


def _first_share(name: str, number_bytes: int) -> float:
    return _FIRST_SHARES.get(number_bytes, 1.0) if name.startswith(("float", "bfloat", "complex")) else 1.0
