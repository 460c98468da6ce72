"""The plan of the last save: which chunks this rank writes, and where. The next save reuses it if layout, options and
base (the earlier checkpoint to whose chunks it may refer) allow that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone._native import BaseCache
from flowstone.config import PathShare
from flowstone.coordination.messages import Assignment
from flowstone.plan.write import NOT_ENCODED, Derivations, WritePlan, Writer, plan_writes
from flowstone.stage.capture import SegmentHeaders
from flowstone.state import StateDescription
from flowstone.table.pieces import Layout, Places

if TYPE_CHECKING:
    from flowstone.codecs.coding import EncodingChooser
    from flowstone.delta.base import Base

FenceMode: TypeAlias = Literal["auto", "manual", "now"]
"""Who waits for the capture before the state changes: an optimizer's step, the caller's `fence()`, or `save` itself."""
Waiter: TypeAlias = Literal["nothing", "optimizers", "caller"]
"""The code that waits for the capture before it changes lazily captured pieces."""


class CachedPlan(msgspec.Struct, frozen=True, eq=False):
    """A layout with the plan of this rank's writes; kept for the next save.

    derived  pieces that need not be stored, because they can be computed from others; determined when the plan was made
    headers  segment headers of the last save with this plan
    kept     earlier contents of chunks, kept in memory so that later saves can store differences to them
    shares   for a store with several paths, which share of the bytes each path gets
    """

    layout: Layout
    waiter: Waiter
    plan: WritePlan
    assignment: Assignment
    derived: Derivations | None = None
    headers: SegmentHeaders = msgspec.field(default_factory=SegmentHeaders)
    kept: BaseCache | None = None
    shares: tuple[PathShare, ...] = ()

    def late(self) -> NDArray[np.bool_]:
        """For each piece of the layout: whether a part of it is captured after `save` has returned."""
        late = np.zeros(len(self.layout.pieces), np.bool_)
        late[self.assignment.positions[self.plan.lazy]] = True
        return late

    def places(self, described: StateDescription) -> Places:
        """The memory of the pieces that this rank writes."""
        return self.assignment.places(described.places)


def plan_save(
    described: StateDescription, last: CachedPlan | None, assignment: Assignment, *, fence: FenceMode, writer: Writer,
    base: Base | None = None, coding: EncodingChooser | None = None,
) -> CachedPlan:
    """The plan for the `described` state: the `last` plan itself if it still applies.

    coding  chooses the encoding. Reads the memory of the state, which must not have changed since `describe`
    """
    waiter, layout = waiter_of(described, fence), described.layout
    same = last is not None and last.assignment.positions is assignment.positions
    pieces = last.plan.pieces if last is not None and same and last.layout is layout else assignment.pieces()
    derived = None if coding is None else coding.derivations_of(pieces, assignment, described.places)
    fits = last is not None and last.layout is layout and last.waiter == waiter and last.shares == writer.shares
    if last is not None and fits and _same_unchanged(last, base, assignment) and (
        _coded_alike(last, coding, derived)
    ):
        if last.assignment is assignment:
            return last
        if last.assignment.positions is assignment.positions:
            return replace(last, assignment=assignment)  # a new assignment in which this rank writes the same pieces
    lazy = lazy_pieces(layout, waiter)
    late = [lazy[position] for position in assignment.positions.tolist()] if lazy else ()
    unchanged = None if base is None else base.unchanged_pieces(pieces, assignment)
    coded = NOT_ENCODED if coding is None else coding.encoding_of(pieces, derived)
    plan = plan_writes(
        pieces, lazy=late, writer=writer, is_complete=assignment.is_everything,
        unchanged=() if unchanged is None else unchanged.tolist(), encoding=coded,
    )
    kept = None if coding is None else coding.previous_chunks(plan)
    return CachedPlan(layout, waiter, plan, assignment, derived, kept=kept, shares=writer.shares)


def _same_unchanged(last: CachedPlan, base: Base | None, assignment: Assignment) -> bool:
    """Whether the pieces that are expected to equal the base's are the same ones as when the plan was made."""
    plan = last.plan
    unchanged = None if base is None else base.unchanged_pieces(plan.pieces, assignment)
    return not plan.unchanged.any() if unchanged is None else np.array_equal(unchanged & plan.slotted, plan.unchanged)


def _coded_alike(last: CachedPlan, coding: EncodingChooser | None, derived: Derivations | None) -> bool:
    """Whether the same pieces are encoded and derived as when the plan was made."""
    if coding is None:
        return True
    if last.derived is not derived:
        return False
    plan = last.plan
    coded, before = coding.chosen_pieces(plan.pieces), plan.width > 0
    return not before.any() if coded is None else np.array_equal(coded & plan.slotted & (plan.block == 0), before)


def waiter_of(described: StateDescription, fence: FenceMode) -> Waiter:
    optimizers: Waiter = "optimizers" if described.optimizers and fence == "auto" else "nothing"
    return "caller" if fence == "manual" else optimizers


def lazy_pieces(layout: Layout, waiter: Waiter) -> Sequence[bool]:
    """For each piece of the layout, whether it may be captured after `save` returns. Empty: no piece may."""
    every: dict[Waiter, Sequence[bool]] = {
        "nothing": (), "optimizers": layout.lazy, "caller": (True,) * len(layout.pieces)
    }
    return every[waiter]
