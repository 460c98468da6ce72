"""Modules: parameters and persistent buffers by name, extra state as objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, cast

import torch

from flowstone.errors import StateError
from flowstone.format.merge_points import MergePoint
from flowstone.format.objects import Provided, TensorRef
from flowstone.state import tensors
from flowstone.state.collector import Role
from flowstone.state.fsdp import Wrapped
from flowstone.state.names import Place, names_below, strip_wrappers
from flowstone.state.new_values import NewValues, kind_of, refers_to_tensors
from flowstone.state.records import MISSING, Phase
from flowstone.state.scan import provider_of_tensor, refuse_failed_call
from flowstone.state.split import empty_like, splits
from flowstone.state.trees import restless_in

if TYPE_CHECKING:
    from flowstone.state.describe import Describer
    from flowstone.state.restore import Restorer


_EXTRA_STATE = "_extra_state"  # torch's key for get_extra_state(): of any type, and free to change its shape


def describe(describer: Describer, module: torch.nn.Module, place: Place) -> MergePoint:
    """Enter a module's tensors; returns what else its state_dict() holds, by stripped key.

    Tensors that are no parameter or buffer's own memory (made by a state_dict hook, or extra state)
    stand in the result as references, so that a reader can tell them; so do those that a provider describes.
    """
    tree = describer.scan.tree(module)
    if tree is not None and tree.dense and place.rank is None:
        roles = Roles(describer.stepped, tree.restless, tree.values)
        own, names = roles.of_all(tree.values, tree.parameters), names_below(place.name, tree.names)
        describer.collector.enter_all(place, tree.keys, names, tree.values, roles=own)
        return MergePoint()
    fsdp = describer.scan.wrapped(module, place)
    restless = frozenset[int]().union(*map(restless_in, module.modules()))
    roles = Roles(describer.stepped, restless, module.parameters())
    if fsdp is not None:
        _describe_flattened(describer, fsdp, place, roles)
    entries = state_dict(module, place, fsdp)
    live = Live(module)
    extra = MergePoint()
    for key, value in entries.items():
        name = strip_wrappers(key)
        inner = place.called(f"{place.name}.{name}", key)
        dtype = None if fsdp is None else fsdp.dtype_saved(name, value)
        if dtype is not None:
            describer.collector.enter(inner, cast("torch.Tensor", value).detach().to(dtype), role=Role.BUFFER)
            continue
        held = live.own(value)
        role = Role.OTHER if held is None else roles.of(held, isinstance(held, torch.nn.Parameter))
        if provider_of_tensor(value) is not None:
            extra[name] = describer.provided(value, inner, role)
        elif held is not None:
            describer.collector.enter(inner, cast("torch.Tensor", value), role=role)
            if place.rank is not None:
                # Another rank may take this entry, and could not tell the tensors from the names.
                extra[name] = TensorRef(inner.name, "tensor")
        else:
            extra[name] = describer.node(value, inner)
    return extra


def restore(restorer: Restorer, module: torch.nn.Module, node: object, place: Place) -> None:
    """Want a module's tensors in their own memory, and plan to hand it the rest of its entries."""
    if node is not MISSING and not isinstance(node, dict):
        restorer.differ("kind", place.name, "a module", kind_of(node))
        return
    extra = cast("dict[str, object]", {} if node is MISSING else node)
    tree = restorer.scan.tree(module)
    if tree is not None and tree.dense and place.rank is None:
        restorer.into_tensors(place, tree.keys, names_below(place.name, tree.names), tree.values)
        differ_extra(restorer, extra, set(tree.names), place)
        for name in extra.keys() & set(tree.names):
            if isinstance(extra[name], Provided):
                restorer.differ("kind", f"{place.name}.{name}", "a tensor", kind_of(extra[name]))
        return
    fsdp = restorer.scan.wrapped(module, place)
    if fsdp is not None:
        _restore_flattened(restorer, fsdp, place)
    entries = state_dict(module, place, fsdp)
    live = Live(module)
    new_values = NewValues(restorer)
    late: dict[str, Callable[[], object]] = {}
    names = set() if fsdp is None else set(fsdp.names)
    for key, value in entries.items():
        name = strip_wrappers(key)
        names.add(name)
        inner = place.called(f"{place.name}.{name}", key)
        own = extra.get(name, MISSING)
        dtype = None if fsdp is None else fsdp.dtype_saved(name, value)
        if dtype is not None and live.has(value):
            restorer.into_copy(cast("torch.Tensor", value), dtype, own, inner)
            continue
        if provider_of_tensor(value) is not None and live.has(value):
            restorer.node(value, own, inner)
        elif live.has(value):
            if isinstance(own, Provided):
                restorer.differ("kind", inner.name, "a tensor", kind_of(own))
            restorer.into_tensor(cast("torch.Tensor", value), own, inner)
        elif isinstance(value, torch.Tensor) and not key.endswith(_EXTRA_STATE):
            late[key] = _tensor_aside(restorer, value, own, inner)
        elif own is MISSING:
            restorer.differ("missing", inner.name, kind_of(value), "nothing of that name")
        else:
            new_values.want(own, inner)
            late[key] = partial(new_values.build, own, inner.name)
    differ_extra(restorer, extra, names, place)
    if late:
        metadata = getattr(entries, "_metadata", None)
        restorer.later(
            Phase.MODULES,
            lambda: load_entries(module, {key: built() for key, built in late.items()}, metadata, place, fsdp),
        )


