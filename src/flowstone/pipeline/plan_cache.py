"""The plan of the last save, which the next save reuses if nothing differs that the plan depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import Share
from flowstone.pipeline.base import Base
from flowstone.pipeline.messages import Assignment
from flowstone.plan.write import NOT_CODED, Derived, WritePlan, Writer, plan_writes
from flowstone.stage.capture import Headers
from flowstone.state import Described
from flowstone.table.pieces import Layout, Places

if TYPE_CHECKING:
    from flowstone.pipeline.coding import Coding

FenceMode: TypeAlias = Literal["auto", "manual", "now"]
"""Until when the state must not change: an optimizer's step (which waits), the caller's fence, the return of `save`."""
Waiter: TypeAlias = Literal["nothing", "optimizers", "caller"]
"""What waits for the capture before it changes lazily captured pieces."""


class CachedPlan(msgspec.Struct, frozen=True, eq=False):
    """A layout with the plan for what this rank writes of it; kept for the next save.

    derived  what need not be stored, as it was known
    headers  of its last save
    kept     what its chunks were, if those that change little are to be coded by that
    shares   of the store's paths
    """

    layout: Layout
    waiter: Waiter
    plan: WritePlan
    assignment: Assignment
    derived: Derived | None = None
    headers: Headers = msgspec.field(default_factory=Headers)
    kept: _native.KeptChunks | None = None
    shares: tuple[Share, ...] = ()

    def late(self) -> NDArray[np.bool_]:
        """For each piece of the layout: whether any of it is captured after `save` has returned."""
        late = np.zeros(len(self.layout.pieces), np.bool_)
        late[self.assignment.positions[self.plan.lazy]] = True
        return late

    def places(self, described: Described) -> Places:
        """The memory of the pieces that are written."""
        return self.assignment.places(described.places)


def plan_save(
    described: Described, known: CachedPlan | None, assignment: Assignment, *, fence: FenceMode, writer: Writer,
    base: Base | None = None, coding: Coding | None = None,
) -> CachedPlan:
    """The plan for what is `described`: the `known` one itself when nothing differs that it depends on.

    coding  looks at the memory that is described, which must be as it was
    """
    waiter, layout = waiter_of(described, fence), described.layout
    same = known is not None and known.assignment.positions is assignment.positions
    pieces = known.plan.pieces if known is not None and same and known.layout is layout else assignment.pieces()
    derived = None if coding is None else coding.derived(pieces, assignment, described.places)
    fits = known is not None and known.layout is layout and known.waiter == waiter and known.shares == writer.shares
    if known is not None and fits and _rests_alike(known, base, assignment) and (
        _coded_alike(known, coding, derived)
    ):
        if known.assignment is assignment:
            return known
        if known.assignment.positions is assignment.positions:
            return replace(known, assignment=assignment)  # a new plan, in which this rank writes the same
    lazy = lazy_pieces(layout, waiter)
    late = [lazy[at] for at in assignment.positions.tolist()] if lazy else ()
    rests = None if base is None else base.resting(pieces, assignment)
    coded = NOT_CODED if coding is None else coding.coded(pieces, derived)
    plan = plan_writes(
        pieces, lazy=late, writer=writer, alone=assignment.is_everything,
        resting=() if rests is None else rests.tolist(), coded=coded,
    )
    kept = None if coding is None else coding.kept_of(plan)
    return CachedPlan(layout, waiter, plan, assignment, derived, kept=kept, shares=writer.shares)


def _rests_alike(known: CachedPlan, base: Base | None, assignment: Assignment) -> bool:
    """Whether the pieces that rest are those for which the plan was made."""
    plan = known.plan
    rests = None if base is None else base.resting(plan.pieces, assignment)
    return not plan.rests.any() if rests is None else np.array_equal(rests & plan.slotted, plan.rests)


def _coded_alike(known: CachedPlan, coding: Coding | None, derived: Derived | None) -> bool:
    """Whether the pieces that are to be encoded, and those that are not stored, are those for which it was made."""
    if coding is None:
        return True
    if known.derived is not derived:
        return False
    plan = known.plan
    coded, before = coding.chosen(plan.pieces), plan.width > 0
    return not before.any() if coded is None else np.array_equal(coded & plan.slotted & (plan.block == 0), before)


def waiter_of(described: Described, fence: FenceMode) -> Waiter:
    optimizers: Waiter = "optimizers" if described.optimizers and fence == "auto" else "nothing"
    return "caller" if fence == "manual" else optimizers


def lazy_pieces(layout: Layout, waiter: Waiter) -> Sequence[bool]:
    """For each piece whether it may be captured late; empty: none may."""
    every: dict[Waiter, Sequence[bool]] = {
        "nothing": (), "optimizers": layout.lazy, "caller": (True,) * len(layout.pieces)
    }
    return every[waiter]
