"""Optimizers: slots under their parameters' names, groups by their members.

An optimizer's object:

    {"param_groups": [{"params": [path, ...], "options": {...}}, ...],
     "state":  {path: {slot: value}},    every slot that is not a dense tensor under a plain name
     "shared": {key: value},             state that belongs to no parameter
     "extra":  {key: value},             what a subclass adds to its state_dict()
     "base":   {...}}                    the same of one inside that it does not show (SAM's), if there is one

A slot that is a tensor, and whose key is text without a dot, is in no list: the tensor's name,
`<optimizer>.state.<path>.<slot>`, says all. So a million slots cost the objects nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from flowstone.errors import CollisionError, UnsupportedStateError
from flowstone.format.merge_points import Groups, MergePoint
from flowstone.format.objects import TensorRef
from flowstone.state.collector import Role
from flowstone.state.flat import Range, Span
from flowstone.state.inner import Core, base_of, core_of, is_optimizer, parts_of
from flowstone.state.names import Place
from flowstone.state.new_values import refers_to_tensors
from flowstone.state.scan import Home, Parameters, provider_of_tensor, refuse_failed_call
from flowstone.state.shards import is_dtensor
from flowstone.state.tensors import DENSE_TYPES
from flowstone.state.zero import local_optimizer

if TYPE_CHECKING:
    from flowstone.state.describe import Describer

NOT_OPTIONS = frozenset({"params", "param_names"})
"""Keys of a group that belong to the order of its members, not to its settings."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group of a stored optimizer: the paths of its members, and its settings."""

    params: list[str]
    options: dict[object, object]


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """The entries of a stored optimizer's object; `listed` is its "state"."""

    groups: list[StoredGroup]
    listed: dict[str, dict[object, object]]
    shared: object
    extra: object


class Member(NamedTuple):
    """A parameter in a group, as one optimizer sees it: its own, or one that lies in a flat one of its own.

    parameter  as it lies here
    slots      of the optimizer's own parameter
    owner      that one
    span       where in a flat one it lies
    flat       this rank's elements of that
    here       whether this rank has state for it, or leaves all of that to others; all in a flat one have that one's
    """

    parameter: torch.Tensor
    home: Home
    slots: Mapping[object, object]
    owner: torch.Tensor
    span: Span | None = None
    flat: torch.Tensor | None = None
    here: bool = True

    def part_of(self, slot: object) -> object:
        """What of a slot is this parameter's: its own elements of one as long as the flat one, all of any other."""
        if self.span is None or self.flat is None or not isinstance(slot, torch.Tensor):
            return slot
        return self.span.of(slot) if slot.shape == self.flat.shape else slot


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """A view of an optimizer's state, by parameter.

    groups       parallel to optimizer.param_groups
    options      parallel: the settings of each group
    shared       state that belongs to no parameter
    extra        further entries of state_dict()
    state_owner  the optimizer that has the state: itself, except where the state is sharded among ranks
    """

    groups: tuple[tuple[Member, ...], ...]
    options: tuple[Mapping[str, object], ...]
    shared: Mapping[object, object]
    extra: Mapping[object, object]
    state_owner: Core

    def members(self) -> Iterator[Member]:
        for group in self.groups:
            yield from group


def core_at(value: object, place: Place) -> Core | None:
    """The optimizer that owns the state of a value, if it is an optimizer or an object around some; see `core_of`."""
    if not is_optimizer(value):
        return None
    try:
        return core_of(value)
    except Exception as error:
        raise refuse_failed_call(place, "state_dict", error) from error


def base_at(value: object, core: Core, place: Place) -> Core | None:
    """Whoever keeps state inside of it that it does not show; see `base_of`."""
    try:
        return None if local_optimizer(core, place) is not None else base_of(value, core)
    except Exception as error:
        raise refuse_failed_call(place, "state_dict", error) from error


def view_of(optimizer: Core, parameters: Parameters, place: Place) -> OptimizerView:
    """Read an optimizer through its own state_dict(), whose tensors are the live ones unless it says otherwise.

    raises  UnsupportedStateError for a parameter without a name, CollisionError for two of one name
    """
    local = local_optimizer(optimizer, place)
    state_owner = optimizer if local is None else local
    packed, state, numbers = _packed(state_owner, place)
    packed_groups = cast("list[dict[str, object]]", packed["param_groups"])
    if local is not None:  # whose own settings follow those of the whole one at the next step
        packed_groups, numbers = optimizer.param_groups, _spread(optimizer, state_owner, numbers)
    groups: list[tuple[Member, ...]] = []
    for i, group in enumerate(optimizer.param_groups):
        found: list[Member] = []
        for j, parameter in enumerate(group["params"]):
            number = numbers[i][j]
            here, slots = number is not _ELSEWHERE, state.pop(number, {})
            flat = parameters.flat(parameter)
            if flat is not None:
                found += [_flat_member(parameter, slots, flat.local, span, here=here) for span in flat.spans]
                continue
            home = parameters.home(parameter) or _home_by_name(group, i, j, place)
            if type(home.held) is Range and home.held.absent:
                here = False
            found.append(Member(parameter, home, slots, parameter, None, None, here))
        groups.append(tuple(found))
    _check_paths(groups, place)
    options = tuple({k: v for k, v in group.items() if k not in NOT_OPTIONS} for group in packed_groups)
    extra = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return OptimizerView(tuple(groups), options, state, extra, state_owner)


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


_ELSEWHERE = object()  # the number of a parameter whose state another rank keeps


