"""Stored nodes: what kind of object a node of a checkpoint is."""

from __future__ import annotations

from collections import deque

from flowstone.format.inner_objects import INNER
from flowstone.format.objects import Named, Provided, TensorRef


def refers_to_tensors(node: object) -> bool:
    """Whether a stored object contains tensors or arrays (long bytes are plain values)."""
    if isinstance(node, TensorRef):
        return node.kind in ("tensor", "ndarray")
    if isinstance(node, Provided):
        return bool(node.parts) or refers_to_tensors(node.objects)
    if isinstance(node, dict):
        return any(refers_to_tensors(item) for item in node.values())
    return isinstance(node, (list, tuple, deque)) and any(refers_to_tensors(item) for item in node)


def holds_provided(node: object) -> bool:
    """Whether a stored object contains what a provider saved, or an object inside of an object's state."""
    if isinstance(node, dict):
        return any(map(holds_provided, node.values()))
    return isinstance(node, Provided) or (isinstance(node, (list, tuple)) and any(map(holds_provided, node)))


def without_tensors(node: object) -> object:
    """A stored object without its tensors, for comparing the values of two places."""
    if isinstance(node, TensorRef):
        return node.kind
    if isinstance(node, Provided):
        return [node.kind, sorted(node.parts), without_tensors(node.objects)]
    if isinstance(node, dict):
        return {key: without_tensors(item) for key, item in node.items()}
    return [without_tensors(item) for item in node] if isinstance(node, (list, tuple, deque)) else node


def kind_of(node: object) -> str:
    """The type of a stored object, as text for a difference."""
    if isinstance(node, TensorRef):
        return f"a {node.kind}"
    if isinstance(node, Provided):
        return "an object" if node.kind == INNER else f"'{node.kind}'"
    if isinstance(node, Named):
        return f"a {node.kind}"
    return type(node).__name__
