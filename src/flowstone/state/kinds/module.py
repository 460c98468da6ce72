"""Modules: parameters and persistent buffers by name, extra state as objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import cast

import torch

from flowstone.errors import StateError
from flowstone.format.merge_points import MergePoint
from flowstone.format.objects import Provided, TensorRef
from flowstone.state import tensors
from flowstone.state.fsdp import Wrapped
from flowstone.state.fsdp2 import drop_gathered, with_shards
from flowstone.state.kind import Kind
from flowstone.state.kinds import fsdp1
from flowstone.state.live import Live
from flowstone.state.loading import Loading
from flowstone.state.names import Place, names_below, strip_wrappers
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import kind_of
from flowstone.state.providers import served_tensor
from flowstone.state.records import MISSING, Phase
from flowstone.state.roles import Roles
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan, refuse_failed_call
from flowstone.state.sink import Role
from flowstone.state.split import empty_like, splits
from flowstone.state.trees import restless_in

_EXTRA_STATE = "_extra_state"  # torch's key for get_extra_state(): a value of any type and changing shape


class Module(Kind):
    """A module: handled as a whole if its tree is ordinary and dense, else entry by entry of its state_dict()."""

    bases = (torch.nn.Module,)
    one_value = True

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        scan.modules.append((place, cast("torch.nn.Module", value)))
        return True

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> MergePoint:
        """Enter a module's tensors. Returns the other entries of its state_dict(), by stripped key."""
        module = cast("torch.nn.Module", value)
        tree = saving.scan.tree(module)
        if tree is None or not tree.dense or place.rank is not None:
            return _describe_entries(module, place, saving)
        roles = Roles(saving.stepped, tree.restless, tree.values)
        own, names = roles.of_all(tree.values, tree.parameters), names_below(place.name, tree.names)
        saving.sink.enter_all(place, tree.keys, names, tree.values, roles=own)
        return MergePoint()

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> None:
        """Request a module's tensors in their own memory, and plan to load its other entries."""
        module = cast("torch.nn.Module", value)
        if node is not MISSING and not isinstance(node, dict):
            loading.differ("kind", place.name, "a module", kind_of(node))
            return
        extra = cast("dict[str, object]", {} if node is MISSING else node)
        tree = loading.scan.tree(module)
        if tree is None or not tree.dense or place.rank is not None:
            _restore_entries(module, extra, place, loading)
            return
        loading.into_tensors(place, tree.keys, names_below(place.name, tree.names), tree.values)
        names = set(tree.names)
        loading.differ_extra(extra, names, place)
        for name in extra.keys() & names:
            if isinstance(extra[name], Provided):
                loading.differ("kind", f"{place.name}.{name}", "a tensor", kind_of(extra[name]))


def _describe_entries(module: torch.nn.Module, place: Place, saving: Saving) -> MergePoint:
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
        node = saving.walk(value, inner, role)
        # Names identify its own tensors, but not for another rank that takes this per-rank entry.
        if held is None or type(node) is not TensorRef or place.rank is not None:
            extra[name] = node
    return extra


def _restore_entries(
    module: torch.nn.Module, extra: Mapping[str, object], place: Place, loading: Loading
) -> None:
    """Request the entries of its state_dict(), one by one; `extra`: its stored values that are not tensors."""
    fsdp, shards = loading.scan.wrapped(module, place), with_shards(module)
    if fsdp is not None:
        fsdp1.restore(fsdp, place, loading)
    loading.later(Phase.MODULES, partial(drop_gathered, module))
    entries = state_dict(shards, place, fsdp)
    live = Live(shards)
    new_values = NewValues(loading)
    late: dict[str, Callable[[], object]] = {}
    names = set() if fsdp is None else set(fsdp.names)
    for key, value in entries.items():
        name = strip_wrappers(key)
        names.add(name)
        inner = place.called(f"{place.name}.{name}", key)
        own = extra.get(name, MISSING)
        dtype = None if fsdp is None else fsdp.dtype_saved(name, value)
        if dtype is not None and live.has(value):
            loading.into_copy(cast("torch.Tensor", value), dtype, own, inner)
        elif live.has(value):
            if isinstance(own, Provided) and served_tensor(value) is None:
                loading.differ("kind", inner.name, "a tensor", kind_of(own))
                own = MISSING
            loading.walk(value, inner, own)
        elif isinstance(value, torch.Tensor) and not key.endswith(_EXTRA_STATE):
            late[key] = _tensor_aside(loading, value, own, inner)
        elif own is MISSING:
            loading.differ("missing", inner.name, kind_of(value), "nothing of that name")
        else:
            new_values.want(own, inner)
            late[key] = partial(new_values.build, own, inner.name)
    loading.differ_extra(extra, names, place)
    if late:
        metadata = getattr(entries, "_metadata", None)
        loading.later(
            Phase.MODULES,
            lambda: load_entries(module, {key: built() for key, built in late.items()}, metadata, place, fsdp),
        )


def _tensor_aside(loading: Loading, value: torch.Tensor, node: object, place: Place) -> Callable[[], object]:
    """Request a tensor like `value` in new memory."""
    if splits(type(value)) and served_tensor(value) is not None:
        split = empty_like(value)
        loading.walk(split, place, node)
        return lambda: split
    if isinstance(node, Provided):
        loading.differ("kind", place.name, "a tensor", kind_of(node))
    made = tensors.empty(tensors.check_tensor(value, place.name), value.shape, device=value.device)
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
    if fsdp is None:
        return entries
    kept = OrderedDict((key, value) for key, value in entries.items() if not fsdp.holds(key, value, place))
    kept._metadata = getattr(entries, "_metadata", None)  # type: ignore[attr-defined]
    return kept


def load_entries(
    module: torch.nn.Module, entries: Mapping[str, object], metadata: object, place: Place, fsdp: Wrapped | None = None
) -> None:
    """Load those entries of a module that cannot be written in place."""
    given = OrderedDict(entries)
    # Modules read their version from the metadata; without it they would treat the entries as an old version's.
    given._metadata = metadata  # type: ignore[attr-defined]
    try:
        with nullcontext() if fsdp is None else fsdp.alone():
            module.load_state_dict(given, strict=False)
    except Exception as error:
        raise StateError(
            f"cannot restore '{place.name}'",
            found=f"load_state_dict() of {sorted(entries)} raised {type(error).__name__}: {error}",
            next="fix the module's hooks; its parameters and buffers are already restored",
        ) from error
