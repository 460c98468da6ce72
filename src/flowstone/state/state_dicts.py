"""State dicts in a state. Users of torch.save often pass the result of `state_dict()` instead of the object itself.

They are saved, and loaded back into such dicts. But all of their content is captured before `save` returns, and an
optimizer's state is named by the numbers of parameters, which depend on the order of the parameters. A stored state
dict can be loaded into the optimizer itself by that order, as `Optimizer.load_state_dict` does, after shapes and counts
were compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import cast

from flowstone.format.bounds import short_repr
from flowstone.format.inner_objects import stored_optimizer
from flowstone.format.objects import TensorRef
from flowstone.log import log
from flowstone.state.imported import class_if_imported
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place, strip_wrappers

_DEPTH_MAX = 3  # so many levels of containers are searched, as in {"trainer": {"optimizers": [...]}}
_ITEMS_MAX = 100  # so many items of each container are searched


def is_optimizer_state_dict(value: object) -> bool:
    """Whether `value` is the result of an optimizer's state_dict(), or the stored form of such a result."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return (
        isinstance(value["state"], dict) and isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(number) in (int, str) for group in groups for number in group["params"])
    )


def find_state_dicts(state: Mapping[str, object], *, modules: bool = True) -> str:
    """A text for a message that says where in a state there is the state_dict() of an optimizer or a module; "" if
    there is none.
    """
    if modules and isinstance(state, OrderedDict) and hasattr(state, "_metadata"):
        return "the state itself is the state_dict() of a module"
    if not isinstance(state, Mapping):
        return ""  # the save or load then reports what is wrong with the state
    places = [text for text in _found_below(state, "state", 0) if modules or text.endswith("an optimizer")]
    return ", ".join(places[:4]) + (", ..." if len(places) > 4 else "")


def _found_below(value: object, path: str, depth: int) -> Iterator[str]:
    items = value.items() if isinstance(value, Mapping) else enumerate(cast("list[object]", value))
    for _, (key, item) in zip(range(_ITEMS_MAX), items, strict=False):
        inner = f"{path}[{short_repr(key)}]"
        if is_optimizer_state_dict(item):
            yield f"{inner} is the state_dict() of an optimizer"
        elif isinstance(item, OrderedDict) and hasattr(item, "_metadata"):
            yield f"{inner} is the state_dict() of a module"
        elif depth < _DEPTH_MAX and type(item) in (dict, list):
            yield from _found_below(item, inner, depth + 1)


@cache
def warn_state_dict_saved(description: str) -> None:
    """Log once that saving the object itself is better than a state_dict() in the state."""
    log.warning(
        '%s. All of that dict is captured before save() returns, and optimizer state is named by parameter numbers. '
        'Pass the objects themselves: save(step, {"model": model, "optimizer": optimizer}); load() takes the same',
        description,
    )


@cache
def warn_state_dict_loaded(description: str) -> None:
    """Log once that loading into the object itself is better than loading into its state_dict() in the state."""
    log.warning(
        "%s. The tensors in that dict are loaded in place, but learning rates and other plain values only into the "
        "dict: after the load, pass the dict to the optimizer's load_state_dict(), or load into the optimizer itself",
        description,
    )


def wrapped_sections(state: Mapping[str, object], objects: Mapping[str, object]) -> tuple[str, ...]:
    """The names of sections that are a module in `state`, but in the checkpoint a state_dict() whose keys have a
    wrapper's prefix, such as `module.weight` by DDP.
    """
    module = class_if_imported("torch.nn", "Module")
    return tuple([
        section for section, node in objects.items()
        if module is not None and isinstance(state.get(section), module) and type(node) in (dict, OrderedDict)
        and _is_wrapped([key for key, item in cast("dict[object, object]", node).items() if type(item) is TensorRef])
    ])


def _is_wrapped(keys: list[object]) -> bool:
    if not all(type(key) is str for key in keys):
        return False
    stripped = {strip_wrappers(cast("str", key)) for key in keys}
    return len(stripped) == len(keys) and stripped != set(keys)


def lacks_optimizer_state(value: object, node: object) -> bool:
    """Whether a state_dict() lacks state for parameters that have state in the stored one."""
    mine, theirs = cast("dict[str, dict[object, object]]", value), cast("dict[str, dict[object, object]]", node)
    return bool(theirs["state"]) and not mine["state"]


def refuse_optimizer_state(loading: RestorePass, value: object, node: object, place: Place) -> bool:
    """Whether the checkpoint has an optimizer, not a state_dict(). If so, records this difference. If the state_dict()
    in the state lacks tensors for a stored state_dict(), only adds a remedy.
    """
    itself = f"pass the optimizer itself as {place.path}, not its state_dict()"
    if stored_optimizer(node) is not None:
        loading.add_difference("kind", place.name, "the state_dict() of an optimizer", "an optimizer")
        loading.remedies.append(itself)
        return True
    if is_optimizer_state_dict(node) and lacks_optimizer_state(value, node):
        loading.remedies.append(f"{itself}: this state_dict() is of a new optimizer, and has no tensors to load into")
    return False
