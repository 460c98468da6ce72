"""Restore: find the target memory of a checkpoint's tensors, and plan the restoration of all other values."""

from __future__ import annotations

import operator
from collections.abc import Mapping, MutableMapping, Sequence

import torch

from flowstone.errors import StateError
from flowstone.format.inner_objects import INNER, inner_state
from flowstone.format.objects import Provided, unsupported
from flowstone.state import nodes
from flowstone.state.describe import describe_walk
from flowstone.state.imported import with_classes_of
from flowstone.state.kind import Kind
from flowstone.state.kinds.stateful import load_state
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place, check_sections, section_place
from flowstone.state.new_values import NewValues
from flowstone.state.providers import PROVIDERS
from flowstone.state.records import MISSING, Difference, IndirectTarget, PerRank, Phase, Stored
from flowstone.state.registry import kind_of
from flowstone.state.saving import Saving
from flowstone.state.scan import facts_of_failure
from flowstone.state.sink import Sink
from flowstone.state.split import type_name
from flowstone.state.walk import Walk, scan
from flowstone.table.pieces import Alias, Pieces, Places


class Restoration:
    """The target memory of a checkpoint's bytes, the differences from the state, and the actions after the bytes.

    pieces, places  requested tensors and their target memory, each memory once; it is the user's, or new and owned
                    by this object until `finish`
    indirect        by position among the pieces: memory of the state that is set after its place, in `finish`
    aliases         further requested names of memory that is among the pieces
    differences     between the state's and the checkpoint's objects; tensors are not compared here
    sections        of the state
    new_bytes       length of the new memory among the places
    notes           what was deliberately left out or kept, for the report
    remedies        how to resolve differences with a known cause
    """

    def __init__(self, loading: Loading, sections: tuple[str, ...], state: Mapping[str, object]) -> None:
        layout, places, indirect = loading.close(lambda aliases: _untie(state, loading, aliases))
        self.pieces: Pieces = layout.pieces
        self.places: Places = places
        self.indirect: Mapping[int, IndirectTarget] = indirect
        self.aliases: tuple[Alias, ...] = layout.aliases
        self.differences: tuple[Difference, ...] = tuple(loading.differences)
        self.notes: tuple[str, ...] = tuple(loading.notes)
        self.remedies: tuple[str, ...] = tuple(loading.remedies)
        self.sections = sections
        self.new_bytes = loading.new_bytes
        self._actions = loading.actions
        self._written = loading.written
        self._counted = self._finished = False

    def count_as_written(self) -> None:
        """Increment version counters: bytes are written without autograd, and a graph that saved values must notice.

        Call it once bytes may change; for tens of thousands of tensors it takes long enough to be called meanwhile.
        """
        if not self._counted:
            self._counted = True
            _count_as_written(self._written)

    def finish(self) -> None:
        """Restore everything that is not tensor bytes. Call once, with every requested byte in place and verified.

        Values and containers come first, then modules, optimizers, other objects in the state's order, generators
        last. Raises StateError if an object's own load_state_dict() raises.
        """
        assert not self._finished, "a restoration finishes once"
        self._finished = True
        self.count_as_written()
        for phase in Phase:
            for action in self._actions[phase]:
                action()


def prepare(state: Mapping[str, object], stored: Stored, *, rank: int = 0, ranks: int = 1) -> Restoration:
    """Plan to restore `state` from the checkpoint content `stored`, on `rank` of `ranks`.

    raises  UnsupportedStateError for memory that cannot be written, CollisionError if two paths make the same name,
            FormatError for stored objects that contradict themselves

    Changes nothing: the state is as before until bytes are written into the returned memory.
    """
    sections = check_sections(state)
    loading = Loading(scan(state, rank), stored)
    _set_walks(loading)
    with_classes_of(state, lambda: _plan(state, loading, rank, ranks))
    return Restoration(loading, sections, state)


def _plan(state: Mapping[str, object], loading: Loading, rank: int, ranks: int) -> None:
    for section, value in state.items():
        if isinstance(value, PerRank):
            _per_rank(loading, section, value, rank, ranks)
        else:
            _section(loading, section, value, state)


def _untie(state: Mapping[str, object], loading: Loading, aliases: Sequence[Alias]) -> Sequence[int]:
    from flowstone.state.untie import untie  # imported here: few states have such entries

    return untie(state, loading, aliases)


