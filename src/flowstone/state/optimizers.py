"""Optimizers: slots under their parameters' names, groups by their members.

An optimizer's object:

    {"param_groups": [{"params": [path, ...], "options": {...}}, ...],
     "state":  {path: {slot: value}},    every slot that is not a dense tensor under a plain name
     "shared": {key: value},             state that belongs to no parameter
     "extra":  {key: value}}             what a subclass adds to its state_dict()

A slot that is a tensor, and whose key is text without a dot, is in no list: the tensor's name,
`<optimizer>.state.<path>.<slot>`, says all. So a million slots cost the objects nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from flowstone.errors import CollisionError, UnsupportedStateError
from flowstone.format.joints import Groups, Joint
from flowstone.format.objects import TensorRef
from flowstone.state.names import Place
from flowstone.state.shards import is_dtensor
from flowstone.state.survey import Home, Parameters, provider_of_tensor, refuse_failed_call
from flowstone.state.tensors import DENSE_TYPES

if TYPE_CHECKING:
    from flowstone.state.describe import Describer

NOT_OPTIONS = frozenset({"params", "param_names"})
"""Keys of a group that belong to the order of its members, not to its settings."""


class Member(NamedTuple):
    """A parameter in a group, as one optimizer sees it."""

    parameter: torch.Tensor
    home: Home
    slots: Mapping[object, object]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """An optimizer's state, put back in the parameters' terms.

    groups   parallel to optimizer.param_groups
    options  parallel: the settings of each group
    shared   state that belongs to no parameter
    extra    further entries of state_dict()
    """

    groups: tuple[tuple[Member, ...], ...]
    options: tuple[Mapping[str, object], ...]
    shared: Mapping[object, object]
    extra: Mapping[object, object]

    def members(self) -> Iterator[Member]:
        for group in self.groups:
            yield from group


def dissect(optimizer: torch.optim.Optimizer, parameters: Parameters, place: Place) -> Anatomy:
    """Read an optimizer through its own state_dict(), whose tensors are the live ones unless it says otherwise.

    raises  UnsupportedStateError for a parameter without a name, CollisionError for two of one name
    """
    try:
        packed = cast("Mapping[object, object]", optimizer.state_dict())
        state = dict(cast("Mapping[object, Mapping[object, object]]", packed["state"]))
        packed_groups = cast("list[dict[str, object]]", packed["param_groups"])
        members = [cast("list[object]", group["params"]) for group in packed_groups]
        if list(map(len, members)) != [len(group["params"]) for group in optimizer.param_groups]:
            raise ValueError("param_groups of other lengths than the optimizer's own")
        if not all(isinstance(slots, Mapping) for slots in state.values()):
            raise TypeError("a state that is no mapping of slots")
    except Exception as error:
        raise refuse_failed_call(place, "state_dict", error) from error
    groups: list[tuple[Member, ...]] = []
    paths: dict[str, tuple[int, int]] = {}
    for i, group in enumerate(optimizer.param_groups):
        found = []
        for j, parameter in enumerate(group["params"]):
            home = parameters.home(parameter) or _home_by_name(group, i, j, place)
            first = paths.setdefault(home.path, (i, j))
            if first != (i, j):
                raise CollisionError(
                    f"two parameters of '{place.name}' have the name '{home.path}'",
                    first=f"group {first[0]}, parameter {first[1]}",
                    second=f"group {i}, parameter {j}",
                    next="put their module into the state, or give param_names that differ",
                )
            found.append(Member(parameter, home, state.pop(members[i][j], {})))
        groups.append(tuple(found))
    options = tuple({k: v for k, v in group.items() if k not in NOT_OPTIONS} for group in packed_groups)
    extra = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return Anatomy(tuple(groups), options, state, extra)


def _home_by_name(group: Mapping[str, object], i: int, j: int, place: Place) -> Home:
    """A parameter that is nowhere in the state goes by the name that the group gives it."""
    names = group.get("param_names")
    if isinstance(names, list) and j < len(names) and isinstance(names[j], str):
        return Home(names[j], None)
    raise UnsupportedStateError(
        f"parameter {j} of group {i} of '{place.name}' has no name",
        found="it belongs to no module and no entry of the state, and its group has no param_names",
        next="put the module that owns it into the state, or build the optimizer from named_parameters()",
    )


def describe(describer: Describer, optimizer: torch.optim.Optimizer, place: Place) -> Joint:
    """Enter an optimizer's tensors; returns its object, as drawn at the top."""
    anatomy = dissect(optimizer, describer.parameters, place)
    inside = place.child("state")
    slots = _Slots(describer, inside)
    state = Joint()
    for member in anatomy.members():
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
        for i, (members, options) in enumerate(zip(anatomy.groups, anatomy.options, strict=True))
    )
    return Joint({
        "param_groups": groups,
        "state": state,
        "shared": describer.node(dict(anatomy.shared), inside),
        "extra": describer.node(dict(anatomy.extra), place),
    })


class _Slots:
    """Enters the slots of one parameter after the other; those that their names tell, many at a time."""

    def __init__(self, describer: Describer, inside: Place) -> None:
        self._describer, self._inside = describer, inside
        self._keys: list[object] = []
        self._names: list[str] = []
        self._values: list[torch.Tensor] = []

    def describe(self, member: Member) -> dict[object, object]:
        """Enter a parameter's slots; returns those that have to be listed."""
        listed: dict[object, object] = {}
        inside, (path, shard) = self._inside, member.home
        base = f"{inside.name}.{path}."
        for slot, value in member.slots.items():
            if type(value) not in DENSE_TYPES and implicit(slot) and is_dtensor(value):
                self.enter()
                self._describer.ledger.enter(inside.called(f"{base}{slot}", (path, slot)), value, lazy=True)  # type: ignore[arg-type]
                continue
            if not implicit(slot) or type(value) not in DENSE_TYPES:
                self.enter()
                plain = self._describer.key(slot, inside)
                inner = inside.child(path).child(plain)
                own = provider_of_tensor(value) is not None
                node = self._describer.provided(value, inner, lazy=True) if own else self._describer.node(value, inner)
                listed[plain] = node
                continue
            name, key = base + cast("str", slot), (path, slot)
            if shard is not None and value.shape == member.parameter.shape:  # type: ignore[attr-defined]
                self.enter()
                self._describer.ledger.enter(inside.called(name, key), value, within=shard, lazy=True)  # type: ignore[arg-type]
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
        lazy = [True] * len(self._names)
        self._describer.ledger.enter_all(self._inside, self._keys, self._names, self._values, lazy=lazy)
        self._keys, self._names, self._values = [], [], []


def implicit(key: object) -> bool:
    """Whether a tensor's name alone tells the slot."""
    return type(key) is str and "." not in key
