"""Restore: find the memory that a checkpoint's tensors go to, and plan what bytes cannot restore."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch

from flowstone.errors import StateError
from flowstone.format import objects
from flowstone.format.objects import Provided, TensorRef, unsupported
from flowstone.state import generators, modules, optimizer_restore, optimizers, provider_adapter, state_dicts, tensors
from flowstone.state.collector import Collector
from flowstone.state.describe import Describer
from flowstone.state.flat import Flat, Range
from flowstone.state.kinds import CONTAINERS, Kind
from flowstone.state.names import PLAIN_KEYS, Place, check_sections, names_below, section_place
from flowstone.state.new_values import Fitting, NewValues, constant_free, kind_of, refers_to_tensors, without_tensors
from flowstone.state.records import MISSING, Difference, DifferenceKind, PerRank, Phase, Shard, Stored
from flowstone.state.registry import REGISTRY
from flowstone.state.scan import (
    Parameters,
    Scan,
    classify,
    gc_paused,
    items_of,
    only_tensors,
    provider_of,
    scan,
)
from flowstone.state.split import type_name
from flowstone.table.pieces import Alias, Layout, Memory, Pieces, Places

_ONE_VALUE = frozenset({Kind.MODULE, Kind.OPTIMIZER, Kind.GENERATOR, Kind.STATEFUL, Kind.PROVIDED})

Replacement = Callable[[], object]
"""Makes, once all bytes are in place, the value that takes another's place in its container."""


class Restoration:
    """Where a checkpoint's bytes go, how the state differs from it, and what is left to do after.

    pieces, places  wanted tensors and where their bytes go, each memory once; memory is the user's, or
                    new and owned by this object until `finish`
    aliases         further wanted names of memory that is among the pieces
    differences     between the state's and the checkpoint's objects; tensors are not compared here
    sections        of the state: what was asked for
    new_bytes       of memory among these that is new
    notes           what is left out or kept on purpose, for the report
    remedies        what to do about differences whose cause is known
    """

    def __init__(self, restorer: Restorer, sections: tuple[str, ...]) -> None:
        layout, places = restorer.close()
        self.pieces: Pieces = layout.pieces
        self.places: Places = places
        self.aliases: tuple[Alias, ...] = layout.aliases
        self.differences: tuple[Difference, ...] = tuple(restorer.differences)
        self.notes: tuple[str, ...] = tuple(restorer.notes)
        self.remedies: tuple[str, ...] = tuple(restorer.remedies)
        self.sections = sections
        self.new_bytes = restorer.new_bytes
        self._actions = restorer.actions
        self._written = restorer.written
        self._finished = False

    def finish(self) -> None:
        """Apply everything that is not bytes. Call once, with every wanted byte in place and verified.

        Values and containers first, then modules, optimizers, other objects in the state's order,
        generators last. Raises StateError when an object's own load_state_dict() raises.
        """
        assert not self._finished, "a restoration finishes once"
        self._finished = True
        _count_as_written(self._written)
        for phase in Phase:
            for action in self._actions[phase]:
                action()


@gc_paused()
def prepare(state: Mapping[str, object], stored: Stored, *, rank: int = 0, ranks: int = 1) -> Restoration:
    """Plan to restore `state` from what a checkpoint says it holds, on `rank` of `ranks`.

    raises  UnsupportedStateError for memory that cannot be written, CollisionError when two paths
            make one name, FormatError for objects that cannot be what they say

    Changes nothing: the state is as before until bytes are written into the returned memory.
    """
    sections = check_sections(state)
    restorer = Restorer(scan(state, rank), stored)
    for section, value in state.items():
        if isinstance(value, PerRank):
            restorer.per_rank(section, value, rank, ranks)
        else:
            restorer.section(section, value, state)
    return Restoration(restorer, sections)


