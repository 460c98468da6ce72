"""What kind of object a node is. A node is the form in which a checkpoint stores an object."""

from __future__ import annotations

from collections import deque

from flowstone.format.inner_objects import INNER
from flowstone.format.objects import NamedConstant, ProviderRecord, TensorRef


def refers_to_tensors(node: object) -> bool:
    """Whether a stored object contains tensors or arrays. Long `bytes`, which are stored like tensors, do not count."""
    if isinstance(node, TensorRef):
        return node.kind in ("tensor", "ndarray")
    if isinstance(node, ProviderRecord):
        return bool(node.parts) or refers_to_tensors(node.objects)
    if isinstance(node, dict):
        return any(refers_to_tensors(item) for item in node.values())
    return isinstance(node, (list, tuple, deque)) and any(refers_to_tensors(item) for item in node)


def holds_provided(node: object) -> bool:
    """Whether a stored object contains an object that a provider has described, or one that was inside of another
    object's state.
    """
    if isinstance(node, dict):
        return any(map(holds_provided, node.values()))
    return isinstance(node, ProviderRecord) or (isinstance(node, (list, tuple)) and any(map(holds_provided, node)))


def without_tensors(node: object) -> object:
    """A stored object without its tensors, to compare the values that are stored for two places."""
    if isinstance(node, TensorRef):
        return node.kind
    if isinstance(node, ProviderRecord):
        return [node.kind, sorted(node.parts), without_tensors(node.objects)]
    if isinstance(node, dict):
        return {key: without_tensors(item) for key, item in node.items()}
    return [without_tensors(item) for item in node] if isinstance(node, (list, tuple, deque)) else node


def describe_node(node: object) -> str:
    """The type of a stored object, as text for a message about a difference."""
    if isinstance(node, TensorRef):
        return f"a {node.kind}"
    if isinstance(node, ProviderRecord):
        return "an object" if node.kind == INNER else f"'{node.kind}'"
    if isinstance(node, NamedConstant):
        return f"a {node.kind}"
    return type(node).__name__
