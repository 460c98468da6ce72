"""Finds pieces that need not be stored, since they follow from others: copies, and what float32 pieces are rounded to.

Candidates have the same box of the same shape, and the same few elements. Whether a chunk does follow from others is
decided when it is written, by digests of what was captured (native/derived.h): so a pair that does not hold costs time,
and nothing else. It is given up after the first save in which no chunk of it was found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import PACKED_BELOW_BYTES
from flowstone.format.codec import CAST_ELEMENTS
from flowstone.pipeline.messages import Assignment
from flowstone.plan.write import COPY, Derived, WritePlan
from flowstone.stage.element_samples import element_samples
from flowstone.store.base import Receipt
from flowstone.table.pieces import Pieces, Places


class Deriving:
    """What the saves of a rank may leave out. `learn` and `derived` may be called by any thread."""

    def __init__(self) -> None:
        self._found: tuple[Pieces, Derived | None] | None = None

    def derived(self, pieces: Pieces, assignment: Assignment, places: Places | None) -> Derived | None:
        """Which pieces may follow from others; the same object as before, if nothing is new.

        places  of what the rank holds; None: it must not be looked at, and what is not known is not derived
        """
        known = self._found
        if known is not None and (known[0] is pieces or known[0] == pieces):
            return known[1]
        if places is None:
            return None
        found = find(pieces, assignment.lazy(), assignment.places(places))
        self._found = pieces, found
        return found

    def learn(self, plan: WritePlan, receipt: Receipt) -> None:
        """Give up what did not follow from others in a save."""
        known, encoded = self._found, receipt.encoded
        if encoded is None or known is None or known[1] is None or not (known[0] is plan.pieces or (
            known[0] == plan.pieces
        )):
            return
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(encoded.derived)])
        first = plan.chunk.astype(np.int64)
        holds = sums[np.append(first[1:], plan.chunks)] > sums[first]
        wrong = (plan.derivation > 0) & ~holds
        if wrong.any():
            kept = np.where(wrong, 0, known[1].derivation).astype(np.uint8)
            self._found = known[0], Derived(kept, known[1].follows) if kept.any() else None


def find(pieces: Pieces, lazy: NDArray[np.bool_], places: Places) -> Derived | None:
    """The pieces that may follow from others, by a few elements of each; None: none does.

    lazy  which may be captured late: pieces follow only from those that never are captured later
    """
    kinds = [dtype.name for dtype in pieces.tensors.dtypes]
    items = pieces.tensors.item_bytes
    length, tensor = pieces.lengths(), pieces.tensor
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for at in np.flatnonzero(length >= PACKED_BELOW_BYTES).tolist():
        alike[tuple(pieces.shapes[at]), pieces.box(at)].append(at)
    derivation, follows = np.zeros(len(length), np.uint8), np.zeros(len(length), np.int64)
    groups = [sorted(of, key=lambda at: bool(lazy[at])) for of in alike.values() if len(of) > 1]
    chosen = [at for of in groups for at in of]
    item = [int(items[tensor[at]]) for at in chosen]
    counts = [int(length[at]) // width for at, width in zip(chosen, item, strict=True)]
    samples = element_samples(places, chosen, item, counts)
    for of in groups:
        named = [(at, kinds[tensor[at]]) for at in of if at in samples]
        for at, source, how in _pairs(named, samples):
            derivation[at], follows[at] = how, source
    return Derived(derivation, follows) if derivation.any() else None


def _pairs(
    group: Sequence[tuple[int, str]], samples: dict[int, bytes]
) -> Iterable[tuple[int, int, int]]:
    """Of pieces with their dtypes, sources before what follows from them: the piece, its source, its derivation."""
    first: dict[tuple[str, bytes], int] = {}
    rounded: dict[tuple[str, bytes], int] = {}
    for at, kind in group:
        if kind != "float32" or _is_uniform(samples[at], 4) or (kind, samples[at]) in first:
            continue
        first[kind, samples[at]] = at
        for element, number in CAST_ELEMENTS.items():
            if (cast := _native.cast_numbers(samples[at], number)) is not None:
                rounded.setdefault((element, cast), at)
    for at, kind in group:
        sample = samples[at]
        source = rounded.get((kind, sample))
        if source is not None:
            yield at, source, CAST_ELEMENTS[kind]
        elif not _is_uniform(sample, 1) and (equal := first.setdefault((kind, sample), at)) != at:
            yield at, equal, COPY


def _is_uniform(sample: bytes, item: int) -> bool:
    """Whether all elements are equal, so that equal samples tell nothing."""
    return sample == sample[:item] * (len(sample) // item)
