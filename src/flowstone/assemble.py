"""Sections of a checkpoint as state dicts: stored objects, with tensors in the places of what refers to them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from flowstone.errors import ArgumentError, NoTensorError
from flowstone.format.objects import Named, Provided, TensorRef

_SLOT_STATE = ".state."


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
    section: str, node: object, tensors: Mapping[str, Any], constant: Callable[[Named], object], *, by_name: bool
) -> object:
    """A section as what its object's state_dict() returned.

    node      the stored object
    tensors   by stored name, all that are the section's
    constant  makes a library's constant of its name
    by_name   an optimizer's parameters have their names, as `get_optimizer_state_dict` gives them, not numbers
    """
    left = dict(tensors)

    def take(ref: TensorRef) -> object:
        left.pop(ref.name, None)
        found = tensors[ref.name]
        if ref.kind in ("bytes", "bytearray"):
            return (bytes if ref.kind == "bytes" else bytearray)(found.numpy().tobytes())
        return found.numpy() if ref.kind == "ndarray" else found

    def build(node: object) -> Any:
        if isinstance(node, TensorRef):
            return take(node)
        if isinstance(node, Named):
            return constant(node)
        if isinstance(node, Provided):
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

    if _is_optimizer(node):
        return _optimizer(section, cast("dict[str, Any]", node), tensors, build, by_name=by_name)
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


def _is_optimizer(node: object) -> bool:
    return isinstance(node, dict) and {"param_groups", "state", "shared", "extra"} <= node.keys()


def _optimizer(
    section: str, node: dict[str, Any], tensors: Mapping[str, Any], build: Callable[[object], Any], *, by_name: bool
) -> dict[str, Any]:
    """An optimizer's state dict; its parameters are numbered in the order of its groups."""
    paths = [path for group in node["param_groups"] for path in group["params"]]
    keys: dict[str, object] = _short(paths) if by_name else {path: number for number, path in enumerate(paths)}
    slots: dict[object, dict[object, object]] = {}
    prefix = f"{section}{_SLOT_STATE}"
    for name, value in tensors.items():
        path, _, slot = name.removeprefix(prefix).rpartition(".")
        if name.startswith(prefix) and path in keys:
            slots.setdefault(keys[path], {})[slot] = value
    for path, listed in node["state"].items():
        if path in keys:
            slots.setdefault(keys[path], {}).update(build(listed))
    state = {key: slots[key] for key in keys.values() if key in slots}
    groups = [
        {**build(group["options"]), "params": [keys[path] for path in group["params"]]}
        for group in node["param_groups"]
    ]
    return {"state": {**state, **build(node["shared"])}, "param_groups": groups, **build(node["extra"])}


def _short(paths: list[str]) -> dict[str, object]:
    """Paths to the names that the module itself has for them: without its section, if all lie in one."""
    sections = {path.partition(".")[0] for path in paths}
    if len(sections) != 1:
        return {path: path for path in paths}
    return {path: path.partition(".")[2] or path for path in paths}


def no_section(section: object, sections: Iterable[str]) -> NoTensorError:
    """The error for a section that is not there."""
    return NoTensorError(
        f"no section {section!r} in this checkpoint", found=", ".join(map(repr, sections)) or "none",
        next="give one of these, or none for all of them",
    )


def needs_rank(section: str, ranks: int) -> ArgumentError:
    """The error for a section that each rank has its own of."""
    return ArgumentError(
        f"section {section!r} was saved for each of {ranks} ranks apart",
        next=f"say whose: state_dict({section!r}, rank=0)",
    )
