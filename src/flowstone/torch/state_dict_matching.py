"""A stored `Optimizer.state_dict()`, matched with the optimizer into which it is loaded: by names, or by order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from flowstone.format.inner_objects import StoredGroup, StoredOptimizer
from flowstone.format.objects import TensorRef
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place, strip_wrappers
from flowstone.torch.optimizer_view import NOT_OPTIONS, OptimizerView, ParameterMember
from flowstone.torch.state_dict_objects import StateDictOptimizer


def translate(loading: RestorePass, node: object, view: OptimizerView, place: Place) -> StoredOptimizer | None:
    """The entries of a stored state_dict(), in the form in which an optimizer itself is stored, for a load into the
    optimizer of `view`.

    Parameters are matched by name, if every stored parameter has a name, and no name fits several parameters of the
    optimizer; otherwise by order. Returns None if they cannot be matched: the counts differ, a parameter number occurs
    twice, or the optimizer has flat parameters, which are matched only by name. Then, and also if only shapes differ,
    the differences are added to those that `loading` reports.
    """
    stored = cast("dict[str, list[dict[object, object]]]", node)
    groups, slots = stored["param_groups"], cast("dict[object, dict[object, object]]", stored["state"])
    named = _by_name(loading, groups, view, place)
    numbers = [cast("list[object]", group["params"]) for group in groups]
    mine = [list(group) for group in view.groups]
    if named is None:
        flat = any(member.span is not None for group in mine for member in group)
        if flat or list(map(len, numbers)) != list(map(len, mine)):
            counts = [", ".join(str(len(group)) for group in side) for side in (mine, numbers)]
            loading.add_difference(
                "kind", place.name, f"an optimizer of groups of {counts[0]} parameters",
                f"groups of {counts[1]} parameters",
            )
            return None
        pairs = [pair for of, group in zip(numbers, mine, strict=True) for pair in zip(of, group, strict=True)]
    else:
        pairs = named
    members = dict(pairs)
    if len(members) != len(pairs) or not all(isinstance(own, dict) for key, own in slots.items() if key in members):
        loading.add_difference(
            "kind", place.name, "an optimizer",
            "a state_dict() with a parameter number twice, or a slot that is not a dict"
        )
        return None
    is_numbered = isinstance(view.state_owner, StateDictOptimizer) and view.state_owner.numbered
    for number, member in () if is_numbered else pairs:
        _check_shapes(loading, slots.get(number, {}), member, place)
    how = "by order, as load_state_dict() does" if named is None else "by name"
    loading.notes.append(f"{place.name}: a state_dict() was saved; its parameters were matched {how}")
    return StoredOptimizer(
        [
            StoredGroup([members[number].home.path for number in of if number in members], _options(group))
            for of, group in zip(numbers, groups, strict=True)
        ],
        {members[number].home.path: of for number, of in slots.items() if number in members},
        {key: value for key, value in slots.items() if key not in members},
        {key: value for key, value in stored.items() if key not in ("state", "param_groups")},
    )


def _options(group: Mapping[object, object]) -> dict[object, object]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def _by_name(
    loading: RestorePass, groups: list[dict[object, object]], view: OptimizerView, place: Place
) -> list[tuple[object, ParameterMember]] | None:
    """For each stored parameter, its number, and the member of the optimizer with the same name. None if a stored
    parameter has no name, or a name that fits several members.
    """
    pairs: list[tuple[object, ParameterMember]] = []
    by_path = {member.home.path: member for member in view.members()}
    for group in groups:
        numbers = cast("list[object]", group["params"])
        names = group.get("param_names", numbers)
        if not isinstance(names, list) or len(names) != len(numbers) or not all(type(name) is str for name in names):
            return None
        for number, name in zip(numbers, names, strict=True):
            end = loading.stored.rename(strip_wrappers(name))
            matching = [path for path in by_path if path == end or path.endswith(f".{end}")]
            if not matching:
                loading.add_difference(
                    "unexpected", f"{place.name}.state.{name}", "no such parameter", "state of this parameter"
                )
            if len(matching) > 1:
                return None
            pairs += [(number, by_path[path]) for path in matching]
    return pairs


def _check_shapes(loading: RestorePass, slots: Mapping[object, object], member: ParameterMember, place: Place) -> None:
    """Add a difference for each slot that neither has its parameter's shape nor is a single number. Without this check,
    a wrong match would go undetected.

    Slots may also be factors of that shape: Adafactor has a slot for rows and a slot for columns.
    """
    held = member.home.held
    shape = tuple(member.parameter.shape if held is None else held.shape)
    names = {key: loading.stored.rename(node.name) for key, node in slots.items() if isinstance(node, TensorRef)}
    shapes = {key: loading.stored.tensors[name].shape for key, name in names.items() if name in loading.stored.tensors}
    factors = [own for own in shapes.values() if len(own) == len(shape)]
    is_factored = tuple(map(max, zip(*factors, strict=True))) == shape
    for key, own in shapes.items():
        is_factor = is_factored and own in factors and all(map(_divides, own, shape))
        if own != shape and set(own) - {1} and not is_factor:
            expected = f"{shape} or a single number, for '{member.home.path}'"
            loading.add_difference("shape", f"{place.name}.state.{member.home.path}.{key}", expected, str(own))


def _divides(side: int, of: int) -> bool:
    return side in (1, of)
