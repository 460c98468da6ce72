"""Untie: entries of state dicts that share memory get tensors of their own where the checkpoint has different values.

The `state_dict()` of a new object may have one tensor, or one list of tensors, at two places: a new SequentialLR has
the learning rates of its first scheduler. Such entries can be replaced, as `torch.load` makes new ones. Memory of
modules and the slots of optimizers cannot: they would not have the stored values.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from flowstone.state.names import Place
from flowstone.state.records import Phase
from flowstone.state.unpacked import is_module, is_optimizer

if TYPE_CHECKING:
    from flowstone.state.loading import Loading
    from flowstone.table.pieces import Alias

Keys: TypeAlias = "tuple[object, ...]"
"""They lead from the state to an entry."""


class ReplaceableEntries:
    """Tensors in plain containers of a state that no module and no optimizer holds, as far as the state shows."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state
        self._tensors: dict[Keys, torch.Tensor] = {}
        self._reached = set[int]()  # by id: containers
        self._shared = set[int]()  # those at several places
        for section, value in state.items():
            self._find(value, (section,))

    def _find(self, value: object, keys: Keys) -> None:
        if type(value) not in (dict, OrderedDict, list, tuple) or is_module(value):
            return
        (self._shared if id(value) in self._reached else self._reached).add(id(value))
        slots = is_optimizer(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(cast("Sequence[object]", value)):
            if slots and not str(key).startswith("param_groups"):
                continue
            if type(item) is torch.Tensor and not item.requires_grad:
                self._tensors[(*keys, key)] = item
            else:
                self._find(item, (*keys, key))

    def among(self, entries: Iterable[tuple[Keys, torch.Tensor]]) -> set[Keys]:
        """The keys of the entries that can be replaced: none whose memory another entry has for good."""
        known = list(entries)
        fixed = {_memory(tensor) for keys, tensor in known if keys not in self._tensors}
        return {keys for keys, tensor in known if keys in self._tensors and _memory(tensor) not in fixed}

    def put(self, keys: Keys, tensor: torch.Tensor) -> None:
        """Put a tensor in the place of an entry. A list or dict that is at other places, too, stays there as it is."""
        self._put(self._state, keys, tensor)

    def _put(self, holder: Any, keys: Keys, tensor: torch.Tensor) -> object:
        key, *rest = keys
        inner = self._put(holder[key], tuple(rest), tensor) if rest else tensor
        if inner is holder[key]:
            return holder
        if type(holder) is tuple:
            at = cast("int", key)
            return (*holder[:at], inner, *holder[at + 1 :])
        own = copy.copy(holder) if id(holder) in self._shared else holder
        own[key] = inner
        return own


def _memory(tensor: torch.Tensor) -> object:
    """Equal for tensors that are views of one memory."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def new_memory(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor of the same shape, dtype and device, contiguous."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def untie(state: Mapping[str, object], loading: Loading, aliases: Sequence[Alias]) -> list[int]:
    """Request memory of its own for each of these aliases that can be replaced; returns their positions in the sink.

    aliases  which are stored with other values than their targets
    """
    if not isinstance(state, MutableMapping):
        return []
    sink, entries = loading.sink, ReplaceableEntries(state)
    position = {name: at for at, name in enumerate(sink.names)}
    keys = [_keys(sink.place(at)) for at in range(len(sink.names))]
    replaceable = entries.among(zip(keys, sink.tensors, strict=True))
    made: dict[str, torch.Tensor] = {}
    untied: list[int] = []
    for alias in aliases:
        at = position.get(alias.name)
        if at is None or keys[at] not in replaceable:
            continue
        stored = loading.stored.tied.get(alias.name, alias.name)
        if stored not in made:
            made[stored] = new_memory(sink.tensors[at])
            loading.new_bytes += made[stored].nbytes
        sink.tensors[at] = made[stored]
        loading.later(Phase.VALUES, partial(entries.put, keys[at], made[stored]))
        loading.notes.append(f"{alias.name}: shared memory with {alias.target}, and is now a tensor of its own")
        untied.append(at)
    return untied


def _keys(place: Place) -> Keys:
    own = (place.key,)
    return own if place.parent is None else (*_keys(place.parent), *own)
