"""Marks of objects inside of another object's state, which a load restores in place; and stored optimizers."""

from __future__ import annotations

import msgspec

from flowstone.errors import DamagedError
from flowstone.format.objects import Provided

INNER = "flowstone.inner"
"""The kind of a `Provided` node that stands for such an object; it has one object, `state`."""


def inner_object(state: object) -> Provided:
    """The mark of an object. `state`: its node, as if the object were a section of its own."""
    return Provided(INNER, {}, {"state": state})


def inner_state(node: object, path: str) -> object:
    """The object's node in a mark; any other node as it is. Raises DamagedError."""
    if not isinstance(node, Provided) or node.kind != INNER:
        return node
    if node.parts or node.objects.keys() != {"state"}:
        raise DamagedError(
            f"the object '{path}' does not match its type", expected="one entry, 'state'",
            found=", ".join([*node.parts, *node.objects]), next="run `flowstone verify`; load another checkpoint",
        )
    return node.objects["state"]


class StoredGroup(msgspec.Struct, frozen=True):
    """A group of a stored optimizer: the paths of its members, and its settings."""

    params: list[str]
    options: dict[object, object]


class StoredOptimizer(msgspec.Struct, frozen=True):
    """The entries of a stored optimizer's object; `listed` is its "state"."""

    groups: list[StoredGroup]
    listed: dict[str, dict[object, object]]
    shared: object
    extra: object


def stored_optimizer(node: object) -> StoredOptimizer | None:
    """The entries of a stored object, or None if it is not an optimizer's."""
    match node:
        case {"param_groups": list(groups), "state": dict(listed), "shared": dict(shared), "extra": dict(extra)}:
            found = []
            for group in groups:
                match group:
                    case {"params": list(params), "options": dict(options)} if all(type(p) is str for p in params):
                        found.append(StoredGroup(params, options))
                    case _:
                        return None
            if all(type(path) is str and isinstance(slots, dict) for path, slots in listed.items()):
                return StoredOptimizer(found, listed, shared, extra)
    return None
