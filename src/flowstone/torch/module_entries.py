"""Modules that have hooks, extra state or a load of their own. They are saved and restored by the entries of their
state_dict().
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import cast

import torch

from flowstone.format.merge_points import MergePoint
from flowstone.format.objects import ProviderRecord, TensorRef
from flowstone.state.imported import class_if_imported
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place, strip_wrappers
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import describe_node
from flowstone.state.records import MISSING, RestorePhase
from flowstone.state.saving import DescribePass
from flowstone.state.scan import failed_call_error
from flowstone.state.sink import TensorRole
from flowstone.torch import fsdp1_entries, quantised, tensors
from flowstone.torch.framework import copy_into
from flowstone.torch.fsdp1 import FsdpModule
from flowstone.torch.fsdp2 import drop_gathered, with_shards
from flowstone.torch.models import StateModels
from flowstone.torch.module_loads import EXTRA_STATE, CustomLoads, find_unread_keys, load_entries, warn_of_unread
from flowstone.torch.module_tensors import ModuleTensors
from flowstone.torch.roles import ModuleRoles
from flowstone.torch.tensor_subclasses import copy_of, find_tensor_provider, is_made_of_tensors
from flowstone.torch.trees import find_self_changing


def describe(module: torch.nn.Module, place: Place, saving: DescribePass) -> MergePoint:
    """Add the entries of the module's state_dict() to the save, one by one. Returns the entries that must be listed
    by name: for this, the checkpoint stores one object for each module.

    This object lists values that are not tensors, tensors that are not the memory of a parameter or buffer (made by a
    hook of state_dict(), or extra state), and tensors that a provider (fs.Provider) describes. A load finds the
    module's other tensors by their names, so they are not listed. In a section with one value per rank, all entries are
    listed.
    """
    fsdp, module = saving.scan.part(StateModels).wrapped(module, place), with_shards(module)
    restless = frozenset[int]().union(*map(find_self_changing, module.modules()))
    roles = ModuleRoles(saving.stepped, restless, module.parameters())
    if fsdp is not None:
        fsdp1_entries.describe(fsdp, place, saving, roles)
    entries = state_dict(module, place, fsdp)
    live = ModuleTensors(module)
    extra = MergePoint()
    for key, value in entries.items():
        name = strip_wrappers(key)
        inner = place.called(f"{place.name}.{name}", key)
        dtype = None if fsdp is None else fsdp.dtype_saved(name, value)
        if dtype is not None:
            saving.sink.enter(inner, cast("torch.Tensor", value).detach().to(dtype), role=TensorRole.BUFFER)
            continue
        held = live.own(value)
        role = TensorRole.OTHER if held is None else roles.role_of(held, isinstance(held, torch.nn.Parameter))
        with saving.inner_objects_as("marked"):
            node = saving.walk(value, inner, role)
        # The module's own tensors are identified by names; but not if another rank may load this per-rank entry.
        if held is None or type(node) is not TensorRef or place.rank is not None:
            extra[name] = node
    if not_read := tuple(find_unread_keys(module, [key for key, value in entries.items() if not live.has(value)])):
        warn_of_unread(place.name, not_read)
    return extra


def restore(
    module: torch.nn.Module, extra: Mapping[str, object], place: Place, loading: RestorePass
) -> None:
    """Request the entries of the module's state_dict(), one by one.

    `extra`: those entries that are listed, by name, in the object that the checkpoint stores for this module. The
    module's other tensors are found by their names (see `describe`).
    """
    fsdp, shards = loading.state_scan.part(StateModels).wrapped(module, place), with_shards(module)
    if fsdp is not None:
        fsdp1_entries.restore(fsdp, place, loading)
    loading.defer(RestorePhase.MODULES, partial(drop_gathered, module))
    entries = state_dict(shards, place, fsdp)
    live, own_loads = ModuleTensors(shards), CustomLoads(module)
    unread = _unread(module, entries, live, extra, place, loading)
    new_values = NewValues(loading, phase=RestorePhase.MODULES)
    given: dict[str, Callable[[], object]] = {}
    scales = quantised.scales(module, entries) if own_loads else frozenset[str]()
    names = set() if fsdp is None else set(fsdp.names)
    for key, value in entries.items():
        name = strip_wrappers(key)
        if key in unread:
            continue
        names.add(name)
        inner = place.called(f"{place.name}.{name}", key)
        own = extra.get(name, MISSING)
        dtype = None if fsdp is None else fsdp.dtype_saved(name, value)
        if dtype is not None and live.has(value):
            _into_copy(loading, cast("torch.Tensor", value), dtype, own, inner)
        elif live.has(value):
            grown = _resized_target(value, own, inner, loading) if own_loads.affects(name) else None
            if grown is not None:
                given[key] = grown
                continue
            if isinstance(own, ProviderRecord) and find_tensor_provider(value) is None:
                loading.add_difference("kind", inner.name, "a tensor", describe_node(own))
                own = MISSING
            loading.walk(value, inner, own)
            if own_loads:
                given[key] = partial(_itself, value)
        elif key in scales:
            loading.request_tensor(cast("torch.Tensor", value).detach(), own, inner)
        elif isinstance(value, torch.Tensor) and not key.endswith(EXTRA_STATE):
            given[key] = _tensor_aside(loading, value, own, inner)
        elif own is MISSING:
            loading.add_difference("missing", inner.name, describe_node(value), "nothing of that name")
        else:
            new_values.request(own, inner, value)
            given[key] = partial(new_values.build, own, inner.name)
    given |= _not_shown(own_loads, names, extra, place, loading)
    loading.add_unexpected(extra, names, place)
    if given or own_loads:
        _load_later(module, given, names, getattr(entries, "_metadata", None), place, loading)


def _load_later(
    module: torch.nn.Module, given: Mapping[str, Callable[[], object]], shown: Collection[str], metadata: object,
    place: Place, loading: RestorePass,
) -> None:
    """Plan to call the module's load_state_dict() once all bytes are read."""
    fsdp = loading.state_scan.part(StateModels).wrapped(module, place)

    def load() -> None:
        built = {key: build() for key, build in given.items()}
        load_entries(module, built, metadata, place, fsdp=fsdp, shown=shown, stored=loading.stored)

    loading.defer(RestorePhase.MODULES, load)


