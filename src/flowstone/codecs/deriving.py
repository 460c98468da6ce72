"""Find pieces (parts of tensors) that need not be stored, because they are copies of other pieces, or roundings of
float32 pieces to 16 bits.

Candidates have the same box (region) in tensors of the same shape, and equal samples of elements. When a chunk is
written, the digests of the captured bytes decide whether it is really derived (native/codec/derived.h). So a wrong
candidate only costs time, and is dropped after the first save in which none of its chunks is derived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone._native import cast_numbers
from flowstone.codecs.element_samples import element_samples
from flowstone.config import PACKED_BELOW_BYTES
from flowstone.coordination.messages import Assignment
from flowstone.format.codec import CAST_ELEMENTS
from flowstone.plan.write import COPY, Derivations, WritePlan
from flowstone.store.base import Receipt
from flowstone.table.pieces import Pieces, Places


class DerivationFinder:
    """Finds the pieces that the saves of a rank may omit. Any thread may call `drop_unconfirmed` and `find_for`."""

    def __init__(self) -> None:
        self._last: tuple[Pieces, Derivations | None] | None = None

    def find_for(self, pieces: Pieces, assignment: Assignment, places: Places | None) -> Derivations | None:
        """The pieces that may be derived from others. If nothing has changed, returns the same object as the last call.

        places  memory of the rank's pieces; None: it must not be read, so only known candidates are returned
        """
        last = self._last
        if last is not None and (last[0] is pieces or last[0] == pieces):
            return last[1]
        if places is None:
            return None
        derived = find_derivations(pieces, assignment.lazy(), assignment.places(places))
        self._last = pieces, derived
        return derived

    def drop_unconfirmed(self, plan: WritePlan, receipt: Receipt) -> None:
        """After a save with this plan, drop the candidates of which no chunk was really derived."""
        last, encoded = self._last, receipt.encoded
        if encoded is None or last is None or last[1] is None or not (last[0] is plan.pieces or (
            last[0] == plan.pieces
        )):
            return
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(encoded.derived)])
        first = plan.chunk.astype(np.int64)
        holds = sums[np.append(first[1:], plan.chunks)] > sums[first]
        wrong = (plan.derivation > 0) & ~holds
        if wrong.any():
            derivation = np.where(wrong, 0, last[1].derivation).astype(np.uint8)
            self._last = last[0], Derivations(derivation, last[1].follows) if derivation.any() else None


def find_derivations(pieces: Pieces, lazy: NDArray[np.bool_], places: Places) -> Derivations | None:
    """The pieces that may be derived from others, judged by a few elements of each; None: no piece.

    lazy  mask of pieces that may be captured after `save` has returned. A piece is derived only from pieces that are
          not captured later than itself
    """
    kinds = [dtype.name for dtype in pieces.tensors.dtypes]
    items = pieces.tensors.item_bytes
    length, tensor = pieces.lengths(), pieces.tensor
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for i in np.flatnonzero(length >= PACKED_BELOW_BYTES).tolist():
        alike[tuple(pieces.shapes[i]), pieces.box(i)].append(i)
    derivation, follows = np.zeros(len(length), np.uint8), np.zeros(len(length), np.int64)
    groups = [sorted(group, key=lambda i: bool(lazy[i])) for group in alike.values() if len(group) > 1]
    chosen = [i for group in groups for i in group]
    item = [int(items[tensor[i]]) for i in chosen]
    counts = [int(length[i]) // width for i, width in zip(chosen, item, strict=True)]
    samples = element_samples(places, chosen, item, counts)
    for group in groups:
        named = [(i, kinds[tensor[i]]) for i in group if i in samples]
        for i, source, how in _pairs(named, samples):
            derivation[i], follows[i] = how, source
    return Derivations(derivation, follows) if derivation.any() else None


def _pairs(
    group: Sequence[tuple[int, str]], samples: dict[int, bytes]
) -> Iterable[tuple[int, int, int]]:
    """Yield (piece, source, derivation) for pieces of a group that may be derived from another piece, the source. A
    source comes before the pieces that derive from it.
    """
    first: dict[tuple[str, bytes], int] = {}
    rounded: dict[tuple[str, bytes], int] = {}
    for i, kind in group:
        if kind != "float32" or _is_uniform(samples[i], 4) or (kind, samples[i]) in first:
            continue
        first[kind, samples[i]] = i
        for element, number in CAST_ELEMENTS.items():
            if (cast := cast_numbers(samples[i], number)) is not None:
                rounded.setdefault((element, cast), i)
    for i, kind in group:
        sample = samples[i]
        source = rounded.get((kind, sample))
        if source is not None:
            yield i, source, CAST_ELEMENTS[kind]
        elif not _is_uniform(sample, 1) and (equal := first.setdefault((kind, sample), i)) != i:
            yield i, equal, COPY


def _is_uniform(sample: bytes, item: int) -> bool:
    """Whether all elements of the sample have the same value (for example all zeros). If another piece has the same
    sample, that is then no sign that one is derived from the other. `item`: length of an element in bytes.
    """
    return sample == sample[:item] * (len(sample) // item)
