"""Whether a save encodes what it writes: `EngineOptions.compress`.

With "auto" that follows from what the saves before took (coding_costs.py), for each piece. Encoding pays where the
device is the slowest by so much that it still is when it gets fewer bytes: the pieces that get shortest are encoded, as
many of them as make the save as short as it can be, and none if that is hardly shorter. So a save takes no longer than
the pace at which saves come would let a raw one. What follows from others is left out (deriving.py) where the engine's
threads have time to find out: not where training takes it from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import Compress
from flowstone.format.codec import CODECS, QUANTIZED_ELEMENTS
from flowstone.pipeline.coding_costs import Costs, costs_of, encoding_s, new_bytes, of_pieces, trial_per_copy
from flowstone.pipeline.deriving import Deriving
from flowstone.pipeline.messages import Assignment
from flowstone.plan.write import Coded, Derived, WritePlan
from flowstone.quantize import Quantize
from flowstone.save_events import Compressed
from flowstone.store.base import Receipt
from flowstone.table.chunks import Chunks, distinct
from flowstone.table.dtype import DType
from flowstone.table.pieces import Pieces, Places

_BEGINS_BELOW, _ENDS_ABOVE = 0.9, 0.97  # of the time without: what encoding has to gain, and what it may lose of that
_WORTH_BELOW = 0.97  # of a piece's bytes: what of it is stored, for it to be encoded again
_FIRST_SHARES = {2: 0.7, 4: 0.85, 8: 0.93}  # of floats, by their bytes, until they have been encoded (measured: AdamW)
_BETTER_BY = 0.03  # of the time without
# The part of the time for which the engine's threads copy: above, what follows from others is stored as well; below,
# it is left out again. Measured: 0.25 to 0.5 with free processors, 0.5 to 0.85 beside a training on all of them.
_BUSY_ABOVE, _FREE_BELOW = 0.6, 0.5
_BUSY_SAVES = 2  # in a row, to decide otherwise: that makes another plan


def compressed(step: int, plan: WritePlan, receipt: Receipt, why: str) -> Compressed:
    """The event of a save that has, or might have, encoded some of its pieces."""
    encoded, coded = receipt.encoded, plan.coded
    if encoded is None or not coded.any():
        return Compressed(step, 0, 0, 0.0, why)
    new = plan.of_chunks(coded) & ~encoded.same
    length, codec = Chunks.to_come(plan.segment, plan.length).stored_lengths()[new], encoded.codec[new]
    stored = encoded.length[new]
    by_codec = {
        CODECS[one].name: (int(length[codec == one].sum()), int(stored[codec == one].sum()))
        for one in distinct(codec).tolist()
    }
    return Compressed(step, int(length.sum()), int(stored.sum()), encoding_s(receipt), why, by_codec)


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
        self._derives, self._against = True, 0  # with "auto"; and how many saves in a row speak against that
        self._chosen: tuple[Pieces, NDArray[np.bool_]] | None = None  # by "auto"; None: nothing
        self._why = "no save has been measured yet"
        self._coder_per_copy = 0.0  # how many times as long as copying encoding takes; 0: not known yet
        self._found: tuple[Pieces, NDArray[np.float64]] | None = None  # the stored share of each piece, once encoded

    def from_afar(self) -> Coding:
        """The same, for a plan that is made while the state may change: it looks at no memory. Both keep one budget."""
        found = copy(self)
        found._looks = False
        return found

    @property
    def why(self) -> str:
        """Why the next save encodes what it does, for people."""
        return f"auto: {self._why}" if self._mode == "auto" else self._mode

    def derived(self, pieces: Pieces, assignment: Assignment, places: Places) -> Derived | None:
        """Which of the pieces need not be stored. `places`: the memory of what this rank holds."""
        if self._mode == "off" or not self._derives:
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
        if self._mode != "auto" or self._chosen is None:
            return None
        found = self._chosen_of(pieces, self._shares(pieces))
        return found if found.any() else None

    def _chosen_of(self, pieces: Pieces, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
        """What was chosen; of other pieces than those of the last save, all that get shorter."""
        known = self._chosen
        if known is not None and (known[0] is pieces or known[0] == pieces):
            return known[1]
        found: NDArray[np.bool_] = shares < _WORTH_BELOW
        return found

    def _shares(self, pieces: Pieces) -> NDArray[np.float64]:
        """For each piece, what would be stored of it."""
        if self._found is not None and (self._found[0] is pieces or self._found[0] == pieces):
            return self._found[1]
        shares = [_first_share(dtype.name, dtype.number_bytes) for dtype in pieces.tensors.dtypes]
        return np.array(shares, np.float64)[pieces.tensor]

    def learn(self, step: int, plan: WritePlan, receipt: Receipt, why: str = "") -> Compressed | None:
        """Decide about the next save, from one whose segments are durable. What that one has encoded, and `why`; None
        if it was not asked to encode anything.
        """
        self._deriving.learn(plan, receipt)
        if self._mode == "auto" and plan.bytes:
            self._decide(plan, receipt)
        return compressed(step, plan, receipt, why) if self._mode in ("auto", "max") or plan.coded.any() else None

    def _decide(self, plan: WritePlan, receipt: Receipt) -> None:
        costs, shares, new = costs_of(plan, receipt), self._shares(plan.pieces), new_bytes(plan, receipt)
        self._decide_derived(costs)
        copying_s_per_byte = costs.copying_s / max(plan.bytes, 1)
        if receipt.encoded is not None and plan.width.any():
            shares = self._learn_shares(plan, receipt, shares, new, copying_s_per_byte)
        self._coder_per_copy = self._coder_per_copy or trial_per_copy()
        coder_s_per_byte = self._coder_per_copy * copying_s_per_byte
        worth = np.flatnonzero(plan.slotted & (plan.block == 0) & (shares < _WORTH_BELOW) & (new > 0))
        worth = worth[np.argsort(shares[worth], kind="stable")]
        sizes, saved = new[worth], (new * (1 - shares))[worth]
        gains = costs.gain(np.cumsum(sizes), np.cumsum(saved), coder_s_per_byte)
        number = int(np.argmin(gains)) + 1 if len(worth) else 0
        chosen, gain = np.zeros(len(plan.pieces), np.bool_), float(gains[number - 1]) if number else 1.0
        chosen[worth[:number]] = True
        was_on = self._chosen is not None
        if was_on:  # as it was, unless that is clearly worse: another choice is another plan
            again = self._chosen_of(plan.pieces, shares)[worth]
            (kept,) = costs.gain(sizes[again].sum(keepdims=True), saved[again].sum(keepdims=True), coder_s_per_byte)
            if kept < gain + _BETTER_BY:
                chosen[worth], gain = again, float(kept)
        is_on = bool(chosen.any()) and gain < (_ENDS_ABOVE if was_on else _BEGINS_BELOW)
        self._chosen = (plan.pieces, chosen) if is_on else None
        count = int(chosen.sum()) if is_on else 0
        self._why = _reason(costs, copying_s_per_byte, coder_s_per_byte, gain, count, len(worth))
        if not self._derives:
            busy = f"{costs.busy:.0%} of the time"
            self._why += f"; what follows from others is stored, since the engine's threads copy {busy}"

    def _decide_derived(self, costs: Costs) -> None:
        is_against = costs.busy > _BUSY_ABOVE if self._derives else costs.busy < _FREE_BELOW
        self._against = self._against + 1 if is_against else 0
        if self._against == _BUSY_SAVES:
            self._derives, self._against = not self._derives, 0

    def _learn_shares(
        self, plan: WritePlan, receipt: Receipt, before: NDArray[np.float64], new: NDArray[np.int64],
        copying_s_per_byte: float,
    ) -> NDArray[np.float64]:
        """The shares of the pieces that were encoded; and what that took."""
        assert receipt.encoded is not None, "something was encoded"
        encoded = receipt.encoded
        stored = of_pieces(plan, np.where(encoded.same | encoded.derived, 0, encoded.length).astype(np.int64))
        coded = (plan.width > 0) & (new > 0)
        shares = np.where(coded, stored / np.maximum(new, 1), before)
        if coded.any() and copying_s_per_byte:
            self._coder_per_copy = encoding_s(receipt) / int(new[coded].sum()) / copying_s_per_byte
        self._found = plan.pieces, shares
        return shares


def _reason(
    costs: Costs, copying_s_per_byte: float, coder_s_per_byte: float, gain: float, chosen: int, worth: int
) -> str:
    """`chosen`: how many pieces are encoded, of so many that get shorter."""
    if not worth:
        return "no tensor of the last save gets shorter"
    copy, encode = (_rate(seconds / costs.threads) for seconds in (copying_s_per_byte, coder_s_per_byte))
    rates = f"the device takes {_rate(costs.device_s_per_byte)}, the engine's threads copy {copy} and encode {encode}"
    if chosen:
        return f"{rates}: with {chosen:,} of {worth:,} pieces encoded, a save takes {gain:.0%} of the time"
    return f"{rates}: with pieces encoded, a save would take {gain:.0%} of the time at best"


def _rate(s_per_byte: float) -> str:
    return f"{1e-9 / s_per_byte:.1f} GB/s" if s_per_byte else "no time"


def _block(name: str, dtype: DType, rules: Sequence[Quantize]) -> int:
    """The block of the first rule that matches; 0: none does, or the dtype cannot be quantized."""
    return next((rule.block for rule in rules if rule.matches(name)), 0) if dtype.name in QUANTIZED_ELEMENTS else 0


def _first_share(name: str, number_bytes: int) -> float:
    return _FIRST_SHARES.get(number_bytes, 1.0) if name.startswith(("float", "bfloat", "complex")) else 1.0
