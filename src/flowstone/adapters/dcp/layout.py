"""What DCP knows of a checkpoint, its Metadata, as the sections of a Flowstone checkpoint, and back.

A state that DefaultSavePlanner has flattened lies in the objects as it was nested, with references where its tensors
were: as if a Checkpointer had saved it. One section more, RECORD, says which values DCP took for one object each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias, cast

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from flowstone.checkpoint import Checkpoint
from flowstone.errors import CoverageError, DamagedError, UnsupportedFormatError
from flowstone.format.index import Index
from flowstone.format.objects import Provided, TensorRef
from flowstone.state.tensors import torch_dtype

RECORD = "__dcp__"
"""The section that is DCP's own; no section of a Checkpointer begins so."""

VERSION = 1

KeyPath: TypeAlias = "tuple[str | int, ...]"


class Record(msgspec.Struct, frozen=True):
    """What RECORD says.

    is_nested     the other sections are the nested state; else each is an object, by its full name
    objects       the full names of what DCP took for one object each
    pickled       of those, what a planner of the user's had made into bytes
    planner_data  of a state that is not nested; that of a nested one follows from where its values lie
    """

    is_nested: bool
    objects: Sequence[str]
    pickled: Sequence[str]
    planner_data: object

    def encoded(self) -> dict[str, object]:
        return {
            "version": VERSION, "nested": self.is_nested, "objects": list(self.objects), "pickled": list(self.pickled),
            "planner_data": self.planner_data,
        }


class Leaves(msgspec.Struct, frozen=True):
    """What the values of a checkpoint are called in DCP.

    paths    the keys that lead to each in the nested state; None where it was not nested
    objects  the nodes of those that are no tensors
    """

    paths: Mapping[str, KeyPath] | None
    objects: Mapping[str, object]
    pickled: frozenset[str] = frozenset()
    planner_data: object = None


def sections_of(metadata: Metadata, objects: Mapping[str, object], pickled: Sequence[str]) -> dict[str, object]:
    """The sections of a checkpoint that DCP describes so. `objects`: the nodes of what is no tensor.

    raises  CoverageError  an object that no rank has written
    """
    leaves: dict[str, object] = {}
    for name, said in metadata.state_dict_metadata.items():
        if isinstance(said, BytesStorageMetadata):
            if name not in objects:
                raise CoverageError(f"no rank has written the object {name!r}", next="correct the planner")
            leaves[name] = objects[name]
        else:
            leaves[name] = TensorRef(name, "tensor")
    nested = _nested(leaves, metadata.planner_data)
    names = [name for name in leaves if name in objects]
    if nested is None:
        record = Record(False, names, pickled, metadata.planner_data)
        return {**{name: objects[name] for name in names}, RECORD: record.encoded()}
    return {**nested, RECORD: Record(True, names, pickled, None).encoded()}


class _Items(dict[int, object]):
    """A list that is being filled, by position."""


def _nested(leaves: Mapping[str, object], paths: object) -> dict[str, object] | None:
    """The leaves where their paths lead; None where that makes no tree, or there are no paths."""
    if not isinstance(paths, Mapping) or not all(_is_path(paths.get(name)) for name in leaves):
        return None
    root: dict[object, object] = {}
    for name, leaf in leaves.items():
        path = paths[name]
        if ".".join(map(str, path)) != name or path[0] == RECORD:
            return None
        inner: dict[object, object] = root
        for key, below in pairwise(path):
            kind = _Items if type(below) is int else dict
            found = inner.setdefault(key, kind())
            if type(found) is not kind:
                return None
            inner = cast("dict[object, object]", found)
        if path[-1] in inner:
            return None
        inner[path[-1]] = leaf
    return cast("dict[str, object] | None", _with_lists(root, set(map(id, leaves.values()))))


def _is_path(path: object) -> bool:
    return (
        isinstance(path, tuple) and len(path) > 0 and type(path[0]) is str
        and all(type(key) in (str, int) for key in path)
    )


