"""Sections of a checkpoint as state dicts: stored objects, with tensors in the places of what refers to them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowstone.format.inner_objects import INNER, StoredOptimizer, inner_state, stored_optimizer
from flowstone.format.objects import Named, Provided, TensorRef


class LiveValues(NamedTuple):
    """Functions that make values which need code that may not be installed; without it, a value stays as stored.

    value_of  makes a constant of torch or numpy, at a path
    make      makes an object of a registered class, with a function for the values of its fields; None: no such class
    """

    value_of: Callable[[Named, str], object] = lambda constant, _: constant
    make: Callable[[Provided, Callable[[object], object]], object | None] = lambda _, __: None


def tensor_names(names: Iterable[str], section: str, node: object) -> list[str]:
    """The names of the tensors of a section, whose stored object is `node`: those in it, and those below its name."""
    below = [name for name in names if name == section or name.startswith((f"{section}.", f"{section}@"))]
    return list(dict.fromkeys([*below, *_refs(node)]))


def _refs(node: object) -> Iterable[str]:
    if isinstance(node, TensorRef):
        yield node.name
    elif isinstance(node, Provided):
        for part in node.parts.values():
            yield part.name
        yield from _refs(node.objects)
    elif isinstance(node, Mapping):
        for item in node.values():
            yield from _refs(item)
    elif isinstance(node, (list, tuple, deque)):
        for item in node:
            yield from _refs(item)


def assemble(
    section: str, node: object, tensors: Mapping[str, Any], *, by_name: bool, live: LiveValues
) -> object:
    """A section as what its object's state_dict() returned.

    node      the stored object
    tensors   by stored name, all that are the section's
    by_name   an optimizer's parameters have their names, as `get_optimizer_state_dict` gives them, not numbers
    live      the functions for values that need code
    """
    left = dict(tensors)

    def take(ref: TensorRef) -> object:
        left.pop(ref.name, None)
        found = tensors[ref.name]
        if ref.kind == "tensor":
            return found
        array = found if isinstance(found, np.ndarray) else found.numpy()
        return array if ref.kind == "ndarray" else (bytes if ref.kind == "bytes" else bytearray)(array.tobytes())

    def build(node: object) -> Any:
        if isinstance(node, TensorRef):
            return take(node)
        if isinstance(node, Named):
            return live.value_of(node, section)
        if isinstance(node, Provided) and node.kind == INNER:
            return build(inner_state(node, section))
        if isinstance(node, Provided):
            if not node.parts and (found := live.make(node, build)) is not None:
                return found
            parts = {name: take(part) for name, part in node.parts.items()}
            return {"kind": node.kind, "parts": parts, "objects": build(node.objects)}
        if isinstance(node, Counter):
            return node
        if isinstance(node, OrderedDict):
            return OrderedDict((key, build(item)) for key, item in node.items())
        if isinstance(node, dict):
            return {key: build(item) for key, item in node.items()}
        if isinstance(node, deque):
            return deque(map(build, node), node.maxlen)
        if isinstance(node, (list, tuple)):
            return type(node)(map(build, node))
        return node

    optimizer = stored_optimizer(node)
    if optimizer is not None:
        return _optimizer(section, optimizer, tensors, build, by_name=by_name)
    made = build(node)
    for name, value in left.items():  # of modules: their names say where they belong
        _enter(made, name.removeprefix(section).removeprefix("."), value)
    return made


def _enter(made: Any, name: str, value: object) -> None:
    """Put a tensor below the innermost dict that its name leads to."""
    first, _, rest = name.partition(".")
    if rest and isinstance(made.get(first), dict):
        _enter(made[first], rest, value)
    else:
        made[name] = value


def _optimizer(
    section: str, stored: StoredOptimizer, tensors: Mapping[str, Any], build: Callable[[object], Any], *, by_name: bool
) -> dict[str, Any]:
    """An optimizer's state dict; its parameters are numbered in the order of its groups."""
    paths = [path for group in stored.groups for path in group.params]
    keys: dict[str, object] = _short(paths) if by_name else {path: number for number, path in enumerate(paths)}
    slots: dict[object, dict[object, object]] = {}
    prefix = f"{section}.state."
    for name, value in tensors.items():
        path, _, slot = name.removeprefix(prefix).rpartition(".")
        if name.startswith(prefix) and path in keys:
            slots.setdefault(keys[path], {})[slot] = value
    for path, listed in stored.listed.items():
        if path in keys:
            slots.setdefault(keys[path], {}).update(build(listed))
    state = {key: slots[key] for key in keys.values() if key in slots}
    groups = [{**build(group.options), "params": [keys[path] for path in group.params]} for group in stored.groups]
    return {"state": {**state, **build(stored.shared)}, "param_groups": groups, **build(stored.extra)}


def _short(paths: list[str]) -> dict[str, object]:
    """Paths to the names that the module itself has for them: without its section, if all lie in one."""
    sections = {path.partition(".")[0] for path in paths}
    if len(sections) != 1:
        return {path: path for path in paths}
    return {path: path.partition(".")[2] or path for path in paths}
