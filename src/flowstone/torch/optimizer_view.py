"""Optimizer views: an optimizer's state by parameter. A slot is a value for one parameter, such as `exp_avg`.

The stored object of an optimizer:

    {"param_groups": [{"params": [path, ...], "options": {...}}, ...],
     "state":  {path: {slot: value}},    slots that are listed: see below
     "shared": {key: value},             state that belongs to no parameter
     "extra":  {key: value},             what a subclass adds to its state_dict()
     "base":   {...}}                    the same for an inner optimizer that state_dict() does not show (SAM), if any

A slot that is a tensor, and whose key is a string without a dot, is not listed: the tensor's name,
`<optimizer>.state.<path>.<slot>`, identifies it. So a million slots add nothing to the objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, chain, repeat
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, cast

import msgspec
import torch

from flowstone.errors import CollisionError, UnsupportedStateError
from flowstone.state.names import Place
from flowstone.state.scan import failed_call_error
from flowstone.torch.flat import FlatMember, FlatSlice
from flowstone.torch.inner_optimizers import Core, base_of, core_of, is_optimizer
from flowstone.torch.parameters import ParameterHome, ParameterIndex
from flowstone.torch.slot_columns import SlotColumns, slot_columns
from flowstone.torch.zero_optimizer import local_optimizer

NOT_OPTIONS = frozenset({"params", "param_names"})
"""Keys of a group that describe the order of its members, not its settings."""

_Slots: TypeAlias = "Mapping[object, object]"
_NO_SLOTS: _Slots = MappingProxyType({})


class ParameterMember(NamedTuple):
    """A parameter in a group of an optimizer: the optimizer's own parameter, or a parameter inside of a flat one.

    parameter  this rank's part of the parameter
    owner      the tensor that is in the optimizer's group: the parameter itself, or the flat one that contains it
    slots      the slots of `owner`
    span       where the parameter is in the flat parameter; None: the parameter is in no flat one
    flat       this rank's elements of the flat parameter
    here       whether this rank has the parameter's state; False: other ranks have it. Equal for all members of a flat
               parameter
    """

    parameter: torch.Tensor
    home: ParameterHome
    slots: Mapping[object, object]
    owner: torch.Tensor
    span: FlatMember | None = None
    flat: torch.Tensor | None = None
    here: bool = True

    def part_of(self, slot: object) -> object:
        """If a slot has one element for each element of the flat parameter, the elements of this parameter. Otherwise
        the full slot.
        """
        if self.span is None or self.flat is None or not isinstance(slot, torch.Tensor):
            return slot
        return self.span.slice_of(slot) if slot.shape == self.flat.shape else slot


_Groups: TypeAlias = "tuple[tuple[ParameterMember, ...], ...]"


class OptimizerView(msgspec.Struct, frozen=True, eq=False, dict=True):
    """A view of an optimizer's state, by parameter.

    paths        for each of optimizer.param_groups, the paths of its members
    options      for each of optimizer.param_groups, its settings
    shared       state that belongs to no parameter
    extra        further entries of state_dict()
    state_owner  the object that has the state: the optimizer, or, if its state is sharded among ranks, the inner
                 optimizer with this rank's part
    whole_slots  if all members are full parameters and on this rank, the slots of each member, one group after the
                 other; otherwise None
    """

    paths: tuple[Sequence[str], ...]
    options: tuple[Mapping[str, object], ...]
    shared: Mapping[object, object]
    extra: Mapping[object, object]
    state_owner: Core
    whole_slots: Sequence[Mapping[object, object]] | None
    _make_groups: Callable[[], _Groups]

    @cached_property
    def groups(self) -> _Groups:
        """For each of optimizer.param_groups, its members as ParameterMember. Created at the first use, as saves of
        full parameters do not need them.
        """
        return self._make_groups()

    def columns(self, name: str) -> SlotColumns | None:
        """All slots, with names that begin with `name`, if each slot is identified by its name: slots of full
        parameters with keys that are strings without a dot. Otherwise None.
        """
        if self.whole_slots is None:
            return None
        return slot_columns(name, chain.from_iterable(self.paths), self.whole_slots)

    def slots(self) -> Iterable[Mapping[object, object]]:
        """For each parameter in the optimizer's groups, its slots: key -> value, such as `exp_avg` -> a tensor."""
        return (member.slots for member in self.members()) if self.whole_slots is None else self.whole_slots

    def members(self) -> Iterator[ParameterMember]:
        for group in self.groups:
            yield from group


