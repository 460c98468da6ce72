"""Restore: find the target memory of a checkpoint's tensors, and plan the restoration of all other values."""

from __future__ import annotations

import operator
from collections.abc import Mapping, MutableMapping

from flowstone.errors import StateError
from flowstone.format.inner_objects import INNER, inner_state
from flowstone.format.objects import ProviderRecord, unsupported_error
from flowstone.state import nodes
from flowstone.state.describe import describe_walk
from flowstone.state.framework import FRAMEWORK
from flowstone.state.imported import call_with_classes_of
from flowstone.state.kind import ValueKind
from flowstone.state.kinds.stateful import load_state
from flowstone.state.loading import Replacement, RestorePass, RestoreWalk
from flowstone.state.memory import IndirectTarget
from flowstone.state.names import Place, check_sections, section_place, type_name
from flowstone.state.new_values import NewValues
from flowstone.state.provider_registry import PROVIDERS
from flowstone.state.records import MISSING, PerRank, RestorePhase, StateDifference, StoredState
from flowstone.state.registry import kind_of
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan, failure_facts
from flowstone.state.sink import TensorSink
from flowstone.state.walk import Walk, scan
from flowstone.table.pieces import Alias, Pieces, Places


class Restoration:
    """A planned load: the memory into which bytes are read, the differences between state and checkpoint, and what must
    be done after the read.

    pieces, places  the requested tensors, and for each the memory into which it is read: the user's memory, or new
                    memory that this object owns until `finish`. Tensors that share memory are listed once
    indirect        position of a piece -> the tensor's memory in the state, for pieces that are first read into other
                    memory. `finish` then copies their values into the state's memory
    aliases         other names that the state has for a listed tensor: tied weights
    differences     differences between the state's and the checkpoint's objects; tensors are compared later
    sections        names of the state's sections
    new_bytes       length of the new memory among `places`
    notes           texts for the report about entries that were deliberately left out or kept
    remedies        texts that say how to resolve differences with a known cause
    """

    def __init__(self, loading: RestorePass, sections: tuple[str, ...], state: Mapping[str, object]) -> None:
        layout, places, indirect = loading.close(lambda aliases: FRAMEWORK.untie(state, loading, aliases))
        self.pieces: Pieces = layout.pieces
        self.places: Places = places
        self.indirect: Mapping[int, IndirectTarget] = indirect
        self.aliases: tuple[Alias, ...] = layout.aliases
        self.differences: tuple[StateDifference, ...] = tuple(loading.differences)
        self.notes: tuple[str, ...] = tuple(loading.notes)
        self.remedies: tuple[str, ...] = tuple(loading.remedies)
        self.sections = sections
        self.new_bytes = loading.new_bytes
        self._actions = loading.actions
        self._written = loading.written
        self._counted = self._finished = False

    def count_as_written(self) -> None:
        """Increment the version counters of all tensors that the load writes. Autograd does not see these writes, and a
        graph that has saved a tensor must detect them.

        Must be called once the read has begun, as bytes may change from then on. Call it during the read, because it
        takes noticeable time for tens of thousands of tensors.
        """
        if not self._counted:
            self._counted = True
            FRAMEWORK.count_as_written(self._written)

    def finish(self) -> None:
        """Restore everything that is not tensor bytes. Must be called once, when every requested byte is read and
        verified.

        Order: values and containers, modules, optimizers, other objects in the state's order, generators. Raises
        StateError if an object's own load_state_dict() raises.
        """
        assert not self._finished, "a restoration finishes once"
        self._finished = True
        self.count_as_written()
        for phase in RestorePhase:
            for action in self._actions[phase]:
                action()


def prepare(state: Mapping[str, object], stored: StoredState, *, rank: int = 0, ranks: int = 1) -> Restoration:
    """Plan to restore `state` from the checkpoint content `stored`, on `rank` of `ranks`.

    raises  UnsupportedStateError for memory that cannot be written, CollisionError if two paths make the same name,
            FormatError for stored objects that contradict themselves

    Changes nothing: the state is as before until bytes are written into the returned memory.
    """
    sections = check_sections(state)
    loading = RestorePass(
        scan(state, rank), stored, make_walk=_restore_walk, plain=_plain,
        is_object=lambda value: kind_of(value).is_object,
    )
    call_with_classes_of(state, lambda: _plan(state, loading, rank, ranks))
    return Restoration(loading, sections, state)


def _plan(state: Mapping[str, object], loading: RestorePass, rank: int, ranks: int) -> None:
    for section, value in state.items():
        if isinstance(value, PerRank):
            _per_rank(loading, section, value, rank, ranks)
        else:
            _section(loading, section, value, state)


