"""Optimizers inside of others: which object holds the state that a wrapper shows, and which objects must wait.

Wrappers add something to a step (Accelerate, Lightning, Fabric, a schedule); containers step several optimizers
(torchtitan). Both are saved as the optimizers inside, so that a checkpoint of one loads into the other. The fence
guards all of them, so that it works whichever step is called.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import torch

from flowstone.state.imported import imported

_ONE = ("optimizer", "_optimizer", "base_optimizer", "base", "optim")
_SEVERAL = ("optimizers", "chained_optimizers")
_PACKED = frozenset({"state", "param_groups"})  # the keys of torch's own state_dict()
_DEPTH_MAX = 8

Core: TypeAlias = "torch.optim.Optimizer | Joined"
"""An object that holds state by parameter."""


def is_optimizer(value: object, depth: int = _DEPTH_MAX) -> bool:
    """Whether `value` steps parameters: a torch optimizer, or an object around some."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    verbs = callable(getattr(value, "step", None)) and callable(getattr(value, "zero_grad", None))
    return verbs and bool(_inside(value, depth)[0])


def _inside(value: object, depth: int = _DEPTH_MAX) -> tuple[tuple[object, ...], bool]:
    """The optimizers directly inside of `value`, by the usual attribute names, and whether it contains several.

    If there is no usual name: torch's optimizers among all attributes.
    """
    fields = getattr(value, "__dict__", {}) if depth else {}
    for name in (*_SEVERAL, *_ONE):
        found = fields.get(name)
        contains = name in _SEVERAL or isinstance(found, list | tuple)
        if contains:
            members = tuple(found.values() if isinstance(found, dict) else found or ())
        else:
            members = () if found is value else (found,)
        if members and all(map(is_optimizer, members, itertools.repeat(depth - 1))):
            return members, contains
    others = [one for one in fields.values() if isinstance(one, torch.optim.Optimizer) and one is not value]
    return tuple({id(one): one for one in others}.values()), len(others) > 1


def guards_of(value: object) -> tuple[object, ...]:
    """An optimizer and all inside of it whose methods the fence must guard. Empty if one of them cannot be guarded."""
    found: dict[int, object] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += _inside(one)[0]
    guards = tuple(one for one in found.values() if not _is_thin(one))
    return guards if all(map(_can_be_guarded, guards)) else ()


def takes_hook(optimizer: object) -> TypeGuard[torch.optim.Optimizer]:
    """Whether torch calls hooks before its step: not if the base class's __init__ was never called."""
    if not isinstance(optimizer, torch.optim.Optimizer) or "_optimizer_step_pre_hooks" not in vars(optimizer):
        return False
    return bool(getattr(type(optimizer).step, "hooked", False))


def _can_be_guarded(optimizer: object) -> bool:
    """Whether it has step hooks, or a method of the object can be replaced."""
    if takes_hook(optimizer):
        return True
    try:
        weakref.ref(optimizer)
    except TypeError:
        return False
    return hasattr(optimizer, "__dict__")


def stepped_by(optimizer: object) -> list[torch.Tensor]:
    """The parameters that an optimizer steps."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def core_of(value: object) -> Core | None:
    """The object that holds an optimizer's state: itself, or one inside of it. May call state_dict().

    None if its state_dict() has a different form: then it is saved like any other object with a state_dict().
    """
    own = value if isinstance(value, torch.optim.Optimizer) else None
    inner, contains = _inside(value)
    if contains and _only_contains(value, len(inner)):
        cores = [core_of(one) for one in inner]
        if all(isinstance(one, torch.optim.Optimizer) for one in cores):
            parts = cast("list[torch.optim.Optimizer]", cores)
            return parts[0] if len(parts) == 1 else Joined(parts)
    if len(inner) == 1 and not contains and _only_shows(value, inner[0]):
        return core_of(inner[0])
    return own


def base_of(value: object, core: Core) -> Core | None:
    """An optimizer inside of one with its own `core` that has state which the outer one does not show: SAM's base."""
    inner = _inside(value)[0]
    if core is not value or not inner:
        return None
    cores = [core_of(one) for one in inner]
    parts = [part for one in cores if one is not None for part in parts_of(one)]
    if None in cores or any(part.state is value.state for part in parts):
        return None
    packed = value.state_dict()
    if not isinstance(packed, Mapping) or set(packed) != _PACKED:
        return None
    return parts[0] if len(parts) == 1 else Joined(parts)


