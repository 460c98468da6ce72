"""Dictionaries, lists and tuples: described and restored item by item."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import torch

from flowstone.format.merge_points import MergePoint
from flowstone.format.objects import tensor_refs
from flowstone.state import state_dicts
from flowstone.state.constants import constant_free, stored_key
from flowstone.state.kind import Kind
from flowstone.state.kinds import plain
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import PLAIN_KEYS, Place, names_below
from flowstone.state.nodes import kind_of, refers_to_tensors
from flowstone.state.records import MISSING, Phase
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role
from flowstone.state.tensors import DENSE_TYPES

_TYPES = frozenset({dict, OrderedDict, list, tuple})


class Container(Kind):
    """A container; may hold values of any kind."""

    types = _TYPES
    nests = True
    replaceable = True

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        only = _only_tensors(value)
        if only is not None:
            scan.tensors.append((place, *only))
            scan.live.add(id(value))
            return True
        live = False
        for key, item in _items_of(value):
            # Most items are plain leaves: create a place only for the others.
            if type(item) not in plain.TYPES and scan.walk(item, place.child(key)):
                live = True
        if live:
            scan.live.add(id(value))
        return live

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        if type(value) is OrderedDict and vars(value) and id(value) not in saving.scan.live:
            # One of the caller's keeps its attributes; others are made anew at load.
            from flowstone.state import fields  # imported here: few state dicts have any

            return fields.describe(value, place, saving)
        only = _only_tensors(value)
        if only is not None:
            return _references(value, place, saving, *only)
        walk = saving.walk
        # Most items are immutable values: create no place and make no call for them.
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

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        if id(value) in loading.scan.live or refers_to_tensors(node):
            return self._item_by_item(value, node, place, loading)
        return plain.restore(value, node, place, loading)

    def _item_by_item(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        """Restore a container with something to write in place: its keys must match.

        One container at two places, for which the checkpoint has two values, is replaced by two containers.
        """
        mapping = isinstance(value, dict)
        if state_dicts.is_optimizers(value) and state_dicts.is_lost_on(loading, value, node, place):
            return None
        own = None
        if type(value) is not tuple and loading.first_unlike(value, node, place) is not None:
            own = value = copy.copy(value)
        if node is not MISSING and (type(node) not in _TYPES or isinstance(node, dict) != mapping):
            loading.differ("kind", place.name, kind_of(value), kind_of(node))
            return None
        replaced: dict[object, Replacement] = {}
        only = _only_tensors(value) if place.rank is None else None
        if only is not None:
            keys, wanted = only
            loading.into_tensors(place, keys, names_below(place.name, keys), wanted)
            stored = _beside(node, keys, place)
        else:
            stored = _by_key(node, place)
            for key, item in _items_of(value):
                replacement = loading.walk(item, place.child(key), stored.pop(key, MISSING))
                if replacement is not None:
                    replaced[key] = replacement
        for key, item in stored.items():
            if not refers_to_tensors(item):
                loading.differ("unexpected", place.child(key).name, "nothing of that name", kind_of(item))
        if type(value) is tuple:
            return partial(_rebuilt, value, replaced) if replaced else None
        for key, replacement in replaced.items():
            loading.later(Phase.VALUES, partial(_replace, cast("dict[object, object]", value), key, replacement))
        return None if own is None else lambda: own


def _references(
    value: object, place: Place, saving: Saving, keys: Sequence[object], values: Sequence[torch.Tensor]
) -> object:
    """The object for a container that holds only tensors, which are entered."""
    names = names_below(place.name, keys)
    saving.sink.enter_all(place, keys, names, values)
    references = tensor_refs(names)
    if isinstance(value, dict):
        plain_keys = PLAIN_KEYS.issuperset(map(type, keys))
        stored_keys = keys if plain_keys else [stored_key(key, place) for key in keys]
        return _container_type(value, saving)(zip(stored_keys, references, strict=True))
    return references if type(value) is list else tuple(references)


def _container_type(value: object, saving: Saving) -> type[dict[object, object]]:
    """The type that represents a dict: a MergePoint, if its items are restored one by one."""
    if type(value) is OrderedDict:
        return OrderedDict
    return MergePoint if id(value) in saving.scan.live else dict


def _only_tensors(value: object) -> tuple[Sequence[object], Sequence[torch.Tensor]] | None:
    """The keys and tensors of a container that holds only tensors, and is not empty; else None."""
    items = list(value.values()) if isinstance(value, dict) else cast("Sequence[object]", value)
    if not items or type(items[0]) not in DENSE_TYPES or not DENSE_TYPES.issuperset(map(type, items)):
        return None
    keys = list(value) if isinstance(value, dict) else range(len(items))
    return keys, cast("Sequence[torch.Tensor]", items)


def _items_of(value: object) -> Iterable[tuple[object, object]]:
    """Keys and items of a container; the keys of a sequence are positions."""
    if isinstance(value, dict):
        return cast("Iterable[tuple[object, object]]", value.items())
    return enumerate(cast("Iterable[object]", value))


def _by_key(node: object, place: Place) -> dict[object, object]:
    """A stored container's items, by the keys of the state's own container."""
    if node is MISSING:
        return {}
    return {constant_free(key, place.name): item for key, item in _items_of(node)}


def _beside(node: object, keys: Sequence[object], place: Place) -> dict[object, object]:
    """A stored container's items with other keys than `keys`."""
    if isinstance(node, (list, tuple)):
        return dict(list(enumerate(node))[len(keys) :])
    if isinstance(node, dict) and PLAIN_KEYS.issuperset(map(type, node)) and list(node) == keys:
        return {}  # the usual case
    wanted = set(keys)
    return {key: item for key, item in _by_key(node, place).items() if key not in wanted}


def _rebuilt(value: tuple[object, ...], replaced: Mapping[object, Replacement]) -> tuple[object, ...]:
    return tuple(replaced[i]() if i in replaced else item for i, item in enumerate(value))


def _replace(container: dict[object, object], key: object, replacement: Replacement) -> None:
    container[key] = replacement()
