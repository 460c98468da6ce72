"""Modules whose tree is not ordinary, or that load in their own way: described and restored entry by entry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import cast

import torch

from flowstone.format.merge_points import MergePoint
from flowstone.format.objects import Provided, TensorRef
from flowstone.state import quantised, tensors
from flowstone.state.fsdp import Wrapped
from flowstone.state.fsdp2 import drop_gathered, with_shards
from flowstone.state.imported import imported
from flowstone.state.kinds import fsdp1
from flowstone.state.live import Live
from flowstone.state.loading import Loading
from flowstone.state.module_loads import EXTRA_STATE, OwnLoads, load_entries, unread, warn_of_unread
from flowstone.state.names import Place, strip_wrappers
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import kind_of
from flowstone.state.providers import served_tensor
from flowstone.state.records import MISSING, Phase
from flowstone.state.roles import Roles
from flowstone.state.saving import Saving
from flowstone.state.scan import refuse_failed_call
from flowstone.state.sink import Role
from flowstone.state.split import copy_of, splits
from flowstone.state.trees import restless_in


def describe(module: torch.nn.Module, place: Place, saving: Saving) -> MergePoint:
    """Enter the entries of its state_dict(), one by one.

    Tensors that are not a parameter's or buffer's own memory (made by a state_dict hook, or extra state) are
    references in the result, so that a reader can tell them apart; so are tensors that a provider describes.
    """
    fsdp, module = saving.scan.wrapped(module, place), with_shards(module)
    restless = frozenset[int]().union(*map(restless_in, module.modules()))
    roles = Roles(saving.stepped, restless, module.parameters())
    if fsdp is not None:
        fsdp1.describe(fsdp, place, saving, roles)
    entries = state_dict(module, place, fsdp)
    live = Live(module)
    extra = MergePoint()
    for key, value in entries.items():
        name = strip_wrappers(key)
        inner = place.called(f"{place.name}.{name}", key)
        dtype = None if fsdp is None else fsdp.dtype_saved(name, value)
        if dtype is not None:
            saving.sink.enter(inner, cast("torch.Tensor", value).detach().to(dtype), role=Role.BUFFER)
            continue
        held = live.own(value)
        role = Role.OTHER if held is None else roles.of(held, isinstance(held, torch.nn.Parameter))
        with saving.inside("marked"):
            node = saving.walk(value, inner, role)
        # Names identify its own tensors, but not for another rank that takes this per-rank entry.
        if held is None or type(node) is not TensorRef or place.rank is not None:
            extra[name] = node
    if not_read := tuple(unread(module, [key for key, value in entries.items() if not live.has(value)])):
        warn_of_unread(place.name, not_read)
    return extra


def restore(
    module: torch.nn.Module, extra: Mapping[str, object], place: Place, loading: Loading
) -> None:
    """Request the entries of its state_dict(), one by one; `extra`: its stored values that are not tensors."""
    fsdp, shards = loading.scan.wrapped(module, place), with_shards(module)
    if fsdp is not None:
        fsdp1.restore(fsdp, place, loading)
    loading.later(Phase.MODULES, partial(drop_gathered, module))
    entries = state_dict(shards, place, fsdp)
    live, own_loads = Live(shards), OwnLoads(module)
    unread = _unread(module, entries, live, extra, place, loading)
    new_values = NewValues(loading, phase=Phase.MODULES)
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
            loading.into_copy(cast("torch.Tensor", value), dtype, own, inner)
        elif live.has(value):
            grown = _resized_target(value, own, inner, loading) if own_loads.concern(name) else None
            if grown is not None:
                given[key] = grown
                continue
            if isinstance(own, Provided) and served_tensor(value) is None:
                loading.differ("kind", inner.name, "a tensor", kind_of(own))
                own = MISSING
            loading.walk(value, inner, own)
            if own_loads:
                given[key] = partial(_itself, value)
        elif key in scales:
            loading.into_tensor(cast("torch.Tensor", value).detach(), own, inner)
        elif isinstance(value, torch.Tensor) and not key.endswith(EXTRA_STATE):
            given[key] = _tensor_aside(loading, value, own, inner)
        elif own is MISSING:
            loading.differ("missing", inner.name, kind_of(value), "nothing of that name")
        else:
            new_values.want(own, inner, value)
            given[key] = partial(new_values.build, own, inner.name)
    given |= _not_shown(own_loads, names, extra, place, loading)
    loading.differ_extra(extra, names, place)
    if given or own_loads:
        _load_later(module, given, names, getattr(entries, "_metadata", None), place, loading)


def _load_later(
    module: torch.nn.Module, given: Mapping[str, Callable[[], object]], shown: Collection[str], metadata: object,
    place: Place, loading: Loading,
) -> None:
    """Call its load_state_dict() once all bytes are in place."""
    fsdp = loading.scan.wrapped(module, place)

    def load() -> None:
        built = {key: build() for key, build in given.items()}
        load_entries(module, built, metadata, place, fsdp=fsdp, shown=shown, stored=loading.stored)

    loading.later(Phase.MODULES, load)


def _itself(value: object) -> object:
    return value


def _unread(
    module: torch.nn.Module, entries: Mapping[str, object], live: Live, extra: Mapping[str, object], place: Place,
    loading: Loading,
) -> Collection[str]:
    """Entries that no load of the module reads. They are not requested: what is stored of them is unexpected."""
    found = set(unread(module, [key for key, value in entries.items() if not live.has(value)]))
    names = [strip_wrappers(key) for key in found]
    stored = sorted(name for name in names if name in extra or f"{place.name}.{name}" in loading.stored.tensors)
    if stored and not all(loading.stored.may_be_left(f"{place.name}.{name}") for name in stored):
        loading.remedies.append(
            f"nothing in the load_state_dict() of '{place.name}' reads {', '.join(map(repr, stored[:5]))}: read it in "
            "_load_from_state_dict(), or leave it out by fs.Skip"
        )
    return found


def _resized_target(value: object, own: object, place: Place, loading: Loading) -> Callable[[], object] | None:
    """New memory for a stored tensor of another shape, which the module's own load takes over; None: same shape."""
    stored = loading.stored.tensors.get(loading.named(own, place).name)
    if stored is None or not isinstance(value, torch.Tensor) or type(value) not in tensors.DENSE_TYPES:
        return None
    if stored.shape == tuple(value.shape):
        return None
    made = tensors.empty(tensors.check_tensor(value, place.name), stored.shape, device=value.device)
    loading.into_tensor(made, own, place)
    return partial(_itself, made)


