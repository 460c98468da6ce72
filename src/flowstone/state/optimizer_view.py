"""Optimizer views: an optimizer's state by parameter, and the stored state of one.

The stored object of an optimizer:

    {"param_groups": [{"params": [path, ...], "options": {...}}, ...],
     "state":  {path: {slot: value}},    every slot that is not a dense tensor under a plain name
     "shared": {key: value},             state that belongs to no parameter
     "extra":  {key: value},             what a subclass adds to its state_dict()
     "base":   {...}}                    the same for an inner optimizer that it does not show (SAM's), if any

A slot that is a tensor, and whose key is a string without a dot, is not listed: the tensor's name,
`<optimizer>.state.<path>.<slot>`, identifies it. So a million slots add nothing to the objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain, repeat
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, cast

import torch

from flowstone.errors import CollisionError, UnsupportedStateError
from flowstone.state.flat import Range, Span
from flowstone.state.inner import Core, base_of, core_of, is_optimizer
from flowstone.state.names import Place
from flowstone.state.parameters import Home, Parameters
from flowstone.state.scan import refuse_failed_call
from flowstone.state.slot_columns import SlotColumns, slot_columns
from flowstone.state.zero import local_optimizer

NOT_OPTIONS = frozenset({"params", "param_names"})
"""Keys of a group that describe the order of its members, not its settings."""


_Slots: TypeAlias = "Mapping[object, object]"
_NO_SLOTS: _Slots = MappingProxyType({})


class Member(NamedTuple):
    """A parameter in a group, as one optimizer sees it: its own, or one inside of a flat parameter of its own.

    parameter  as it is on this rank
    slots      of the optimizer's own parameter
    owner      the optimizer's own parameter
    span       where it is in the flat one, if it is in one
    flat       this rank's elements of the flat one
    here       whether this rank has its state; False: other ranks have. Equal for all members of a flat parameter
    """

    parameter: torch.Tensor
    home: Home
    slots: Mapping[object, object]
    owner: torch.Tensor
    span: Span | None = None
    flat: torch.Tensor | None = None
    here: bool = True

    def part_of(self, slot: object) -> object:
        """This parameter's part of a slot: its own elements, if the slot is as long as the flat one; else the whole
        slot.
        """
        if self.span is None or self.flat is None or not isinstance(slot, torch.Tensor):
            return slot
        return self.span.of(slot) if slot.shape == self.flat.shape else slot


_Groups: TypeAlias = "tuple[tuple[Member, ...], ...]"


@dataclass(frozen=True, eq=False)
class OptimizerView:
    """A view of an optimizer's state, by parameter.

    paths        of the members, parallel to optimizer.param_groups
    options      parallel: the settings of each group
    shared       state that belongs to no parameter
    extra        further entries of state_dict()
    state_owner  the optimizer that has the state: itself, unless the state is sharded among ranks
    whole_slots  of each member, one group after the other, if all are whole parameters and on this rank. None if not:
                 then only the members identify a slot
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
        """The members, parallel to optimizer.param_groups, as records; describing whole parameters does not need them.
        """
        return self._make_groups()

    def columns(self, name: str) -> SlotColumns | None:
        """All slots, below `name`, if names identify all of them: slots of whole parameters, under plain keys."""
        if self.whole_slots is None:
            return None
        return slot_columns(name, chain.from_iterable(self.paths), self.whole_slots)

    def slots(self) -> Iterable[Mapping[object, object]]:
        """The slots of each member."""
        return (member.slots for member in self.members()) if self.whole_slots is None else self.whole_slots

    def members(self) -> Iterator[Member]:
        for group in self.groups:
            yield from group


def core_at(value: object, place: Place) -> Core | None:
    """The optimizer that holds a value's state, if it is an optimizer or an object around some; see `core_of`."""
    if not is_optimizer(value):
        return None
    try:
        return core_of(value)
    except Exception as error:
        raise refuse_failed_call(place, "state_dict", error) from error


def base_at(value: object, core: Core, place: Place) -> Core | None:
    """An inner optimizer that holds state which the outer one does not show; see `base_of`."""
    try:
        return None if local_optimizer(core, place) is not None else base_of(value, core)
    except Exception as error:
        raise refuse_failed_call(place, "state_dict", error) from error


def view_of(optimizer: Core, parameters: Parameters, place: Place) -> OptimizerView:
    """Read an optimizer through its own state_dict(), which contains the live tensors, except where a subclass copies.

    raises  UnsupportedStateError for a parameter without a name, CollisionError for two of the same name
    """
    local = local_optimizer(optimizer, place)
    state_owner = optimizer if local is None else local
    packed, state, numbers = _packed(state_owner, place)
    packed_groups = cast("list[dict[str, object]]", packed["param_groups"])
    if local is not None:  # its settings are copied from the whole optimizer at the next step
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


