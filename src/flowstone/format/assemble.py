"""Rebuilds a section of a checkpoint as a state dict: its stored object, in which references are replaced by tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowstone.format.inner_objects import INNER, StoredOptimizer, inner_state, stored_optimizer
from flowstone.format.objects import NamedConstant, ProviderRecord, TensorRef


class LiveValues(NamedTuple):
    """Functions that make values of libraries that may not be installed. Without the library, a value stays as stored.

    value_of  makes a constant of torch or numpy, at a path
    make      makes an object of a registered class, given a function that builds its fields; returns None if there is
              no such class
    """

    value_of: Callable[[NamedConstant, str], object] = lambda constant, _: constant
    make: Callable[[ProviderRecord, Callable[[object], object]], object | None] = lambda _, __: None


def tensor_names(names: Iterable[str], section: str, node: object) -> list[str]:
    """The names of a section's tensors: those that begin with the section's name, and those that its stored object
    `node` refers to.
    """
    below = [name for name in names if name == section or name.startswith((f"{section}.", f"{section}@"))]
    return list(dict.fromkeys([*below, *_refs(node)]))


def _refs(node: object) -> Iterable[str]:
    if isinstance(node, TensorRef):
        yield node.name
    elif isinstance(node, ProviderRecord):
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
    """Rebuild the state_dict() of a section's object.

    node      the stored object
    tensors   all tensors of the section, by stored name
    by_name   whether parameters of an optimizer get names, as in `get_optimizer_state_dict`, instead of numbers
    live      the functions that make values of other libraries
    """
    unused = dict(tensors)

    def tensor_of(ref: TensorRef) -> object:
        unused.pop(ref.name, None)
        tensor = tensors[ref.name]
        if ref.kind == "tensor":
            return tensor
        array = tensor if isinstance(tensor, np.ndarray) else tensor.numpy()
        return array if ref.kind == "ndarray" else (bytes if ref.kind == "bytes" else bytearray)(array.tobytes())

    def build(node: object) -> Any:
        if isinstance(node, TensorRef):
            return tensor_of(node)
        if isinstance(node, NamedConstant):
            return live.value_of(node, section)
        if isinstance(node, ProviderRecord) and node.kind == INNER:
            return build(inner_state(node, section))
        if isinstance(node, ProviderRecord):
            if not node.parts and (made_object := live.make(node, build)) is not None:
                return made_object
            parts = {name: tensor_of(part) for name, part in node.parts.items()}
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
    # tensors of modules, to which no object refers: their names say where they belong
    for name, value in unused.items():
        _insert(made, name.removeprefix(section).removeprefix("."), value)
    return made


def _insert(made: Any, name: str, value: object) -> None:
    """Put a tensor into nested dicts, at the path that its name describes."""
    first, _, rest = name.partition(".")
    if rest and isinstance(made.get(first), dict):
        _insert(made[first], rest, value)
    else:
        made[name] = value


def _optimizer(
    section: str, stored: StoredOptimizer, tensors: Mapping[str, Any], build: Callable[[object], Any], *, by_name: bool
) -> dict[str, Any]:
    """The state dict of an optimizer. Its parameters are numbered in the order of its groups."""
    paths = [path for group in stored.groups for path in group.params]
    keys: dict[str, object] = _parameter_names(paths) if by_name else {path: i for i, path in enumerate(paths)}
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


def _parameter_names(paths: list[str]) -> dict[str, object]:
    """For each path of a parameter, the parameter's name in its module. If all paths begin with the same section, the
    names omit it.
    """
    sections = {path.partition(".")[0] for path in paths}
    if len(sections) != 1:
        return {path: path for path in paths}
    return {path: path.partition(".")[2] or path for path in paths}
