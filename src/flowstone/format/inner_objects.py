"""The stored form of inner objects (objects inside of another object's state, which a load restores in place), and of
optimizers.
"""

from __future__ import annotations

import msgspec

from flowstone.errors import DamagedError
from flowstone.format.objects import ProviderRecord

INNER = "flowstone.inner"
"""The `kind` of a ProviderRecord that stands for an inner object; its only value is `state`."""


def inner_object(state: object) -> ProviderRecord:
    """The stored form of an object inside of another object's state. `state`: its node (format/objects.py), encoded as
    if the object were a section.
    """
    return ProviderRecord(INNER, {}, {"state": state})


def inner_state(node: object, path: str) -> object:
    """The state inside the stored form of an inner object (see `inner_object`). Any other node is returned unchanged.
    Raises DamagedError if that form is invalid.
    """
    if not isinstance(node, ProviderRecord) or node.kind != INNER:
        return node
    if node.parts or node.objects.keys() != {"state"}:
        raise DamagedError(
            f"the stored object '{path}' is invalid", expected="one entry, 'state'",
            found=", ".join([*node.parts, *node.objects]), next="run `flowstone verify`; load another checkpoint",
        )
    return node.objects["state"]


class StoredGroup(msgspec.Struct, frozen=True):
    """A parameter group of a stored optimizer: the paths of its parameters, and its settings."""

    params: list[str]
    options: dict[object, object]


class StoredOptimizer(msgspec.Struct, frozen=True):
    """The entries of a stored optimizer (torch/optimizer_view.py). Slots are values for one parameter (exp_avg).

    listed  path of a parameter -> its slots, except tensors that are found by their names
    shared  state that belongs to no parameter
    extra   what a subclass adds to its state_dict()
    """

    groups: list[StoredGroup]
    listed: dict[str, dict[object, object]]
    shared: object
    extra: object


def stored_optimizer(node: object) -> StoredOptimizer | None:
    """The entries of a stored optimizer. None if the stored object is not an optimizer."""
    match node:
        case {"param_groups": list(groups), "state": dict(listed), "shared": dict(shared), "extra": dict(extra)}:
            stored_groups = []
            for group in groups:
                match group:
                    case {"params": list(params), "options": dict(options)} if all(type(p) is str for p in params):
                        stored_groups.append(StoredGroup(params, options))
                    case _:
                        return None
            if all(type(path) is str and isinstance(slots, dict) for path, slots in listed.items()):
                return StoredOptimizer(stored_groups, listed, shared, extra)
    return None
