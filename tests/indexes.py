"""Indexes for tests: of what a plan would write, through the index's file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone.format.index import Index, decode_index
from flowstone.format.manifest import SegmentRow
from flowstone.plan.write import WritePlan, index_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def index_of(plan: WritePlan, offsets: NDArray[np.uint64], digests: NDArray[np.uint64]) -> Index:
    """The index of the plan's pieces at `offsets`, with `digests` in plan order."""
    rows = [SegmentRow(at, None, one.name, one.bytes, one.header_bytes, "") for at, one in enumerate(plan.segments)]
    return decode_index(index_file(plan, offsets, digests), segments=rows, path="index")
