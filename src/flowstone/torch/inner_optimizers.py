"""Optimizers inside of other optimizers: finds the object that has the state, and the objects whose steps must wait
for captures.

Wrappers add something to a step (Accelerate, Lightning, Fabric, a schedule); containers step several optimizers
(torchtitan). Wrappers and containers are saved like the optimizers inside, so that a checkpoint of a wrapped optimizer
loads into a bare one. The fence (the wait of a step for captures) guards all of them, so it does not matter
whose step is called.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import torch

from flowstone.state.imported import class_if_imported

_ONE = ("optimizer", "_optimizer", "base_optimizer", "base", "optim")
_SEVERAL = ("optimizers", "chained_optimizers")
_PACKED = frozenset({"state", "param_groups"})  # the keys of torch's own state_dict()
_DEPTH_MAX = 8

Core: TypeAlias = "torch.optim.Optimizer | JoinedOptimizer"
"""An object that holds state by parameter."""


def is_optimizer(value: object, depth: int = _DEPTH_MAX) -> bool:
    """Whether `value` steps parameters: a torch optimizer, or an object that contains optimizers."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    verbs = callable(getattr(value, "step", None)) and callable(getattr(value, "zero_grad", None))
    return verbs and bool(_inside(value, depth)[0])


def _inside(value: object, depth: int = _DEPTH_MAX) -> tuple[tuple[object, ...], bool]:
    """The optimizers directly inside of `value`, found by the usual attribute names, and whether `value` is a container
    of several.

    If `value` has no such attributes, all its attributes that are torch optimizers are returned.
    """
    fields = getattr(value, "__dict__", {}) if depth else {}
    for name in (*_SEVERAL, *_ONE):
        attribute = fields.get(name)
        contains = name in _SEVERAL or isinstance(attribute, list | tuple)
        if contains:
            members = tuple(attribute.values() if isinstance(attribute, dict) else attribute or ())
        else:
            members = () if attribute is value else (attribute,)
        if members and all(map(is_optimizer, members, itertools.repeat(depth - 1))):
            return members, contains
    others = [other for other in fields.values() if isinstance(other, torch.optim.Optimizer) and other is not value]
    return tuple({id(other): other for other in others}.values()), len(others) > 1


def optimizers_to_fence(value: object) -> tuple[object, ...]:
    """The optimizer, and all optimizers inside of it: their methods must wait for captures. Empty if one of them cannot
    be made to wait.
    """
    reached: dict[int, object] = {}
    waiting = [value]
    while waiting:
        optimizer = waiting.pop()
        if id(optimizer) not in reached:
            reached[id(optimizer)] = optimizer
            waiting += _inside(optimizer)[0]
    guards = tuple(optimizer for optimizer in reached.values() if not _is_thin(optimizer))
    return guards if all(map(_can_be_guarded, guards)) else ()


def has_step_hooks(optimizer: object) -> TypeGuard[torch.optim.Optimizer]:
    """Whether torch calls hooks before the optimizer's step. False if the __init__ of torch's base class was never
    called.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or "_optimizer_step_pre_hooks" not in vars(optimizer):
        return False
    return bool(getattr(type(optimizer).step, "hooked", False))


def _can_be_guarded(optimizer: object) -> bool:
    """Whether the optimizer can be made to wait: it has step hooks, or its methods can be replaced."""
    if has_step_hooks(optimizer):
        return True
    try:
        weakref.ref(optimizer)
    except TypeError:
        return False
    return hasattr(optimizer, "__dict__")


def parameters_of(optimizer: object) -> list[torch.Tensor]:
    """The parameters that an optimizer steps."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def core_of(value: object) -> Core | None:
    """The object that has the state of the optimizer `value`: `value` itself, or an optimizer inside of it. May call
    state_dict().

    None if the state_dict() of `value` does not have torch's form; `value` is then saved like any object with a
    state_dict().
    """
    own = value if isinstance(value, torch.optim.Optimizer) else None
    inner, contains = _inside(value)
    if contains and _only_contains(value, len(inner)):
        cores = [core_of(optimizer) for optimizer in inner]
        if all(isinstance(core, torch.optim.Optimizer) for core in cores):
            parts = cast("list[torch.optim.Optimizer]", cores)
            return parts[0] if len(parts) == 1 else JoinedOptimizer(parts)
    if len(inner) == 1 and not contains and _only_shows(value, inner[0]):
        return core_of(inner[0])
    return own


