"""A `state_dict()`'s result in place of the object itself: the idiom of torch.save.

It is saved, and loaded back into such dicts. But none of it is lazy, and an optimizer's slots have numbers as
names, which mean something only together with the order of parameters. A stored one can be loaded into the optimizer
itself by that order, as `Optimizer.load_state_dict` does, after everything that can be compared has been compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import cast

import torch

from flowstone.format.bounds import brief
from flowstone.format.inner_objects import StoredGroup, StoredOptimizer, stored_optimizer
from flowstone.format.objects import TensorRef
from flowstone.log import log
from flowstone.state.loading import Loading
from flowstone.state.names import Place, strip_wrappers
from flowstone.state.optimizer_view import NOT_OPTIONS, Member, OptimizerView
from flowstone.state.state_dict_objects import StateDictOptimizer

_DEPTH_MAX = 3  # containers that are searched: {"trainer": {"optimizers": [...]}}
_ITEMS_MAX = 100  # of each container


def is_optimizers(value: object) -> bool:
    """Whether it is the result of an optimizer's state_dict(), or the stored form of one."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return (
        isinstance(value["state"], dict) and isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(number) in (int, str) for group in groups for number in group["params"])
    )


def found_in(state: Mapping[str, object], *, modules: bool = True) -> str:
    """For a message: where in a state the state_dict() of an optimizer or a module is; "" if there is none."""
    if modules and isinstance(state, OrderedDict) and hasattr(state, "_metadata"):
        return "the state itself is the state_dict() of a module"
    if not isinstance(state, Mapping):
        return ""  # the description reports the error
    found = [one for one in _found_below(state, "state", 0) if modules or one.endswith("an optimizer")]
    return ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")


def _found_below(value: object, path: str, depth: int) -> Iterator[str]:
    items = value.items() if isinstance(value, Mapping) else enumerate(cast("list[object]", value))
    for _, (key, item) in zip(range(_ITEMS_MAX), items, strict=False):
        inner = f"{path}[{brief(key)}]"
        if is_optimizers(item):
            yield f"{inner} is the state_dict() of an optimizer"
        elif isinstance(item, OrderedDict) and hasattr(item, "_metadata"):
            yield f"{inner} is the state_dict() of a module"
        elif depth < _DEPTH_MAX and type(item) in (dict, list):
            yield from _found_below(item, inner, depth + 1)


@cache
def warn_of_save(found: str) -> None:
    """Log once that saving the object itself is better than the state_dict() `found` in the state."""
    log.warning(
        "%s. All of it is captured before save() returns, and an optimizer's state is named by numbers. Pass the "
        'objects themselves: save(step, {"model": model, "optimizer": optimizer}); load() takes the same',
        found,
    )


@cache
def warn_of_load(found: str) -> None:
    """The same for a load."""
    log.warning(
        "%s. Its tensors are loaded in place, but learning rates and other plain values only into that dict: give it "
        "to the optimizer's load_state_dict() after the load, or pass the optimizer itself",
        found,
    )


def wrapped_sections(state: Mapping[str, object], objects: Mapping[str, object]) -> tuple[str, ...]:
    """Sections of modules for which a state_dict() is stored, with wrappers' names in its keys (`module.weight`)."""
    return tuple([
        section for section, node in objects.items()
        if isinstance(state.get(section), torch.nn.Module) and type(node) in (dict, OrderedDict)
        and _is_wrapped([key for key, item in cast("dict[object, object]", node).items() if type(item) is TensorRef])
    ])


def _is_wrapped(keys: list[object]) -> bool:
    if not all(type(key) is str for key in keys):
        return False
    stripped = {strip_wrappers(cast("str", key)) for key in keys}
    return len(stripped) == len(keys) and stripped != set(keys)


def is_fresh(value: object, node: object) -> bool:
    """Whether a state_dict() has no state yet for parameters that have some in the stored one."""
    mine, theirs = cast("dict[str, dict[object, object]]", value), cast("dict[str, dict[object, object]]", node)
    return bool(theirs["state"]) and not mine["state"]


def is_lost_on(loading: Loading, value: object, node: object, place: Place) -> bool:
    """Whether the state_dict() in the state has no room for the stored optimizer state."""
    itself = f"pass the optimizer itself as {place.path}, not its state_dict()"
    if stored_optimizer(node) is not None:
        loading.differ("kind", place.name, "the state_dict() of an optimizer", "an optimizer")
        loading.remedies.append(itself)
        return True
    if is_optimizers(node) and is_fresh(value, node):
        loading.remedies.append(f"{itself}: this one is new and has no tensors to load into")
    return False


def translate(loading: Loading, node: object, view: OptimizerView, place: Place) -> StoredOptimizer | None:
    """The entries of a stored state_dict(), for the optimizer of `view` into which it is loaded.

    Matched by names, if both have them; else by order, if all counts and shapes agree. Disagreements are entered as
    differences, and the result is None.
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
            loading.differ("kind", place.name, f"an optimizer of groups of {counts[0]} parameters", f"of {counts[1]}")
            return None
        pairs = [pair for of, group in zip(numbers, mine, strict=True) for pair in zip(of, group, strict=True)]
    else:
        pairs = named
    members = dict(pairs)
    if len(members) != len(pairs) or not all(isinstance(one, dict) for key, one in slots.items() if key in members):
        loading.differ("kind", place.name, "an optimizer", "a state_dict() that numbers its parameters twice")
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
    loading: Loading, groups: list[dict[object, object]], view: OptimizerView, place: Place
) -> list[tuple[object, Member]] | None:
    """Numbers of stored parameters with the members of the same names; None if some have no usable name."""
    pairs: list[tuple[object, Member]] = []
    by_path = {member.home.path: member for member in view.members()}
    for group in groups:
        numbers = cast("list[object]", group["params"])
        names = group.get("param_names", numbers)
        if not isinstance(names, list) or len(names) != len(numbers) or not all(type(name) is str for name in names):
            return None
        for number, name in zip(numbers, names, strict=True):
            end = loading.stored.rename(strip_wrappers(name))
            found = [path for path in by_path if path == end or path.endswith(f".{end}")]
            if not found:
                loading.differ("unexpected", f"{place.name}.state.{name}", "no such parameter", "state of it")
            if len(found) > 1:
                return None
            pairs += [(number, by_path[path]) for path in found]
    return pairs


def _check_shapes(loading: Loading, slots: Mapping[object, object], member: Member, place: Place) -> None:
    """Check that each slot has its parameter's shape, or is a single number: a wrong match would not show otherwise.

    Or that they are factors of that shape, as Adafactor has one of rows and one of columns.
    """
    held = member.home.held
    shape = tuple(member.parameter.shape if held is None else held.shape)
    names = {key: loading.stored.rename(node.name) for key, node in slots.items() if isinstance(node, TensorRef)}
    shapes = {key: loading.stored.tensors[name].shape for key, name in names.items() if name in loading.stored.tensors}
    factors = [one for one in shapes.values() if len(one) == len(shape)]
    is_factored = tuple(map(max, zip(*factors, strict=True))) == shape
    for key, found in shapes.items():
        is_factor = is_factored and found in factors and all(map(_divides, found, shape))
        if found != shape and set(found) - {1} and not is_factor:
            wanted = f"{shape} or a single number, for '{member.home.path}'"
            loading.differ("shape", f"{place.name}.state.{member.home.path}.{key}", wanted, str(found))


def _divides(side: int, of: int) -> bool:
    return side in (1, of)