def _spread(
    whole: Core, state_owner: Core, numbers: list[list[object]]
) -> list[list[object]]:
    """The state owner's numbers of the whole optimizer's parameters."""
    known = {
        id(parameter): number
        for group, of in zip(state_owner.param_groups, numbers, strict=True)
        for parameter, number in zip(group["params"], of, strict=True)
    }
    return [[known.get(id(parameter), _ELSEWHERE) for parameter in group["params"]] for group in whole.param_groups]


def _flat_member(
    owner: torch.Tensor, slots: Mapping[object, object], flat: torch.Tensor, span: Span, *, here: bool
) -> Member:
    """What lies at `span` of the flat parameter `owner`."""
    home = Home(span.name, span.range)
    return Member(span.of(flat), home, slots, owner, span, flat, here)


def _check_paths(groups: Sequence[Sequence[Member]], place: Place) -> None:
    """Two parameters of one name could not be told apart."""
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
    """A parameter that is nowhere in the state goes by the name that the group gives it."""
    names = group.get("param_names")
    if isinstance(names, list) and j < len(names) and isinstance(names[j], str):
        return Home(names[j], None)
    parameter = cast("list[torch.Tensor]", group["params"])[j]
    gathered = "; if it belongs to an FSDP2 module, call reshard() on the whole module after an evaluation"
    raise UnsupportedStateError(
        f"parameter {j} of group {i} of '{place.name}' has no name",
        found="it belongs to no module and no entry of the state, and its group has no param_names",
        next="put the module that owns it into the state, or build the optimizer from named_parameters()"
        + (gathered if is_dtensor(parameter) else ""),
    )


def describe(describer: Describer, optimizer: Core, place: Place) -> MergePoint:
    """Enter an optimizer's tensors; returns its object, as shown at the top."""
    view = view_of(optimizer, describer.parameters, place)
    inside = place.child("state")
    guarded = {id(one) for one in describer.scan.optimizers}
    slots = _Slots(describer, inside, lazy=all(id(one) in guarded for one in parts_of(optimizer)))
    state = MergePoint()
    for member in view.members():
        listed = slots.describe(member)
        if listed:
            state[member.home.path] = listed
    slots.enter()
    options_place = place.child("param_groups")
    groups = Groups(
        {
            "params": [member.home.path for member in members],
            "options": describer.node(dict(options), options_place.child(i)),
        }
        for i, (members, options) in enumerate(zip(view.groups, view.options, strict=True))
    )
    return MergePoint({
        "param_groups": groups,
        "state": state,
        "shared": describer.node(dict(view.shared), inside),
        "extra": describer.node(dict(view.extra), place),
    })


class _Slots:
    """Enters the slots of one parameter after the other; those that their names tell, many at a time."""

    def __init__(self, describer: Describer, inside: Place, *, lazy: bool) -> None:
        """`lazy`: nobody changes them but who has waited before."""
        self._describer, self._inside = describer, inside
        self._role = Role.STEPPED if lazy else Role.OTHER
        self._keys: list[object] = []
        self._names: list[str] = []
        self._values: list[torch.Tensor] = []

    def describe(self, member: Member) -> dict[object, object]:
        """Enter a parameter's slots; returns those that have to be listed."""
        listed: dict[object, object] = {}
        inside, (path, held) = self._inside, member.home
        base = f"{inside.name}.{path}."
        for slot, value in member.slots.items():
            if type(value) not in DENSE_TYPES and implicit(slot) and is_dtensor(value):
                self.enter()
                self._describer.collector.enter(
                    inside.called(f"{base}{slot}", (path, slot)), value, role=self._role  # type: ignore[arg-type]
                )
                continue
            if not implicit(slot) or type(value) not in DENSE_TYPES:
                if not member.here:
                    continue  # whoever has the parameter lists it: a load leaves what is here as it was
                self.enter()
                plain = self._describer.key(slot, inside)
                inner = inside.child(path).child(plain)
                own = provider_of_tensor(value) is not None
                describer = self._describer
                node = describer.provided(value, inner, self._role) if own else describer.node(value, inner)
                if type(held) is Range and refers_to_tensors(node):
                    raise _no_match(inner.name)
                listed[plain] = node
                continue
            name, key = base + cast("str", slot), (path, slot)
            mine = cast("torch.Tensor", value if member.span is None else member.part_of(value))
            if held is not None and mine.shape == member.parameter.shape:
                self.enter()
                self._describer.collector.enter(inside.called(name, key), mine, within=held, role=self._role)
            elif not member.here:
                continue
            elif type(held) is Range and mine.numel() != 1:
                raise _no_match(name)
            else:
                self._names.append(name)
                self._keys.append(key)
                self._values.append(value)  # type: ignore[arg-type]
            if inside.rank is not None:
                # Another rank may take this entry, and could not tell the slots from the names.
                listed[slot] = TensorRef(name, "tensor")
        return listed

    def enter(self) -> None:
        """Enter what has been collected: before anything else is, so that pieces stay in the state's order."""
        roles = [self._role] * len(self._names)
        self._describer.collector.enter_all(self._inside, self._keys, self._names, self._values, roles=roles)
        self._keys, self._names, self._values = [], [], []


def _no_match(name: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"slot '{name}' does not match this rank's shard",
        expected="a tensor as long as the shard, a single number, or values without tensors",
        next="save it as an entry of its own, in fs.PerRank",
    )


def implicit(key: object) -> bool:
    """Whether a tensor's name alone tells the slot."""
    return type(key) is str and "." not in key