def base_of(value: object, core: Core) -> Core | None:
    """An optimizer inside of `value` with state that `value`'s own state_dict() does not show, such as SAM's base."""
    inner = _inside(value)[0]
    if core is not value or not inner:
        return None
    cores = [core_of(optimizer) for optimizer in inner]
    parts = [part for own in cores if own is not None for part in parts_of(own)]
    if None in cores or any(part.state is value.state for part in parts):
        return None
    packed = value.state_dict()
    if not isinstance(packed, Mapping) or set(packed) != _PACKED:
        return None
    return parts[0] if len(parts) == 1 else JoinedOptimizer(parts)


def _only_contains(value: object, count: int) -> bool:
    """Whether a container of `count` optimizers has no further state of its own."""
    if isinstance(value, torch.optim.Optimizer):
        inner = {id(parameter) for part in _inside(value)[0] for parameter in parameters_of(part)}
        return not value.state and inner == {id(parameter) for parameter in parameters_of(value)}
    packed = value.state_dict()  # type: ignore[attr-defined]
    entries = list(packed.values() if isinstance(packed, Mapping) else packed)
    return len(entries) == count and all(isinstance(entry, Mapping) and set(entry) == _PACKED for entry in entries)


def _only_shows(value: object, inner: object) -> bool:
    """Whether the state of the wrapper `value` is exactly that of the optimizer `inner`."""
    if _is_thin(value):
        return True
    fields = vars(value)
    if any(name in fields and fields[name] is not getattr(inner, name, None) for name in _PACKED):
        return False
    mine, theirs = value.state_dict(), inner.state_dict()  # type: ignore[attr-defined]
    if not all(isinstance(tree, Mapping) and set(tree) == _PACKED for tree in (mine, theirs)):
        return False
    return {k: set(v) for k, v in mine["state"].items()} == {k: set(v) for k, v in theirs["state"].items()}


def _is_thin(value: object) -> bool:
    """Whether a wrapper's own step need not wait for captures, because the optimizer inside waits. Judged by the type:
    Accelerate's wrapper, and generated subclasses.
    """
    inner, contains = _inside(value)
    if len(inner) != 1 or contains or not isinstance(value, torch.optim.Optimizer):
        return False
    if type(value) is class_if_imported("accelerate.optimizer", "AcceleratedOptimizer"):
        return True
    made_for_it = type(value) is not type(inner[0]) and isinstance(value, type(inner[0]))
    return made_for_it and vars(value).get("state", inner[0].state) is inner[0].state  # type: ignore[attr-defined]


class JoinedOptimizer:
    """Several optimizers as one, for saves and loads: its groups are those of all, and its state is one mapping."""

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
                raise ValueError(
                    f"{type(part).__name__}, one of several inner optimizers, has state that belongs to no parameter"
                )
            state |= {first + number: slots for number, slots in packed["state"].items()}
            groups += [{**group, "params": [first + n for n in group["params"]]} for group in packed["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, tree: Mapping[str, object]) -> None:
        """Divide a state_dict() of this form among the optimizers, and load each optimizer's part."""
        state = cast("dict[int, object]", tree["state"])
        groups = list(cast("list[dict[str, object]]", tree["param_groups"]))
        for part, first in zip(self.parts, self._firsts(), strict=True):
            own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            own = [{**group, "params": [n - first for n in cast("list[int]", group["params"])]} for group in own]
            numbers = {n for group in own for n in cast("list[int]", group["params"])}
            mine = {n - first: slots for n, slots in state.items() if n - first in numbers}
            part.load_state_dict({"state": mine, "param_groups": own})

    def _firsts(self) -> Iterator[int]:
        """Yield for each optimizer the number of its first parameter, counted over all optimizers."""
        counts = [sum(len(group["params"]) for group in part.param_groups) for part in self.parts]
        return itertools.accumulate(counts[:-1], initial=0)


class _JoinedState(MutableMapping[Any, Any]):
    """The state of several optimizers, by parameter."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self._owner = {id(parameter): part for part in parts for parameter in parameters_of(part)}

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
    """The torch optimizers of which a `Core` consists: itself, or those in a JoinedOptimizer."""
    return core.parts if isinstance(core, JoinedOptimizer) else (core,)