def core_at(value: object, place: Place) -> Core | None:
    """The optimizer that has a value's state, if the value is an optimizer or contains some; see `core_of`."""
    if not is_optimizer(value):
        return None
    try:
        return core_of(value)
    except Exception as error:
        raise failed_call_error(place, "state_dict", error) from error


def base_at(value: object, core: Core, place: Place) -> Core | None:
    """An inner optimizer with state that the outer one does not show; see `base_of`."""
    try:
        return None if local_optimizer(core, place) is not None else base_of(value, core)
    except Exception as error:
        raise failed_call_error(place, "state_dict", error) from error


def view_of(optimizer: Core, parameters: ParameterIndex, place: Place) -> OptimizerView:
    """Read an optimizer by its own state_dict(), which contains the live tensors unless a subclass copies them.

    raises  UnsupportedStateError for a parameter without a name, CollisionError for two of the same name
    """
    local = local_optimizer(optimizer, place)
    state_owner = optimizer if local is None else local
    packed, state, numbers = _packed(state_owner, place)
    packed_groups = cast("list[dict[str, object]]", packed["param_groups"])
    if local is not None:  # the inner optimizer's settings are copied from the outer one at the next step
        packed_groups, numbers = optimizer.param_groups, _spread(optimizer, state_owner, numbers)
    slots = [list(map(state.pop, of, repeat(_NO_SLOTS))) for of in numbers]
    options = tuple({k: v for k, v in group.items() if k not in NOT_OPTIONS} for group in packed_groups)
    extra = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    paths = None if local is not None else _whole_paths(optimizer, parameters)
    if paths is not None:
        whole_slots = list(chain.from_iterable(slots))
        make = partial(_whole_members, optimizer, paths, slots)
        return OptimizerView(paths, options, state, extra, state_owner, whole_slots, make)
    here = [[number is not _ELSEWHERE for number in of] for of in numbers]
    groups = _members(optimizer, parameters, slots, here, place)
    _check_paths(groups, place)
    paths = tuple([member.home.path for member in group] for group in groups)
    return OptimizerView(paths, options, state, extra, state_owner, None, lambda: groups)