def _whole_paths(optimizer: Core, parameters: Parameters) -> tuple[Sequence[str], ...] | None:
    """The paths of all members, group by group, if each is a whole parameter, and no two have the same name."""
    groups = [group["params"] for group in optimizer.param_groups]
    paths = parameters.whole(list(chain.from_iterable(groups)))
    if paths is None or len(set(paths)) < len(paths):
        return None
    ends = list(accumulate(map(len, groups)))
    return tuple(paths[end - len(group) : end] for end, group in zip(ends, groups, strict=True))


def _whole_members(optimizer: Core, paths: Sequence[Sequence[str]], slots: Sequence[Sequence[_Slots]]) -> _Groups:
    return tuple(
        tuple(
            Member(parameter, Home(path, None), own, parameter)
            for parameter, path, own in zip(group["params"], names, of, strict=True)
        )
        for group, names, of in zip(optimizer.param_groups, paths, slots, strict=True)
    )


def _members(
    optimizer: Core, parameters: Parameters, slots: Sequence[Sequence[_Slots]], here: Sequence[Sequence[bool]],
    place: Place,
) -> _Groups:
    """The members of each group: its parameters; in place of a flat one, the parameters in it.

    slots, here  of each parameter; whether this rank has them
    """
    groups: list[tuple[Member, ...]] = []
    for i, group in enumerate(optimizer.param_groups):
        found: list[Member] = []
        for j, (parameter, own, is_here) in enumerate(zip(group["params"], slots[i], here[i], strict=True)):
            flat = parameters.flat(parameter)
            if flat is not None:
                found += [_flat_member(parameter, own, flat.local, span, here=is_here) for span in flat.spans]
                continue
            home = parameters.home(parameter) or _home_by_name(group, i, j, place)
            absent = type(home.held) is Range and home.held.absent
            found.append(Member(parameter, home, own, parameter, None, None, is_here and not absent))
        groups.append(tuple(found))
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
            raise ValueError("param_groups of other lengths than the optimizer's own")
        if not all(isinstance(slots, Mapping) for slots in state.values()):
            raise TypeError("a state that is not a mapping of slots")
    except Exception as error:
        raise refuse_failed_call(place, "state_dict", error) from error
    return packed, state, numbers


_ELSEWHERE = object()  # the number of a parameter whose state is on another rank


def _spread(
    whole: Core, state_owner: Core, numbers: list[list[object]]
) -> list[list[object]]:
    """For the whole optimizer's parameters, the numbers that the state owner gives them."""
    known = {
        id(parameter): number
        for group, of in zip(state_owner.param_groups, numbers, strict=True)
        for parameter, number in zip(group["params"], of, strict=True)
    }
    return [[known.get(id(parameter), _ELSEWHERE) for parameter in group["params"]] for group in whole.param_groups]


def _flat_member(
    owner: torch.Tensor, slots: Mapping[object, object], flat: torch.Tensor, span: Span, *, here: bool
) -> Member:
    """The member at `span` of the flat parameter `owner`."""
    home = Home(span.name, span.range)
    return Member(span.of(flat), home, slots, owner, span, flat, here)


def _check_paths(groups: Sequence[Sequence[Member]], place: Place) -> None:
    """Refuse two parameters of the same name, which could not be told apart."""
    paths = [member.home.path for group in groups for member in group]
    if len(set(paths)) == len(paths):
        return
    found: dict[str, str] = {}
    for i, group in enumerate(groups):
        for j, member in enumerate(group):
            position = f"group {i}, parameter {j}"
            first = found.setdefault(member.home.path, position)
            if first != position:
                raise CollisionError(
                    f"two parameters of '{place.name}' have the name '{member.home.path}'", first=first,
                    second=position, next="put their module into the state, or give param_names that differ",
                )


def _home_by_name(group: Mapping[str, object], i: int, j: int, place: Place) -> Home:
    """The home of a parameter that is nowhere in the state: it has the name that the group gives it."""
    names = group.get("param_names")
    if isinstance(names, list) and j < len(names) and isinstance(names[j], str):
        return Home(names[j], None)
    raise UnsupportedStateError(
        f"parameter {j} of group {i} of '{place.name}' has no name",
        found="it belongs to no module and no entry of the state, and its group has no param_names",
        next="put the module that owns it into the state, or build the optimizer from named_parameters()",
    )