def _into_copy(loading: RestorePass, tensor: torch.Tensor, dtype: torch.dtype, node: object, place: Place) -> None:
    """Request a tensor's elements in the dtype `dtype`, in new memory; after the read they are cast into the tensor."""
    aside = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    loading.request_tensor(aside, node, place)
    loading.defer(RestorePhase.VALUES, partial(copy_into, tensor, aside))


def _itself(value: object) -> object:
    return value


def _unread(
    module: torch.nn.Module, entries: Mapping[str, object], live: ModuleTensors, extra: Mapping[str, object],
    place: Place,
    loading: RestorePass,
) -> Collection[str]:
    """Entries that no load of the module reads. They are not requested, so stored ones are reported as unexpected."""
    keys = set(find_unread_keys(module, [key for key, value in entries.items() if not live.has(value)]))
    names = [strip_wrappers(key) for key in keys]
    stored = sorted(name for name in names if name in extra or f"{place.name}.{name}" in loading.stored.tensors)
    if stored and not all(loading.stored.may_be_left(f"{place.name}.{name}") for name in stored):
        loading.remedies.append(
            f"the load_state_dict() of '{place.name}' does not read {', '.join(map(repr, stored[:5]))}: read it in "
            "_load_from_state_dict(), or leave it out by fs.Skip"
        )
    return keys


def _resized_target(value: object, own: object, place: Place, loading: RestorePass) -> Callable[[], object] | None:
    """If the stored tensor has another shape, which the module's own load accepts: a function that returns new memory
    with its values. None: the shapes are equal.
    """
    stored = loading.stored.tensors.get(loading.stored_place(own, place).name)
    if stored is None or not isinstance(value, torch.Tensor) or type(value) not in tensors.DENSE_TYPES:
        return None
    if stored.shape == tuple(value.shape):
        return None
    made = tensors.empty(tensors.check_tensor(value, place.name), stored.shape, device=value.device)
    loading.request_tensor(made, own, place)
    return partial(_itself, made)


def _not_shown(
    own_loads: CustomLoads, names: set[str], extra: Mapping[str, object], place: Place, loading: RestorePass
) -> dict[str, Callable[[], object]]:
    """Stored entries that the state_dict() lacks, but that their modules may accept; adds their names to `names`."""
    given: dict[str, Callable[[], object]] = {}
    if not own_loads:
        return given
    new_values, below = NewValues(loading, phase=RestorePhase.MODULES), f"{place.name}."
    others = tuple(f"{section}." for section in loading.stored.objects if section.startswith(below))
    stored = [name for name in loading.stored.tensors if name.startswith(below) and not name.startswith(others)]
    for name in dict.fromkeys([*(name.removeprefix(below) for name in stored if place.rank is None), *extra]):
        full, node, key = f"{below}{name}", extra.get(name), own_loads.key(name)
        if key is None or name in names or loading.stored.may_be_left(full) or isinstance(node, ProviderRecord):
            continue
        names.add(name)
        inner = place.called(full, key)
        if name in extra:
            new_values.request(node, inner)
            given[key] = partial(new_values.build, node, full)
        else:
            known = loading.stored.tensors[full]
            made = tensors.empty(known.dtype, known.shape)
            loading.request_new(inner, made)
            given[key] = partial(_itself, made)
    return given


def _tensor_aside(loading: RestorePass, value: torch.Tensor, node: object, place: Place) -> Callable[[], object]:
    """Request a tensor in new memory. The memory is a copy of `value`, so it keeps these values if a rule allows that
    the checkpoint lacks the tensor.
    """
    if is_made_of_tensors(type(value)) and find_tensor_provider(value) is not None:
        split = copy_of(value)
        loading.walk(split, place, node)
        return lambda: split
    if isinstance(node, ProviderRecord):
        loading.add_difference("kind", place.name, "a tensor", describe_node(node))
    made = tensors.empty(tensors.check_tensor(value, place.name), value.shape, device=value.device)
    with torch.no_grad():
        made.copy_(value)
    loading.request_tensor(made, node, place)
    return lambda: made


def state_dict(module: torch.nn.Module, place: Place, fsdp: FsdpModule | None = None) -> Mapping[str, object]:
    """The module's state_dict(), with its own parameter objects where possible.

    fsdp  the flat parameters that FSDP1 made in the module, which are left out; None: there are none
    """
    plain = type(module).state_dict is torch.nn.Module.state_dict
    with nullcontext() if fsdp is None else fsdp.alone():
        try:
            entries = cast(
                "Mapping[str, object]", module.state_dict(keep_vars=True) if plain else module.state_dict()
            )
        except Exception as error:
            raise failed_call_error(place, "state_dict", error) from error
    twice = quantised.shown_twice(entries) if class_if_imported("bitsandbytes", "nn") is not None else frozenset[str]()
    if fsdp is None and not twice:
        return entries
    kept = OrderedDict(
        (key, value) for key, value in entries.items()
        if key not in twice and (fsdp is None or not fsdp.holds(key, value, place))
    )
    kept._metadata = getattr(entries, "_metadata", None)  # type: ignore[attr-defined]
    return kept
