"""Dictionaries, lists and tuples, which are saved and restored item by item."""

from __future__ import annotations

import collections
import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import cast

from flowstone.format.merge_points import MergePoint
from flowstone.format.objects import tensor_refs
from flowstone.state import state_dicts
from flowstone.state.constants import resolve_constants, stored_key
from flowstone.state.framework import FRAMEWORK
from flowstone.state.kind import ValueKind
from flowstone.state.kinds import plain
from flowstone.state.loading import Replacement, RestorePass
from flowstone.state.names import PLAIN_KEYS, Place, names_below
from flowstone.state.nodes import describe_node, refers_to_tensors
from flowstone.state.records import MISSING, RestorePhase
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole

_TYPES = frozenset({dict, OrderedDict, list, tuple})
_DENSE_TYPES = FRAMEWORK.DENSE_TYPES


class ContainerKind(ValueKind):
    """A container of values of any kind."""

    types = _TYPES
    nests = True
    replaceable = True

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        only = _only_tensors(value)
        if only is not None:
            scan.tensors.append((place, *only))
            scan.live.add(id(value))
            return True
        live = False
        for key, item in _items_of(value):
            # Most items are plain values. A Place is created only for the others.
            if type(item) not in plain.TYPES and scan.walk(item, place.child(key)):
                live = True
        if live:
            scan.live.add(id(value))
        return live

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> object:
        if type(value) is OrderedDict and vars(value) and id(value) not in saving.scan.live:
            # An existing OrderedDict keeps its attributes at a load; only one that a load creates needs them stored.
            from flowstone.state import fields  # imported here: few state dicts have any

            return fields.describe(value, place, saving)
        only = _only_tensors(value)
        if only is not None:
            return _references(value, place, saving, *only)
        walk = saving.walk
        # Most items are immutable values, for which no Place is created and no function called.
        if isinstance(value, dict):
            return _container_type(value, saving)([
                (
                    stored_key(key, place),
                    item if type(item) in plain.IMMUTABLE else walk(item, place.child(key)),
                )
                for key, item in value.items()
            ])
        items = [
            item if type(item) in plain.IMMUTABLE else walk(item, place.child(i))
            for i, item in enumerate(cast("Sequence[object]", value))
        ]
        return items if type(value) is list else tuple(items)

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        if id(value) in loading.state_scan.live or refers_to_tensors(node):
            return self._item_by_item(value, node, place, loading)
        return plain.restore(value, node, place, loading)

    def _item_by_item(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        """Restore a container item by item, because something in it is written in place. Its keys must equal the stored
        ones.

        If a container is at two places of the state, for which the checkpoint has different values, it is replaced by
        two containers.
        """
        mapping = isinstance(value, dict)
        if state_dicts.is_optimizer_state_dict(value) and state_dicts.refuse_optimizer_state(
            loading, value, node, place
        ):
            return None
        own = None
        if type(value) is not tuple and loading.first_conflict(value, node, place) is not None:
            own = value = copy.copy(value)
        if node is not MISSING and (type(node) not in _TYPES or isinstance(node, dict) != mapping):
            loading.add_difference("kind", place.name, describe_node(value), describe_node(node))
            return None
        replaced: dict[object, Replacement] = {}
        only = _only_tensors(value) if place.rank is None else None
        if only is not None:
            keys, kept_names = only
            loading.request_tensors(place, keys, names_below(place.name, keys), kept_names)
            stored = _beside(node, keys, place)
        else:
            stored = _by_key(node, place)
            for key, item in _items_of(value):
                replacement = loading.walk(item, place.child(key), stored.pop(key, MISSING))
                if replacement is not None:
                    replaced[key] = replacement
        for key, item in stored.items():
            if not refers_to_tensors(item):
                loading.add_difference("unexpected", place.child(key).name, "nothing of that name", describe_node(item))
        if type(value) is tuple:
            return partial(_rebuilt, value, replaced) if replaced else None
        for key, replacement in replaced.items():
            loading.defer(RestorePhase.VALUES, partial(_replace, cast("dict[object, object]", value), key, replacement))
        return None if own is None else lambda: own


def _references(
    value: object, place: Place, saving: DescribePass, keys: Sequence[object], values: Sequence[object]
) -> object:
    """Add the items of a container to the sink; all of them must be tensors. Returns the stored form of the container.
    """
    names = names_below(place.name, keys)
    saving.sink.enter_all(place, keys, names, values)
    references = tensor_refs(names)
    if isinstance(value, dict):
        plain_keys = PLAIN_KEYS.issuperset(map(type, keys))
        stored_keys = keys if plain_keys else [stored_key(key, place) for key in keys]
        return _container_type(value, saving)(zip(stored_keys, references, strict=True))
    return references if type(value) is list else tuple(references)


def _container_type(value: object, saving: DescribePass) -> type[dict[object, object]]:
    """The type of the stored form: OrderedDict for an OrderedDict. For a dict, MergePoint if its items are restored one
    by one, otherwise dict.
    """
    if type(value) is OrderedDict:
        return OrderedDict
    return MergePoint if id(value) in saving.scan.live else dict


def _only_tensors(value: object) -> tuple[Sequence[object], Sequence[object]] | None:
    """The keys and items of a container, if it is not empty and all its items are tensors; otherwise None."""
    items = list(value.values()) if isinstance(value, dict) else cast("Sequence[object]", value)
    if not items or type(items[0]) not in _DENSE_TYPES or not _DENSE_TYPES.issuperset(map(type, items)):
        return None
    keys = list(value) if isinstance(value, dict) else range(len(items))
    return keys, items


def _items_of(value: object) -> Iterable[tuple[object, object]]:
    """Keys and items of a container; the keys of a sequence are its positions."""
    if isinstance(value, dict):
        return cast("Iterable[tuple[object, object]]", value.items())
    return enumerate(cast("Iterable[object]", value))


def _by_key(node: object, place: Place) -> dict[object, object]:
    """The items of a stored container, with keys as the state's container has them."""
    if node is MISSING:
        return {}
    return {resolve_constants(key, place.name): item for key, item in _items_of(node)}


def _beside(node: object, keys: Sequence[object], place: Place) -> dict[object, object]:
    """Those items of a stored container whose keys are not in `keys`."""
    if isinstance(node, (list, tuple)):
        return dict(list(enumerate(node))[len(keys) :])
    if isinstance(node, dict) and PLAIN_KEYS.issuperset(map(type, node)) and list(node) == keys:
        return {}  # usually all keys are in `keys`
    given = set(keys)
    return {key: item for key, item in _by_key(node, place).items() if key not in given}


def _rebuilt(value: tuple[object, ...], replaced: Mapping[object, Replacement]) -> tuple[object, ...]:
    return tuple(replaced[i]() if i in replaced else item for i, item in enumerate(value))


def _replace(container: dict[object, object], key: object, replacement: Replacement) -> None:
    container[key] = replacement()


class DequeKind(ValueKind):
    """A deque of values, which may be tensors. A load replaces its values; none is written in place."""

    types = frozenset({collections.deque})
    nests = True
    replaceable = True

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        return False

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> object:
        line = cast("collections.deque[object]", value)
        with saving.inner_objects_as("refused"):
            items = [saving.walk(item, place.child(i)) for i, item in enumerate(line)]
        return collections.deque(items, line.maxlen)

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        return plain.restore(value, node, place, loading, holds_tensors=True)


class CounterKind(ValueKind):
    """A collections.Counter: counts by key."""

    types = frozenset({collections.Counter})
    nests = True
    replaceable = True

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        return False

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> object:
        built: collections.Counter[object] = collections.Counter()
        with saving.inner_objects_as("refused"):
            for key, count in cast("collections.Counter[object]", value).items():
                built[stored_key(key, place)] = cast("int", saving.walk(count, place.child(key)))
        return built

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        return plain.restore(value, node, place, loading)
