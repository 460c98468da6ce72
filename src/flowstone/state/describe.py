"""Describe: take a state apart into pieces of memory and plain objects. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from flowstone.errors import UnsupportedStateError
from flowstone.format.inner_objects import inner_object
from flowstone.format.objects import unsupported
from flowstone.state.frozen import Frozen
from flowstone.state.kind import Kind
from flowstone.state.names import Place, check_sections, section_place
from flowstone.state.records import Described, PerRank
from flowstone.state.saving import DescribeWalk, Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role, Sink
from flowstone.state.walk import Walk, scan
from flowstone.table.pieces import Layout


def describe(
    state: Mapping[str, object], *, rank: int = 0, known: Layout | None = None, whole: bool = False,
    frozen: Frozen | None = None, copied_bytes_max: int | None = None, anew: bool = False,
) -> Described:
    """Describe everything in `state`, as `rank` holds it.

    known   the layout of an earlier description; the result has this very object if nothing differs
    whole   no other rank has a part of the state: tensors of which this process holds only a part are refused
    frozen  what earlier saves have found about parameters that no optimizer owns; updated here
    copied_bytes_max  if the layout differs from `known`, pieces captured early are copied first; if that exceeds this
            number of bytes, parameters that may change at any time are captured late too
    anew    a load makes all values anew, as none is there: objects that only an existing one could be restored into are
            refused, and values of classes that are not registered
    raises  UnsupportedStateError, naming the path, for an object that cannot be stored;
            CollisionError if two paths make the same name

    Calls state_dict() of objects that have it; copies no tensor (except conjugate and negative views), changes
    nothing. The result refers to the user's memory and keeps it alive.
    """
    check_sections(state)
    saving = Saving(Scan() if anew else scan(state, rank), Sink(whole=whole))
    if anew:
        saving.inner = "refused"
    walk = describe_walk(saving)
    shared: dict[str, object] = {}
    per_rank: dict[str, object] = {}
    for section, value in state.items():
        if isinstance(value, PerRank):
            per_rank[section] = walk(value.value, section_place(section, rank))
        else:
            shared[section] = walk(value, section_place(section))
    if anew:
        _check_classes(shared)
    layout, places, counters = saving.close(known, frozen, copied_bytes_max)
    found = saving.scan
    return Described(
        layout, places, shared, per_rank, found.optimizers, tuple(found.unguarded), counters, saving.late
    )


def _check_classes(sections: Mapping[str, object]) -> None:
    """Raise UnsupportedStateError for a value whose class a load knows only by a live value."""
    from flowstone.state.classes import unknown_classes  # imported here: only what adapters save is made anew

    for section, node in sections.items():
        for name in unknown_classes(node):
            raise UnsupportedStateError(
                f"'{section}' has a value of a class that a load could not make", found=name,
                next="register the class with fs.register_class() where it is defined, or give plain values",
            )


def describe_walk(saving: Saving) -> DescribeWalk:
    """The describing pass, for one description."""

    def act(kind: Kind, value: object, place: Place, role: Role = Role.OTHER, /) -> object:
        if not kind.is_object or saving.inner == "walked":
            return kind.describe(value, place, saving, role)
        if saving.inner == "refused":
            raise unsupported(
                place.name, value, "is an object that a load could not restore: what contains it is created anew",
                "give it a section of its own in the state, or save what its state_dict() or get_state() returns",
            )
        return inner_object(kind.describe(value, place, saving, role))

    walk = saving.walk = Walk(act)
    return walk
