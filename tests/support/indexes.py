"""Indexes for tests: the index that a plan would write, read back from the index's file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.format.index import Index, decode_index
from flowstone.format.manifest import SegmentRow
from flowstone.plan.global_index import global_index
from flowstone.plan.write import WritePlan
from flowstone.table.pieces import Alias, Pieces


def index_of(
    plan: WritePlan, offsets: NDArray[np.uint64], digests: NDArray[np.uint64], aliases: Sequence[Alias] = ()
) -> Index:
    """The index of the plan's pieces at `offsets`, with `digests` in plan order. `aliases`: additional names."""
    rows = [SegmentRow(i, None, row.name, row.bytes, row.header_bytes, "") for i, row in enumerate(plan.segments)]
    pieces = Pieces.of(plan.pieces).compact()
    frame, piece_order, chunk_order = global_index([pieces], [np.arange(len(pieces))], aliases, plan.segment)
    return decode_index(frame.fill(offsets[piece_order], digests[chunk_order]), segments=rows, path="index")