def _with_lists(node: object, leaves: set[int]) -> object:
    """The tree with lists for what was filled by position; None where one has holes."""
    if id(node) in leaves or not isinstance(node, dict):
        return node
    items = {key: _with_lists(item, leaves) for key, item in node.items()}
    if any(item is None and node[key] is not None for key, item in items.items()):
        return None
    if type(node) is not _Items:
        return items
    return [items[at] for at in range(len(items))] if set(items) == set(range(len(items))) else None


def leaves_of(checkpoint: Checkpoint) -> Leaves | None:
    """What DCP calls the values of a checkpoint that it has written; None where it has not.

    raises  UnsupportedFormatError, DamagedError
    """
    sections = dict(checkpoint.contents.replicated)
    if RECORD not in sections:
        return None
    record = _record_of(sections.pop(RECORD), checkpoint.path)
    if not record.is_nested:
        return Leaves(None, sections, frozenset(record.pickled), record.planner_data)
    found: dict[str, KeyPath] = {}
    nodes: dict[str, object] = {}
    objects, tensors = frozenset(record.objects), checkpoint.index.rows()
    for path, name, node in _walk(sections, objects, tensors):
        found[name] = path
        if name in objects:
            nodes[name] = node
    return Leaves(found, nodes, frozenset(record.pickled))


def _record_of(said: object, path: str) -> Record:
    try:
        assert isinstance(said, dict)
        if said["version"] != VERSION:
            raise UnsupportedFormatError(
                f"{path} was written through DCP by a newer Flowstone", expected=f"version {VERSION}",
                found=f"version {said['version']!r:.40}", next="upgrade flowstone",
            )
        record = Record(said["nested"], said["objects"], said["pickled"], said["planner_data"])
        assert type(record.is_nested) is bool
        assert all(type(name) is str for name in [*record.objects, *record.pickled])
    except (AssertionError, KeyError, TypeError) as error:
        raise DamagedError(f"what {path} says of DCP is not valid", next="run `flowstone verify`") from error
    return record


def _walk(
    sections: Mapping[str, object], objects: frozenset[str], tensors: Mapping[str, int]
) -> Iterator[tuple[KeyPath, str, object]]:
    """Path, name and node of each leaf, in order."""
    left: list[tuple[KeyPath, object]] = [((key,), node) for key, node in reversed(list(sections.items()))]
    while left:
        path, node = left.pop()
        name = ".".join(map(str, path))
        if name in objects or (isinstance(node, TensorRef) and name in tensors):
            yield path, name, node
        elif isinstance(node, dict):
            left += [((*path, key), item) for key, item in reversed(list(node.items()))]
        elif isinstance(node, list):
            left += [((*path, at), item) for at, item in reversed(list(enumerate(node)))]


def metadata_of(index: Index, names: Mapping[str, str], leaves: Leaves) -> Metadata:
    """What a planner is told.

    names  of tensors: in DCP, and in the index
    """
    rows, tensors = index.rows(), index.tensors
    known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, stored in names.items():
        row = rows[stored]
        known[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(tensors.dtypes[row])), torch.Size(tensors.shapes[row]),
            _chunks(index, row),
        )
    known |= {name: BytesStorageMetadata() for name in leaves.objects}
    planner_data = dict(leaves.paths) if leaves.paths is not None else leaves.planner_data
    return Metadata(_in_order(known, leaves.paths), planner_data=planner_data, storage_data={})


def _in_order(
    known: dict[str, TensorStorageMetadata | BytesStorageMetadata], paths: Iterable[str] | None
) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """As they lay in the nested state: planners that make a state of it put lists together in that order."""
    if paths is None:
        return known
    return {name: known[name] for name in paths if name in known} | known


def _chunks(index: Index, row: int) -> list[ChunkStorageMetadata]:
    boxes = (index.pieces.box(piece) for piece in index.pieces_of(row))
    return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]


def references(nodes: Iterable[object]) -> Iterator[TensorRef]:
    """The references in nodes: tensors that are parts of objects."""
    left = list(nodes)
    while left:
        node = left.pop()
        if isinstance(node, TensorRef):
            yield node
        elif isinstance(node, Provided):
            left += [*node.parts.values(), *node.objects.values()]
        elif isinstance(node, dict):
            left += node.values()
        elif isinstance(node, (list, tuple, deque)):
            left += node
