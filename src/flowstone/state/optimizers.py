"""Optimizers: slots under their parameters' names, groups by their members.

An optimizer's object:

    {"param_groups": [{"params": [path, ...], "options": {...}}, ...],
     "state":  {path: {slot: value}},    every slot that is not a tensor under a plain name
     "shared": {key: value},             state that belongs to no parameter
     "extra":  {key: value}}             what a subclass adds to its state_dict()

A slot that is a tensor, and whose key is text without a dot, is in no list: the tensor's name,
`<optimizer>.state.<path>.<slot>`, says all. So a million slots cost the objects nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from flowstone.errors import CollisionError, UnsupportedStateError
from flowstone.format.objects import TensorRef
from flowstone.state.names import Place
from flowstone.state.survey import Home, Parameters, refuse_failed_call

if TYPE_CHECKING:
    from flowstone.state.describe import Describer

NOT_OPTIONS = frozenset({"params", "param_names"})
"""Keys of a group that belong to the order of its members, not to its settings."""


@dataclass(frozen=True, slots=True)
class Member:
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
    paths: dict[str, str] = {}
    for i, group in enumerate(optimizer.param_groups):
        found = []
        for j, parameter in enumerate(group["params"]):
            home = parameters.home(parameter) or _home_by_name(group, i, j, place)
            if home.path in paths:
                raise CollisionError(
                    f"two parameters of '{place.name}' have the name '{home.path}'",
                    first=paths[home.path],
                    second=f"group {i}, parameter {j}",
                    next="put their module into the state, or give param_names that differ",
                )
            paths[home.path] = f"group {i}, parameter {j}"
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


def describe(describer: Describer, optimizer: torch.optim.Optimizer, place: Place) -> dict[str, object]:
    """Enter an optimizer's tensors; returns its object, as drawn at the top."""
    anatomy = dissect(optimizer, describer.parameters, place)
    inside = place.child("state")
    state: dict[str, object] = {}
    for member in anatomy.members():
        listed = _describe_slots(describer, member, inside)
        if listed:
            state[member.home.path] = listed
    options_place = place.child("param_groups")
    groups = [
        {
            "params": [member.home.path for member in members],
            "options": describer.node(dict(options), options_place.child(i)),
        }
        for i, (members, options) in enumerate(zip(anatomy.groups, anatomy.options, strict=True))
    ]
    return {
        "param_groups": groups,
        "state": state,
        "shared": describer.node(dict(anatomy.shared), inside),
        "extra": describer.node(dict(anatomy.extra), place),
    }


def _describe_slots(describer: Describer, member: Member, inside: Place) -> dict[object, object]:
    """Enter a parameter's slots; returns those that have to be listed."""
    listed: dict[object, object] = {}
    path, shard = member.home
    base = f"{inside.name}.{path}."
    for slot, value in member.slots.items():
        key = describer.key(slot, inside)
        if implicit(key) and isinstance(value, torch.Tensor):
            place = inside.called(base + cast("str", key), (path, key))
            within = shard if shard is not None and value.shape == member.parameter.shape else None
            describer.ledger.describe_tensor(place, value, within=within, lazy=True)
            if inside.rank is None:
                continue
            # Another rank may take this entry, and could not tell the slots from the names.
            listed[key] = TensorRef(place.name, "tensor")
        else:
            listed[key] = describer.node(value, inside.child(path).child(key))
    return listed


def implicit(key: object) -> bool:
    """Whether a tensor's name alone tells the slot."""
    return type(key) is str and "." not in key