def _plain(state_scan: StateScan, value: object, place: Place) -> object:
    """An object of the state in the form in which a checkpoint would store it, for comparison."""
    return DescribePass(state_scan, TensorSink(objects_only=True), describe_walk).walk(value, place)


def _restore_walk(loading: RestorePass) -> RestoreWalk:
    """The walk over a state that plans a load: for each value, its kind's `restore` is called."""

    def act(kind: ValueKind, value: object, place: Place, node: object) -> Replacement | None:
        if kind.is_object:
            node = inner_state(node, place.name)
        # A ProviderRecord without parts may be an object with fields (`classes.py`), which needs no provider.
        if isinstance(node, ProviderRecord) and not kind.provided and (
            node.parts or PROVIDERS.find_for_kind(node.kind)
        ):
            loading.add_difference("kind", place.name, nodes.describe_node(value), _unprovided(value, node))
            return None
        if kind.one_value:
            loading.check_same_value(value, node, place)
        return kind.restore(value, node, place, loading)

    return Walk(act)


def _unprovided(value: object, node: ProviderRecord) -> str:
    """The text of the difference for an object that was saved with a provider, if none is registered for it now."""
    entry = PROVIDERS.find_for_kind(node.kind)
    if node.kind == INNER:
        return nodes.describe_node(node)
    if entry is None:
        return f"{nodes.describe_node(node)}, whose provider is not registered: call register_provider() before load()"
    return f"{nodes.describe_node(node)}, whose provider serves {type_name(entry.own)}, not {type_name(type(value))}"


def _per_rank(loading: RestorePass, section: str, holder: PerRank, rank: int, ranks: int) -> None:
    """Plan to restore a section with one value per rank."""
    if section in loading.stored.objects and section not in loading.stored.per_rank:
        loading.add_difference("kind", section, "each rank's own value (fs.PerRank)", "one value for all ranks")
        return
    if holder.redistribute is not None and len(loading.stored.by_rank.get(section, ())) not in (0, ranks):
        _redistribute(loading, section, holder, rank, ranks)
        return
    node = loading.stored.per_rank.get(section, MISSING)
    replacement = loading.walk(holder.value, section_place(section, rank), node)
    if replacement is not None:
        loading.defer(RestorePhase.VALUES, lambda: holder.replace_value(replacement()))


def _redistribute(loading: RestorePass, section: str, holder: PerRank, rank: int, ranks: int) -> None:
    """Plan to call `redistribute`, which makes this rank's value from the values of all ranks that saved."""
    value, place, kind = holder.value, section_place(section, rank), kind_of(holder.value)
    if not (kind.takes_state(value) or (kind.replaceable and id(value) not in loading.state_scan.live)):
        raise unsupported_error(
            section, value, "cannot be redistributed",
            "use redistribute= only for a PerRank of plain values, or of one object with state_dict()",
        )
    new_values, hook, states = NewValues(loading), holder.redistribute, loading.stored.by_rank[section]
    assert hook is not None
    for number, node in enumerate(states):
        new_values.request(node, section_place(section, number))

    def redistributed() -> object:
        values = [new_values.build(node, section_place(section, number).name) for number, node in enumerate(states)]
        try:
            return hook(values, rank, ranks)
        except Exception as error:
            raise StateError(
                f"cannot restore '{section}'", **failure_facts("redistribute", error, next=(
                    "fix this redistribute(), and load again before you save: the state is only partly loaded (all "
                    "tensors that are loaded in place, and the objects before this one, have the checkpoint's values; "
                    "the rest may still have its old values)"
                )),
            ) from error

    if kind.takes_state(value):
        loading.defer(RestorePhase.STATEFUL, lambda: load_state(value, redistributed(), place))
    else:
        loading.defer(RestorePhase.VALUES, lambda: holder.replace_value(loading.fitting.fit(value, redistributed())))


def _section(loading: RestorePass, section: str, value: object, state: Mapping[str, object]) -> None:
    """Plan to restore a section that is equal on all ranks."""
    if section in loading.stored.per_rank and section not in loading.stored.objects:
        loading.add_difference("kind", section, "one value for all ranks", "each rank's own value (fs.PerRank)")
        return
    replacement = loading.walk(value, section_place(section), loading.stored.objects.get(section, MISSING))
    if replacement is None:
        return
    if not isinstance(state, MutableMapping):
        raise unsupported_error(section, value, "cannot be replaced, as the state is read-only", "pass a dict")
    loading.defer(RestorePhase.VALUES, lambda: operator.setitem(state, section, replacement()))