def _set_walks(loading: Loading) -> None:
    """Give the restoration its two passes: one that plans it, and one that describes plain objects for comparison."""

    def act(kind: Kind, value: object, place: Place, node: object) -> Replacement | None:
        if kind.is_object:
            node = inner_state(node, place.name)
        # Without parts and provider its fields say all, see `classes.py`.
        if isinstance(node, Provided) and not kind.provided and (node.parts or PROVIDERS.of_kind(node.kind)):
            loading.differ("kind", place.name, nodes.kind_of(value), _unprovided(value, node))
            return None
        if kind.one_value:
            loading.check_once(value, node, place)
        return kind.restore(value, node, place, loading)

    def plain(value: object, place: Place) -> object:
        return describe_walk(Saving(loading.scan, Sink(objects_only=True)))(value, place)

    loading.walk, loading.plain, loading.is_object = Walk(act), plain, lambda value: kind_of(value).is_object


def _unprovided(value: object, node: Provided) -> str:
    """The difference for an object that a provider saved, if no provider is registered for it now."""
    served = PROVIDERS.of_kind(node.kind)
    if node.kind == INNER:
        return nodes.kind_of(node)
    if served is None:
        return f"{nodes.kind_of(node)}, whose provider is not registered: call register_provider() before load()"
    return f"{nodes.kind_of(node)}, whose provider serves {type_name(served.own)}, not {type_name(type(value))}"


def _per_rank(loading: Loading, section: str, holder: PerRank, rank: int, ranks: int) -> None:
    """Plan a per-rank section."""
    if section in loading.stored.objects and section not in loading.stored.per_rank:
        loading.differ("kind", section, "each rank's own value (fs.PerRank)", "one value for all ranks")
        return
    if holder.redistribute is not None and len(loading.stored.by_rank.get(section, ())) not in (0, ranks):
        _redistribute(loading, section, holder, rank, ranks)
        return
    node = loading.stored.per_rank.get(section, MISSING)
    replacement = loading.walk(holder.value, section_place(section, rank), node)
    if replacement is not None:
        loading.later(Phase.VALUES, lambda: setattr(holder, "value", replacement()))


def _redistribute(loading: Loading, section: str, holder: PerRank, rank: int, ranks: int) -> None:
    """Plan to let `redistribute` make this rank's value from those of all ranks that saved."""
    value, place, kind = holder.value, section_place(section, rank), kind_of(holder.value)
    if not (kind.takes_state(value) or (kind.replaceable and id(value) not in loading.scan.live)):
        raise unsupported(
            section, value, "cannot be redistributed",
            "give redistribute= to a PerRank of plain values, or of one object with state_dict()",
        )
    new_values, hook, states = NewValues(loading), holder.redistribute, loading.stored.by_rank[section]
    assert hook is not None
    for number, node in enumerate(states):
        new_values.want(node, section_place(section, number))

    def redistributed() -> object:
        found = [new_values.build(node, section_place(section, number).name) for number, node in enumerate(states)]
        try:
            return hook(found, rank, ranks)
        except Exception as error:
            raise StateError(
                f"cannot restore '{section}'", **facts_of_failure("its redistribute", error, next=(
                    "fix it; tensors loaded in place, and what comes before it in the state, are already restored"
                )),
            ) from error

    if kind.takes_state(value):
        loading.later(Phase.STATEFUL, lambda: load_state(value, redistributed(), place))
    else:
        loading.later(Phase.VALUES, lambda: setattr(holder, "value", loading.fitting.fit(value, redistributed())))


def _section(loading: Loading, section: str, value: object, state: Mapping[str, object]) -> None:
    """Plan a section that is equal on all ranks."""
    if section in loading.stored.per_rank and section not in loading.stored.objects:
        loading.differ("kind", section, "one value for all ranks", "each rank's own value (fs.PerRank)")
        return
    replacement = loading.walk(value, section_place(section), loading.stored.objects.get(section, MISSING))
    if replacement is None:
        return
    if not isinstance(state, MutableMapping):
        raise unsupported(section, value, "cannot be replaced, as the state is read-only", "pass a dict")
    loading.later(Phase.VALUES, lambda: operator.setitem(state, section, replacement()))


def _count_as_written(written: Sequence[torch.Tensor]) -> None:
    try:
        torch.autograd.graph.increment_version(written)
    except RuntimeError:  # inference tensors have no version; counting the others twice is harmless
        torch.autograd.graph.increment_version([one for one in written if not one.is_inference()])