def _whole_paths(optimizer: Core, parameters: ParameterIndex) -> tuple[Sequence[str], ...] | None:
    """The paths of all parameters, group by group; None unless all are full parameters (not parts of parameters) with
    different names.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    paths = parameters.whole(list(chain.from_iterable(groups)))
    if paths is None or len(set(paths)) < len(paths):
        return None
    ends = list(accumulate(map(len, groups)))
    return tuple(paths[end - len(group) : end] for end, group in zip(ends, groups, strict=True))


def _whole_members(optimizer: Core, paths: Sequence[Sequence[str]], slots: Sequence[Sequence[_Slots]]) -> _Groups:
    return tuple(
        tuple(
            ParameterMember(parameter, ParameterHome(path, None), own, parameter)
            for parameter, path, own in zip(group["params"], names, of, strict=True)
        )
        for group, names, of in zip(optimizer.param_groups, paths, slots, strict=True)
    )


def _members(
    optimizer: Core, parameters: ParameterIndex, slots: Sequence[Sequence[_Slots]], here: Sequence[Sequence[bool]],
    place: Place,
) -> _Groups:
    """The members of each group: its parameters, with flat parameters replaced by the parameters in them.

    slots, here  for each parameter of a group: its slots, and whether this rank has them
    """
    groups: list[tuple[ParameterMember, ...]] = []
    for i, group in enumerate(optimizer.param_groups):
        members: list[ParameterMember] = []
        for j, (parameter, own, is_here) in enumerate(zip(group["params"], slots[i], here[i], strict=True)):
            flat = parameters.flat(parameter)
            if flat is not None:
                members += [_flat_member(parameter, own, flat.local, span, here=is_here) for span in flat.spans]
                continue
            home = parameters.home(parameter) or _home_by_name(group, i, j, place)
            absent = type(home.held) is FlatSlice and home.held.is_absent
            members.append(ParameterMember(parameter, home, own, parameter, None, None, is_here and not absent))
        groups.append(tuple(members))
    return tuple(groups)


def _packed(
    optimizer: Core, place: Place
) -> tuple[Mapping[object, object], dict[object, Mapping[object, object]], list[list[object]]]:
    """An optimizer's state_dict(), its slots by number, and the numbers of its parameters, group by group."""
    try:
        packed = cast("Mapping[object, object]", optimizer.state_dict())
        state = dict(cast("Mapping[object, Mapping[object, object]]", packed["state"]))
        packed_groups = cast("list[dict[str, object]]", packed["param_groups"])
        numbers = [cast("list[object]", group["params"]) for group in packed_groups]
        if list(map(len, numbers)) != [len(group["params"]) for group in optimizer.param_groups]:
            raise ValueError(
                "the groups in param_groups of the state dict do not match the optimizer's groups in number or size"
            )
        if not all(isinstance(slots, Mapping) for slots in state.values()):
            raise TypeError("the optimizer state of a parameter is not a dict")
    except Exception as error:
        raise failed_call_error(place, "state_dict", error) from error
    return packed, state, numbers


_ELSEWHERE = object()  # stands for the number of a parameter whose state is on another rank


def _spread(
    whole: Core, state_owner: Core, numbers: list[list[object]]
) -> list[list[object]]:
    """For each parameter of the outer optimizer, group by group, its number in the inner optimizer that has the state.
    """
    known = {
        id(parameter): number
        for group, of in zip(state_owner.param_groups, numbers, strict=True)
        for parameter, number in zip(group["params"], of, strict=True)
    }
    return [[known.get(id(parameter), _ELSEWHERE) for parameter in group["params"]] for group in whole.param_groups]


def _flat_member(
    owner: torch.Tensor, slots: Mapping[object, object], flat: torch.Tensor, span: FlatMember, *, here: bool
) -> ParameterMember:
    """The ParameterMember for the parameter that is at `span` in the flat parameter `owner`."""
    home = ParameterHome(span.name, span.range)
    return ParameterMember(span.slice_of(flat), home, slots, owner, span, flat, here)


def _check_paths(groups: Sequence[Sequence[ParameterMember]], place: Place) -> None:
    """Refuse two parameters of the same name, which could not be distinguished."""
    paths = [member.home.path for group in groups for member in group]
    if len(set(paths)) == len(paths):
        return
    positions: dict[str, str] = {}
    for i, group in enumerate(groups):
        for j, member in enumerate(group):
            position = f"group {i}, parameter {j}"
            first = positions.setdefault(member.home.path, position)
            if first != position:
                raise CollisionError(
                    f"two parameters of '{place.name}' have the name '{member.home.path}'", first=first,
                    second=position, next="put their module into the state, or give param_names that differ",
                )


def _home_by_name(group: Mapping[str, object], i: int, j: int, place: Place) -> ParameterHome:
    """The home of a parameter that is in no module of the state. It gets the name that its group has for it."""
    names = group.get("param_names")
    if isinstance(names, list) and j < len(names) and isinstance(names[j], str):
        return ParameterHome(names[j], None)
    raise UnsupportedStateError(
        f"parameter {j} of group {i} of '{place.name}' has no name",
        found="it belongs to no module and no entry of the state, and its group has no param_names",
        next="put the module that owns it into the state, or build the optimizer from named_parameters()",
    )
