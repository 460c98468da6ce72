"""Describe: take a state apart into pieces of memory and plain objects. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from flowstone.errors import UnsupportedStateError
from flowstone.format.inner_objects import inner_object
from flowstone.format.objects import unsupported_error
from flowstone.state.frozen import FrozenParameters
from flowstone.state.kind import ValueKind
from flowstone.state.names import Place, check_sections, section_place
from flowstone.state.records import PerRank, StateDescription
from flowstone.state.saving import DescribePass, DescribeWalk
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole, TensorSink
from flowstone.state.walk import Walk, scan
from flowstone.table.pieces import Layout


def describe(
    state: Mapping[str, object], *, rank: int = 0, known: Layout | None = None, whole: bool = False,
    frozen: FrozenParameters | None = None, copied_bytes_max: int | None = None, anew: bool = False,
) -> StateDescription:
    """Take `state` apart for a save on rank `rank`: find the memory of all tensors, and all other values.

    known   the layout of an earlier description; the result reuses this object if nothing differs
    whole   whether to refuse tensors of which this process holds only a part, as no other rank saves the other parts
    frozen  the history of parameters that no optimizer owns, from earlier saves; updated by this call
    copied_bytes_max  limit of the copies that the save makes of early pieces (captured before `save` returns) if the
                      layout differs from `known`. If these pieces are longer in total, parameters that may change at
                      any time become lazy (captured later), too
    anew    whether loads will create all values, without a state to restore into. Then objects that cannot be created,
            and values of unregistered classes, are refused
    raises  UnsupportedStateError, naming the path, for an object that cannot be stored;
            CollisionError if two tensors or values get the same name

    Calls state_dict() of objects that have it; copies no tensor (except conjugate and negative views), changes
    nothing. The result refers to the user's memory and keeps it alive.
    """
    check_sections(state)
    if anew:
        saving = DescribePass(StateScan(), TensorSink(whole=whole), describe_walk, "refused")
    else:
        saving = DescribePass(scan(state, rank), TensorSink(whole=whole), describe_walk)
    walk = saving.walk
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
    content = saving.scan
    return StateDescription(
        layout, places, shared, per_rank, content.optimizers, tuple(content.unguarded), counters, saving.late
    )


def _check_classes(sections: Mapping[str, object]) -> None:
    """Raise UnsupportedStateError for a value whose class is not registered, so that a load could not create it."""
    from flowstone.state.classes import unknown_classes  # imported here: only adapters need it

    for section, node in sections.items():
        for name in unknown_classes(node):
            raise UnsupportedStateError(
                f"'{section}' has a value of a class that a load could not create", found=name,
                next="register the class with fs.register_class() where it is defined, or give plain values",
            )


def describe_walk(saving: DescribePass) -> DescribeWalk:
    """The walk over a state that lists its tensors and values for a save."""

    def act(kind: ValueKind, value: object, place: Place, role: TensorRole = TensorRole.OTHER, /) -> object:
        if not kind.is_object or saving.inner == "walked":
            return kind.describe(value, place, saving, role)
        if saving.inner == "refused":
            raise unsupported_error(
                place.name, value, "is an object that a load could not restore, as its container is created anew",
                "give it a section of its own in the state, or save what its state_dict() or get_state() returns",
            )
        return inner_object(kind.describe(value, place, saving, role))

    return Walk(act)