def _only_contains(value: object, count: int) -> bool:
    """Whether a container of optimizers has no state of its own."""
    if isinstance(value, torch.optim.Optimizer):
        inner = {id(parameter) for part in _inside(value)[0] for parameter in stepped_by(part)}
        return not value.state and inner == {id(parameter) for parameter in stepped_by(value)}
    packed = value.state_dict()  # type: ignore[attr-defined]
    entries = list(packed.values() if isinstance(packed, Mapping) else packed)
    return len(entries) == count and all(isinstance(one, Mapping) and set(one) == _PACKED for one in entries)


def _only_shows(value: object, inner: object) -> bool:
    """Whether a wrapper's state is exactly that of the optimizer inside."""
    if _is_thin(value):
        return True
    fields = vars(value)
    if any(name in fields and fields[name] is not getattr(inner, name, None) for name in _PACKED):
        return False
    mine, theirs = value.state_dict(), inner.state_dict()  # type: ignore[attr-defined]
    if not all(isinstance(one, Mapping) and set(one) == _PACKED for one in (mine, theirs)):
        return False
    return {k: set(v) for k, v in mine["state"].items()} == {k: set(v) for k, v in theirs["state"].items()}


def _is_thin(value: object) -> bool:
    """Whether a wrapper's step needs no guard of its own, by its type: Accelerate's, and subclasses made around one."""
    inner, contains = _inside(value)
    if len(inner) != 1 or contains or not isinstance(value, torch.optim.Optimizer):
        return False
    if type(value) is imported("accelerate.optimizer", "AcceleratedOptimizer"):
        return True
    made_for_it = type(value) is not type(inner[0]) and isinstance(value, type(inner[0]))
    return made_for_it and vars(value).get("state", inner[0].state) is inner[0].state  # type: ignore[attr-defined]


class Joined:
    """Several optimizers as one: their groups concatenated, their state in one mapping. For describing and restoring.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        self.state: MutableMapping[Any, Any] = _JoinedState(self.parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def state_dict(self) -> dict[str, object]:
        """The state_dict() of one optimizer with all these groups. Raises ValueError if it cannot be formed."""
        state: dict[object, object] = {}
        groups: list[dict[str, object]] = []
        for part, first in zip(self.parts, self._firsts(), strict=True):
            packed = part.state_dict()
            if set(packed) != _PACKED or any(type(key) is not int for key in packed["state"]):
                raise ValueError(f"{type(part).__name__} has state of no parameter, and is one of several optimizers")
            state |= {first + number: slots for number, slots in packed["state"].items()}
            groups += [{**group, "params": [first + n for n in group["params"]]} for group in packed["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, tree: Mapping[str, object]) -> None:
        """Give each optimizer its groups and its parameters' state."""
        state = cast("dict[int, object]", tree["state"])
        groups = list(cast("list[dict[str, object]]", tree["param_groups"]))
        for part, first in zip(self.parts, self._firsts(), strict=True):
            own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            own = [{**group, "params": [n - first for n in cast("list[int]", group["params"])]} for group in own]
            numbers = {n for group in own for n in cast("list[int]", group["params"])}
            mine = {n - first: slots for n, slots in state.items() if n - first in numbers}
            part.load_state_dict({"state": mine, "param_groups": own})

    def _firsts(self) -> Iterator[int]:
        """The number of each optimizer's first parameter."""
        counts = [sum(len(group["params"]) for group in part.param_groups) for part in self.parts]
        return itertools.accumulate(counts[:-1], initial=0)


class _JoinedState(MutableMapping[Any, Any]):
    """The state of several optimizers, by parameter."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self._owner = {id(parameter): part for part in parts for parameter in stepped_by(part)}

    def _of(self, key: object) -> MutableMapping[object, object]:
        if id(key) not in self._owner:
            raise KeyError(key)
        return cast("MutableMapping[object, object]", self._owner[id(key)].state)

    def __getitem__(self, key: object) -> object:
        state = self._of(key)
        if key not in state:  # a defaultdict would create the entry
            raise KeyError(key)
        return state[key]

    def __setitem__(self, key: object, value: object) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: object) -> None:
        del self._of(key)[key]

    def __iter__(self) -> Iterator[object]:
        return (key for part in self._parts for key in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def parts_of(core: Core) -> tuple[torch.optim.Optimizer, ...]:
    """The torch optimizers in it."""
    return core.parts if isinstance(core, Joined) else (core,)