def _not_shown(
    own_loads: OwnLoads, names: set[str], extra: Mapping[str, object], place: Place, loading: Loading
) -> dict[str, Callable[[], object]]:
    """Stored entries that the state_dict() does not have now, but whose modules may accept them; adds their names."""
    given: dict[str, Callable[[], object]] = {}
    if not own_loads:
        return given
    new_values, below = NewValues(loading, phase=Phase.MODULES), f"{place.name}."
    others = tuple(f"{one}." for one in loading.stored.objects if one.startswith(below))
    found = [name for name in loading.stored.tensors if name.startswith(below) and not name.startswith(others)]
    for name in dict.fromkeys([*(name.removeprefix(below) for name in found if place.rank is None), *extra]):
        full, node, key = f"{below}{name}", extra.get(name), own_loads.key(name)
        if key is None or name in names or loading.stored.may_be_left(full) or isinstance(node, Provided):
            continue
        names.add(name)
        inner = place.called(full, key)
        if name in extra:
            new_values.want(node, inner)
            given[key] = partial(new_values.build, node, full)
        else:
            known = loading.stored.tensors[full]
            made = tensors.empty(known.dtype, known.shape)
            loading.want(inner, made)
            given[key] = partial(_itself, made)
    return given


def _tensor_aside(loading: Loading, value: torch.Tensor, node: object, place: Place) -> Callable[[], object]:
    """Request a tensor in new memory; a copy of `value`, as a rule may let the checkpoint not have it."""
    if splits(type(value)) and served_tensor(value) is not None:
        split = copy_of(value)
        loading.walk(split, place, node)
        return lambda: split
    if isinstance(node, Provided):
        loading.differ("kind", place.name, "a tensor", kind_of(node))
    made = tensors.empty(tensors.check_tensor(value, place.name), value.shape, device=value.device)
    with torch.no_grad():
        made.copy_(value)
    loading.into_tensor(made, node, place)
    return lambda: made


def state_dict(module: torch.nn.Module, place: Place, fsdp: Wrapped | None = None) -> Mapping[str, object]:
    """The module's state_dict(), with its own parameter objects where possible.

    fsdp  its FSDP1 tables, if any: flat parameters are then left out
    """
    plain = type(module).state_dict is torch.nn.Module.state_dict
    with nullcontext() if fsdp is None else fsdp.alone():
        try:
            entries = cast(
                "Mapping[str, object]", module.state_dict(keep_vars=True) if plain else module.state_dict()
            )
        except Exception as error:
            raise refuse_failed_call(place, "state_dict", error) from error
    twice = quantised.shown_twice(entries) if imported("bitsandbytes", "nn") is not None else frozenset[str]()
    if fsdp is None and not twice:
        return entries
    kept = OrderedDict(
        (key, value) for key, value in entries.items()
        if key not in twice and (fsdp is None or not fsdp.holds(key, value, place))
    )
    kept._metadata = getattr(entries, "_metadata", None)  # type: ignore[attr-defined]
    return kept
