"""Rebuild the values of stored objects, and serialize them for a planner."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import cast

import torch

from flowstone.errors import UnsupportedStateError
from flowstone.format.inner_objects import INNER, inner_state
from flowstone.format.objects import NamedConstant, ProviderRecord, TensorRef
from flowstone.reading.checkpoint import Checkpoint
from flowstone.state.classes import form_of_node, make_object
from flowstone.state.constants import constant_of, resolve_constants


def bytes_of(checkpoint: Checkpoint, name: str, node: object) -> io.BytesIO:
    """The value of a stored object as a stream of torch.save, which planners expect. The stream is built only from
    values that were parsed.
    """
    stream = io.BytesIO()
    torch.save(_value(checkpoint, node, name), stream)
    stream.seek(0)
    return stream


def _value(checkpoint: Checkpoint, node: object, path: str) -> object:
    """The value that a stored object `node` represents. Its tensors are read and verified."""
    kind = type(node)
    if isinstance(node, TensorRef):
        return _referred(checkpoint, node)
    if isinstance(node, NamedConstant):
        return constant_of(node, path)
    if isinstance(node, ProviderRecord) and node.kind == INNER:
        return _value(checkpoint, inner_state(node, path), path)
    if isinstance(node, ProviderRecord):
        if not node.parts and form_of_node(node) is not None:
            return make_object(node, lambda item: _value(checkpoint, item, path))
        remedy = "" if node.parts else "register its class with fs.register_class(), or "
        raise UnsupportedStateError(
            f"DCP cannot load '{path}', an object of the type {node.kind}", next=f"{remedy}load it with fs.Checkpointer"
        )
    if isinstance(node, dict):
        pairs = [
            (resolve_constants(key, path), _value(checkpoint, item, path))
            for key, item in cast("Mapping[object, object]", node).items()
        ]
        if kind is Counter:
            return Counter(dict(cast("list[tuple[object, int]]", pairs)))
        return OrderedDict(pairs) if kind is OrderedDict else dict(pairs)
    if isinstance(node, (list, tuple, deque)):
        items = [_value(checkpoint, item, path) for item in node]
        if isinstance(node, deque):
            return deque(items, node.maxlen)
        return tuple(items) if kind is tuple else items
    return resolve_constants(node, path)


def _referred(checkpoint: Checkpoint, ref: TensorRef) -> object:
    if ref.kind == "tensor":
        return checkpoint.read(ref.name)
    array = checkpoint.read(ref.name, framework="numpy")
    if ref.kind == "ndarray":
        return array
    return array.tobytes() if ref.kind == "bytes" else bytearray(array.tobytes())