class Restorer:
    """One restoration being planned: collects wanted memory, differences and late actions."""

    def __init__(self, found: Scan, stored: Stored) -> None:
        self.scan = found
        self.stored = stored
        self.collector = Collector()
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.remedies: list[str] = []
        self.actions: dict[Phase, list[Callable[[], None]]] = {phase: [] for phase in Phase}
        self.written: list[torch.Tensor] = []
        self.new_bytes = 0
        self._fitting = Fitting()
        self._places: dict[int, tuple[Place, object]] = {}

    @cached_property
    def parameters(self) -> Parameters:
        return self.scan.parameters()

    def differ(self, kind: DifferenceKind, name: str, expected: str, found: str) -> None:
        """Note that state and checkpoint do not fit each other."""
        self.differences.append(Difference(kind, name, expected, found))

    def later(self, phase: Phase, action: Callable[[], None]) -> None:
        """Do `action` in `finish`."""
        self.actions[phase].append(action)

    def per_rank(self, section: str, holder: PerRank, rank: int, ranks: int) -> None:
        """Plan a section that every rank keeps for itself."""
        if section in self.stored.objects and section not in self.stored.per_rank:
            self.differ("kind", section, "each rank's own value (fs.PerRank)", "one value for all ranks")
            return
        if holder.redistribute is not None and len(self.stored.by_rank.get(section, ())) not in (0, ranks):
            self._redistribute(section, holder, rank, ranks)
            return
        node = self.stored.per_rank.get(section, MISSING)
        replacement = self.node(holder.value, node, section_place(section, rank))
        if replacement is not None:
            self.later(Phase.VALUES, lambda: setattr(holder, "value", replacement()))

    def _redistribute(self, section: str, holder: PerRank, rank: int, ranks: int) -> None:
        """Plan to let a hook make our value, of what every rank that saved had."""
        value, place, kind = holder.value, section_place(section, rank), classify(holder.value)
        if kind is not Kind.STATEFUL and (kind not in (Kind.PLAIN, Kind.CONTAINER) or id(value) in self.scan.live):
            raise unsupported(
                section, value, "cannot be redistributed",
                "give redistribute= to a PerRank of plain values, or of one object with state_dict()",
            )
        new_values, hook, states = NewValues(self), holder.redistribute, self.stored.by_rank[section]
        assert hook is not None
        for number, node in enumerate(states):
            new_values.want(node, section_place(section, number))

        def redistributed() -> object:
            found = [new_values.build(node, section_place(section, number).name) for number, node in enumerate(states)]
            try:
                return hook(found, rank, ranks)
            except Exception as error:
                raise StateError(
                    f"cannot restore '{section}'", found=f"its redistribute() raised {type(error).__name__}: {error}",
                    next="fix it; tensors loaded in place, and what comes before it in the state, are already restored",
                ) from error

        if kind is Kind.STATEFUL:
            self.later(Phase.STATEFUL, lambda: _load_state(value, redistributed(), place))
        else:
            self.later(Phase.VALUES, lambda: setattr(holder, "value", self._fitting.fit(value, redistributed())))

    def section(self, section: str, value: object, state: Mapping[str, object]) -> None:
        """Plan a section that all ranks share."""
        if section in self.stored.per_rank and section not in self.stored.objects:
            self.differ("kind", section, "one value for all ranks", "each rank's own value (fs.PerRank)")
            return
        replacement = self.node(value, self.stored.objects.get(section, MISSING), section_place(section))
        if replacement is None:
            return
        if not isinstance(state, MutableMapping):
            raise unsupported(section, value, "cannot be replaced, as the state is read-only", "pass a dict")
        self.later(Phase.VALUES, lambda: operator.setitem(state, section, replacement()))

    def node(self, value: object, node: object, place: Place) -> Replacement | None:
        """Plan to restore `value` from the stored `node`, in place; or what is to take its place."""
        kind = classify(value)
        if isinstance(node, Provided) and kind is not Kind.PROVIDED:
            self.differ("kind", place.name, kind_of(value), self._unprovided(value, node))
            return None
        if kind in _ONE_VALUE:
            self._check_once(value, node, place)
        match kind:
            case Kind.PLAIN:
                return self._plain(value, node, place)
            case Kind.CONTAINER:
                if id(value) in self.scan.live or refers_to_tensors(node):
                    return self._container(value, node, place)
                return self._plain(value, node, place)
            case Kind.TENSOR:
                self.into_tensor(cast("torch.Tensor", value), node, place)
            case Kind.ARRAY:
                self.into_array(cast("np.ndarray", value), node, place)
            case Kind.SHARD:
                self._shard(cast("Shard", value), node, place)
            case Kind.FLAT:
                self._flat(cast("Flat", value), node, place)
            case Kind.MODULE:
                modules.restore(self, cast("torch.nn.Module", value), node, place)
            case Kind.GENERATOR:
                self._generator(value, node, place)
            case Kind.OPTIMIZER | Kind.STATEFUL:
                core = optimizers.core_at(value, place)
                if core is None or (kind is Kind.STATEFUL and optimizer_restore.read(node) is None):
                    self._stateful(value, node, place)
                else:
                    optimizer_restore.restore(self, core, node, place)
                    base = optimizers.base_at(value, core, place)
                    if base is not None and node is not MISSING:
                        inner = node.get("base", MISSING) if isinstance(node, dict) else MISSING
                        optimizer_restore.restore(self, base, inner, place.child("base"))
            case Kind.PROVIDED:
                served = provider_of(value)
                assert served is not None, "that is what the kind says"
                provider_adapter.restore(self, served, value, node, place)
            case Kind.PER_RANK:
                raise unsupported(place.name, value, "lies inside another value", "make it a top-level entry")
        return None

    def _unprovided(self, value: object, node: Provided) -> str:
        """What a provider saved, where none has the word now."""
        served = REGISTRY.of_kind(node.kind)
        if served is None:
            return f"{kind_of(node)}, whose provider is not registered: call register_provider() before load()"
        return f"{kind_of(node)}, whose provider serves {type_name(served.own)}, not {type_name(type(value))}"

    def plain(self, value: object, place: Place) -> object:
        """An object of the state as a checkpoint would have it; no tensors."""
        return Describer(self.scan, Collector(objects_only=True)).node(value, place)

    def _check_once(self, value: object, node: object, place: Place) -> None:
        """An object in two places of the state can take one value only: both were saved with the same."""
        first = self._places.setdefault(id(value), (place, node))
        if first[0] is place or node is MISSING or first[1] is MISSING:
            return
        mine, theirs = (objects.encode(without_tensors(one), place.name) for one in (node, first[1]))
        if mine != theirs:
            self.differ("kind", place.name, f"as in '{first[0].name}', which is the same object", "another value")

    def _plain(self, value: object, node: object, place: Place) -> Replacement | None:
        if node is MISSING:
            self.differ("missing", place.name, kind_of(value), "nothing of that name")
            return None
        if refers_to_tensors(node) and type(value) is not deque:
            return None  # those tensors are wanted by nobody, which is reported with all others
        new_values = NewValues(self)
        new_values.want(node, place)
        return lambda: self._fitting.fit(value, new_values.build(node, place.name))

    def _container(self, value: object, node: object, place: Place) -> Replacement | None:
        """A container with something to write in place: item by item, strict about its keys."""
        mapping = isinstance(value, dict)
        if state_dicts.is_optimizers(value) and self._is_lost_on(value, node, place):
            return None
        if type(value) is not tuple:
            self._check_once(value, node, place)
        if node is not MISSING and (type(node) not in CONTAINERS or isinstance(node, dict) != mapping):
            self.differ("kind", place.name, kind_of(value), kind_of(node))
            return None
        replaced: dict[object, Replacement] = {}
        only = only_tensors(value) if place.rank is None else None
        if only is not None:
            keys, wanted = only
            self.into_tensors(place, keys, names_below(place.name, keys), wanted)
            stored = _beside(node, keys, place)
        else:
            stored = _by_key(node, place)
            for key, item in items_of(value):
                replacement = self.node(item, stored.pop(key, MISSING), place.child(key))
                if replacement is not None:
                    replaced[key] = replacement
        for key, item in stored.items():
            if not refers_to_tensors(item):
                self.differ("unexpected", place.child(key).name, "nothing of that name", kind_of(item))
        if type(value) is tuple:
            return partial(_rebuilt, value, replaced) if replaced else None
        for key, replacement in replaced.items():
            self.later(Phase.VALUES, partial(_replace, cast("dict[object, object]", value), key, replacement))
        return None

    def _is_lost_on(self, value: object, node: object, place: Place) -> bool:
        """Whether what is stored of an optimizer has no place in the state_dict() that is to take it."""
        itself = f"pass the optimizer itself as {place.path}, not its state_dict()"
        if optimizer_restore.read(node) is not None:
            self.differ("kind", place.name, "the state_dict() of an optimizer", "an optimizer")
            self.remedies.append(itself)
            return True
        if state_dicts.is_optimizers(node) and state_dicts.is_fresh(value, node):
            self.remedies.append(f"{itself}: this one is new and has no tensors to load into")
        return False

    def want(self, place: Place, made: torch.Tensor | np.ndarray) -> None:
        """Want memory of our own making."""
        self.new_bytes += made.nbytes
        if isinstance(made, torch.Tensor):
            self.collector.enter(place, made)
        else:
            self.collector.add_array(place, made)

    def _named(self, node: object, place: Place) -> Place:
        """Where a wanted tensor is stored: by its own name; per rank, by the name of the rank that saved it."""
        if place.rank is not None and isinstance(node, TensorRef):
            return place.called(self.stored.rename(node.name), place.key)
        return place

    def into_tensor(
        self, tensor: torch.Tensor, node: object, place: Place, *, within: Shard | Range | None = None
    ) -> None:
        """Want a tensor's elements in its own memory, which has to hold each of them by itself."""
        self.written.append(tensor)
        self.collector.enter(self._named(node, place), tensor, within=within)

    def into_copy(self, tensor: torch.Tensor, dtype: torch.dtype, node: object, place: Place) -> None:
        """Want a tensor's elements in another dtype; they are cast when all are in place."""
        aside = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        self.into_tensor(aside, node, place)
        self.later(Phase.VALUES, partial(_copy_into, tensor, aside))

    def into_tensors(
        self, place: Place, keys: Sequence[object], names: Sequence[str], values: Sequence[torch.Tensor]
    ) -> None:
        """Want the elements of tensors of one place, that no rank keeps for itself, each in its own memory."""
        self.written += values
        self.collector.enter_all(place, keys, names, values)

    def close(self) -> tuple[Layout, Places]:
        """What is wanted, once everything has been. Tensors that only note their sign get their values later."""
        columns = self.collector.look(hold=False)
        apart = {}
        for position in columns.odd:
            tensor = self.collector.tensors[position]
            if tensors.deferred(tensor):
                aside = tensors.empty(columns.dtypes[position], tensor.shape, device=tensor.device)
                self.later(Phase.VALUES, partial(_copy_into, tensor, aside))
                apart[position] = tensors.memory_of(aside)
            else:
                apart[position] = tensors.memory_of(tensor)
                self._check_apart(apart[position], tensor, self.collector.names[position])
        layout, places, _ = self.collector.close(columns, apart)
        return layout, places

    def into_array(self, array: np.ndarray, node: object, place: Place, *, within: Shard | None = None) -> None:
        """Want an array's elements in its own memory."""
        place = self._named(node, place)
        dtype = tensors.check_array(array, place.name)
        if not array.flags.writeable:
            raise unsupported(place.name, array, "cannot be loaded into: it is read-only", "pass a copy() of it")
        aside = tensors.ascending(array)
        memory = tensors.array_memory(aside)
        self._check_apart(memory, array, place.name)
        self.collector.add(place, dtype, memory, within=within)
        if aside is not array:
            self.later(Phase.VALUES, partial(np.copyto, array, aside))

    def _check_apart(self, memory: Memory, value: object, name: str) -> None:
        if tensors.overlaps_itself(memory):
            raise unsupported(
                name, value, "cannot be loaded into: its elements share memory", "pass a contiguous copy of it"
            )

    def _shard(self, shard: Shard, node: object, place: Place) -> None:
        if isinstance(shard.tensor, torch.Tensor):
            self.into_tensor(shard.tensor, node, place, within=shard)
        else:
            self.into_array(shard.tensor, node, place, within=shard)

    def _flat(self, flat: Flat, node: object, place: Place) -> None:
        if node is not MISSING and not isinstance(node, dict):
            self.differ("kind", place.name, "a flat tensor's members", kind_of(node))
            return
        for span in flat.spans:
            inner = place.called(f"{place.name}.{span.name}", span.name)
            self.into_tensor(span.of(flat.tensor), MISSING, inner, within=span.range)
        modules.differ_extra(self, node if isinstance(node, dict) else {}, {span.name for span in flat.spans}, place)

    def _generator(self, generator: object, node: object, place: Place) -> None:
        if node is MISSING:
            self.differ("missing", place.name, kind_of(generator), "nothing of that name")
            return
        current = generators.state_of(generator, place.name)
        if not generators.fits(current, node, self.stored):
            self.differ("kind", place.name, generators.label(current, generator), generators.label(node, node))
            return
        new_values = NewValues(self)
        new_values.want(node, place)
        missing = generators.devices_missing(node)
        if missing:
            self.notes.append(f"{place.name}: {missing} GPU(s) are not here, so their generators were skipped")
        self.later(Phase.GENERATORS, lambda: _load_generator(generator, new_values.build(node, place.name), place))

    def _stateful(self, value: object, node: object, place: Place) -> None:
        if node is MISSING:
            self.differ("missing", place.name, kind_of(value), "nothing of that name")
            return
        new_values = NewValues(self)
        new_values.want(node, place)
        self.later(Phase.STATEFUL, lambda: _load_state(value, new_values.build(node, place.name), place))


