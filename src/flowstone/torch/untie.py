"""Untie: entries of state dicts that share memory get separate tensors if the checkpoint has different values for them.

The `state_dict()` of a new object may have one tensor, or one list of tensors, at two places. For example, a new
SequentialLR shares the learning rates of its first scheduler. Such entries of a dict can be replaced by new tensors.
Tensors of modules and optimizers cannot be replaced, because the objects would not get the stored values.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from flowstone.state.names import Place
from flowstone.state.records import RestorePhase
from flowstone.torch.unpacked import is_module_dict, is_optimizer_dict

if TYPE_CHECKING:
    from flowstone.state.loading import RestorePass
    from flowstone.table.pieces import Alias

Keys: TypeAlias = "tuple[object, ...]"
"""The keys that lead from the state to an entry."""


class ReplaceableEntries:
    """Tensors in plain containers of a state that belong to no module and no optimizer in it."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state
        self._tensors: dict[Keys, torch.Tensor] = {}
        self._reached = set[int]()  # ids of all containers
        self._shared = set[int]()  # ids of containers that are at several places
        for section, value in state.items():
            self._find(value, (section,))

    def _find(self, value: object, keys: Keys) -> None:
        if type(value) not in (dict, OrderedDict, list, tuple) or is_module_dict(value):
            return
        (self._shared if id(value) in self._reached else self._reached).add(id(value))
        slots = is_optimizer_dict(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(cast("Sequence[object]", value)):
            if slots and not str(key).startswith("param_groups"):
                continue
            if type(item) is torch.Tensor and not item.requires_grad:
                self._tensors[(*keys, key)] = item
            else:
                self._find(item, (*keys, key))

    def find_replaceable(self, entries: Iterable[tuple[Keys, torch.Tensor]]) -> set[Keys]:
        """The keys of those entries that can be replaced: no tensor that must stay shares their memory."""
        listed = list(entries)
        fixed = {_memory(tensor) for keys, tensor in listed if keys not in self._tensors}
        return {keys for keys, tensor in listed if keys in self._tensors and _memory(tensor) not in fixed}

    def put(self, keys: Keys, tensor: torch.Tensor) -> None:
        """Replace an entry by a tensor. A list or dict that is also at other places is not changed there."""
        self._put(self._state, keys, tensor)

    def _put(self, holder: Any, keys: Keys, tensor: torch.Tensor) -> object:
        key, *rest = keys
        inner = self._put(holder[key], tuple(rest), tensor) if rest else tensor
        if inner is holder[key]:
            return holder
        if type(holder) is tuple:
            index = cast("int", key)
            return (*holder[:index], inner, *holder[index + 1 :])
        own = copy.copy(holder) if id(holder) in self._shared else holder
        own[key] = inner
        return own


def _memory(tensor: torch.Tensor) -> object:
    """A key that is equal for tensors that are views of the same memory."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def new_memory(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor of the same shape, dtype and device, contiguous."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def untie(state: Mapping[str, object], loading: RestorePass, aliases: Sequence[Alias]) -> list[int]:
    """Request separate memory for each alias that can be replaced. Returns the positions of these aliases in the sink
    (the collector of the tensors).

    aliases  names of tensors that share memory with another one in the state, but are stored with other values
    """
    if not isinstance(state, MutableMapping):
        return []
    sink, entries = loading.sink, ReplaceableEntries(state)
    position = {name: row for row, name in enumerate(sink.names)}
    keys = [_keys(sink.place(row)) for row in range(len(sink.names))]
    replaceable = entries.find_replaceable(zip(keys, sink.tensors, strict=True))
    made: dict[str, torch.Tensor] = {}
    untied: list[int] = []
    for alias in aliases:
        row = position.get(alias.name)
        if row is None or keys[row] not in replaceable:
            continue
        stored = loading.stored.tied.get(alias.name, alias.name)
        if stored not in made:
            made[stored] = new_memory(sink.tensors[row])
            loading.count_new(made[stored].nbytes)
        sink.tensors[row] = made[stored]
        loading.defer(RestorePhase.VALUES, partial(entries.put, keys[row], made[stored]))
        loading.notes.append(
            f"{alias.name}: shared memory with {alias.target} when it was saved, but is now a separate tensor"
        )
        untied.append(row)
    return untied


def _keys(place: Place) -> Keys:
    own = (place.key,)
    return own if place.parent is None else (*_keys(place.parent), *own)