class Roles:
    """What the tensors of one module are in the state."""

    def __init__(self, stepped: Set[int], restless: Set[int], tensors: Iterable[torch.Tensor]) -> None:
        """`stepped`: ids of what optimizers of the state step; `restless`: of what changes without a step, too.

        Of parameters that nobody steps, those may be frozen that lie in a model of which others are trained. A model
        without any of these is a copy that is kept up in other ways: an average, a teacher, a target.
        """
        self._stepped = stepped - restless
        self._restless = restless
        self._unowned = Role.PARAMETER if stepped.isdisjoint(map(id, tensors)) else Role.UNOWNED

    def of(self, tensor: torch.Tensor, is_parameter: bool) -> Role:
        """What one tensor is."""
        return self.of_all([tensor], [is_parameter])[0]

    def of_all(self, tensors: Sequence[torch.Tensor], are_parameters: Iterable[bool]) -> list[Role]:
        """What each is, a thousand in few calls."""
        roles = [
            Role.STEPPED if id(one) in self._stepped else self._unowned if is_parameter else Role.BUFFER
            for one, is_parameter in zip(tensors, are_parameters, strict=True)
        ]
        if self._restless:
            roles = [
                Role.PARAMETER if role is not Role.BUFFER and id(one) in self._restless else role
                for one, role in zip(tensors, roles, strict=True)
            ]
        return roles


def _describe_flattened(describer: Describer, fsdp: Wrapped, place: Place, roles: Roles) -> None:
    """Enter what this rank holds of parameters that FSDP1 has flattened."""
    for unit in fsdp.units:
        for span, own in zip(unit.spans, unit.originals or repeat(unit.flat), strict=False):
            inner = place.called(f"{place.name}.{span.name}", span.name)
            describer.collector.enter(inner, span.of(unit.local), within=span.range, role=roles.of(own, True))
        for name, target in unit.ties.items():
            describer.collector.tie(place.called(f"{place.name}.{name}", name), f"{place.name}.{target}")


def _restore_flattened(restorer: Restorer, fsdp: Wrapped, place: Place) -> None:
    """Want what this rank holds of them, in the memory that every forward is gathered from."""
    for unit in fsdp.units:
        for span in unit.spans:
            inner = place.called(f"{place.name}.{span.name}", span.name)
            restorer.into_tensor(span.of(unit.local), MISSING, inner, within=span.range)
        for name, target in unit.ties.items():
            restorer.collector.tie(place.called(f"{place.name}.{name}", name), f"{place.name}.{target}")
    restorer.later(Phase.MODULES, fsdp.forget_gathered)


def differ_extra(restorer: Restorer, extra: Mapping[str, object], names: Collection[str], place: Place) -> None:
    """Stored entries that the module does not have. Tensors among them are reported with all others."""
    for name, item in extra.items():
        if name not in names and not refers_to_tensors(item):
            restorer.differ("unexpected", f"{place.name}.{name}", "nothing of that name", kind_of(item))


def _tensor_aside(restorer: Restorer, value: torch.Tensor, node: object, place: Place) -> Callable[[], object]:
    """Want a tensor like `value` in memory of its own."""
    if splits(type(value)) and provider_of_tensor(value) is not None:
        split = empty_like(value)
        restorer.node(split, node, place)
        return lambda: split
    if isinstance(node, Provided):
        restorer.differ("kind", place.name, "a tensor", kind_of(node))
    made = tensors.empty(tensors.check_tensor(value, place.name), value.shape, device=value.device)
    restorer.into_tensor(made, node, place)
    return lambda: made


class Live:
    """Tells a module's own tensors from those that its state_dict() made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._ids = {id(value) for value in _own_tensors(module)}
        self._memory: dict[tuple[object, ...] | None, torch.Tensor] | None = None

    def has(self, value: object) -> bool:
        """Whether writing into `value` writes into the module."""
        return self.own(value) is not None

    def own(self, value: object) -> torch.Tensor | None:
        """The module's tensor that is written into by writing into `value`."""
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) in self._ids:
            return value
        if tensors.uninitialized(value) or type(value) is not torch.Tensor:
            return None
        if self._memory is None:
            # Only where state_dict() detaches: a whole module's worth of addresses is not free.
            self._memory = {_identity(own): own for own in reversed(_own_tensors(self._module))}
        identity = _identity(value)
        return None if identity is None else self._memory.get(identity)


def _own_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    own: list[torch.Tensor] = []
    for inner in module.modules():
        own.extend(value for value in inner._parameters.values() if value is not None)
        own.extend(value for value in inner._buffers.values() if value is not None)
    return own


def _identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    try:
        return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    except RuntimeError:  # uninitialized, or a subclass without memory: nobody's memory
        return None


def state_dict(module: torch.nn.Module, place: Place, fsdp: Wrapped | None = None) -> Mapping[str, object]:
    """The module's state_dict(), with its very parameters where it lets us have them.

    fsdp  what FSDP1 has made of it: its flat parameters are then left out
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
    """Hand a module those entries that no write into memory restores."""
    given = OrderedDict(entries)
    # Modules read their version from here; without it they would take the entries for old ones.
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