def _by_key(node: object, place: Place) -> dict[object, object]:
    """A stored container's items by the keys that the state's own container would have."""
    if node is MISSING:
        return {}
    return {constant_free(key, place.name): item for key, item in items_of(node)}


def _beside(node: object, keys: Sequence[object], place: Place) -> dict[object, object]:
    """A stored container's items that are not at one of `keys`, which are a container's of the same kind."""
    if isinstance(node, (list, tuple)):
        return dict(list(enumerate(node))[len(keys) :])
    if isinstance(node, dict) and PLAIN_KEYS.issuperset(map(type, node)) and list(node) == keys:
        return {}  # as it nearly always is
    wanted = set(keys)
    return {key: item for key, item in _by_key(node, place).items() if key not in wanted}


def _count_as_written(written: Sequence[torch.Tensor]) -> None:
    """Bytes went in behind autograd's back: a graph that saved the old values has to notice."""
    try:
        torch.autograd.graph.increment_version(written)
    except RuntimeError:  # some are inference tensors, which have no version; to count the others twice is harmless
        torch.autograd.graph.increment_version([one for one in written if not one.is_inference()])


def _rebuilt(value: tuple[object, ...], replaced: Mapping[object, Replacement]) -> tuple[object, ...]:
    return tuple(replaced[i]() if i in replaced else item for i, item in enumerate(value))


def _replace(container: dict[object, object], key: object, replacement: Replacement) -> None:
    container[key] = replacement()


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _load_generator(generator: object, state: object, place: Place) -> None:
    try:
        generators.restore(generator, state)
    except Exception as error:
        raise StateError(
            f"cannot restore '{place.name}'",
            found=f"the generator refused the stored state: {type(error).__name__}: {error}",
            next="run `flowstone verify`; everything but generators is already restored",
        ) from error


def _load_state(value: object, tree: object, place: Place) -> None:
    try:
        value.load_state_dict(tree)  # type: ignore[attr-defined]
    except Exception as error:
        raise StateError(
            f"cannot restore '{place.name}'",
            found=f"load_state_dict() raised {type(error).__name__}: {error}",
            next="fix that load_state_dict(); what comes before it in the state is already restored",
        ) from error
