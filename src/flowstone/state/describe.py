"""Describe: take a state apart into pieces of memory and plain objects. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from flowstone.state.frozen import Frozen
from flowstone.state.kind import Kind
from flowstone.state.names import Place, check_sections, section_place
from flowstone.state.records import Described, PerRank
from flowstone.state.saving import DescribeWalk, Saving
from flowstone.state.sink import Role, Sink
from flowstone.state.walk import Walk, scan
from flowstone.table.pieces import Layout


def describe(
    state: Mapping[str, object], *, rank: int = 0, known: Layout | None = None, whole: bool = False,
    frozen: Frozen | None = None, copied_bytes_max: int | None = None,
) -> Described:
    """Describe everything in `state`, as `rank` holds it.

    known   the layout of an earlier description; it is the result's own, the very object, where nothing differs
    whole   nobody else has a part of it: tensors of which this process holds a part are refused, too
    frozen  what earlier descriptions have seen of parameters that nobody owns; sees it anew
    copied_bytes_max  where the layout is not the known one, what is captured early has to be copied; if that is more
            than so many bytes, parameters that may change at any time are captured late, too
    raises  UnsupportedStateError, naming the path, for what cannot be stored;
            CollisionError when two paths make one name

    Calls the state_dict() of what has one; copies no tensor (but conjugate and negative views),
    changes nothing. Memory in the result is the user's and kept alive by it.
    """
    check_sections(state)
    saving = Saving(scan(state, rank), Sink(whole=whole))
    walk = describe_walk(saving)
    shared: dict[str, object] = {}
    per_rank: dict[str, object] = {}
    for section, value in state.items():
        if isinstance(value, PerRank):
            per_rank[section] = walk(value.value, section_place(section, rank))
        else:
            shared[section] = walk(value, section_place(section))
    layout, places, counters = saving.close(known, frozen, copied_bytes_max)
    found = saving.scan
    return Described(
        layout, places, shared, per_rank, found.optimizers, tuple(found.unguarded), counters, saving.late
    )


def describe_walk(saving: Saving) -> DescribeWalk:
    """The pass that describes, for one description."""

    def act(kind: Kind, value: object, place: Place, role: Role = Role.OTHER, /) -> object:
        return kind.describe(value, place, saving, role)

    walk = saving.walk = Walk(act)
    return walk
