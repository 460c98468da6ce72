"""Objects inside of another object's state: how they are marked, so that a load restores them where they are."""

from __future__ import annotations

from flowstone.errors import DamagedError
from flowstone.format.objects import Provided

INNER = "flowstone.inner"
"""The kind of a `Provided` node that stands for such an object; it has one object, `state`."""


def inner_object(state: object) -> Provided:
    """The mark of an object. `state`: what a section of that object would have."""
    return Provided(INNER, {}, {"state": state})


def inner_state(node: object, path: str) -> object:
    """What is in the mark of an object; any other node as it is. Raises DamagedError."""
    if not isinstance(node, Provided) or node.kind != INNER:
        return node
    if node.parts or node.objects.keys() != {"state"}:
        raise DamagedError(
            f"the object '{path}' does not match its type", expected="one state of an object inside of another one",
            found=", ".join([*node.parts, *node.objects]), next="run `flowstone verify`; load another checkpoint",
        )
    return node.objects["state"]
