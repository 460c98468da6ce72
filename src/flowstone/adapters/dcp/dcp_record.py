"""Translate between DCP's Metadata and the sections (named top-level values) of a Flowstone checkpoint.

A state that DefaultSavePlanner flattened is stored nested again, with references to its tensors, as if a Checkpointer
had saved it. An additional section, RECORD, lists the values that DCP treats as single objects.
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

from flowstone.errors import CoverageError, DamagedError, UnsupportedFormatError
from flowstone.format.index import Index
from flowstone.format.objects import ProviderRecord, TensorRef
from flowstone.reading.checkpoint import Checkpoint
from flowstone.torch.tensors import torch_dtype

RECORD = "__dcp__"
"""The section for DCP; no section of a Checkpointer begins with underscores."""

VERSION = 1

KeyPath: TypeAlias = "tuple[str | int, ...]"


class DcpRecord(msgspec.Struct, frozen=True):
    """The content of the section RECORD.

    is_nested     True: the other sections are the nested state. False: each of them is one object, and its name is the
                  object's full name
    objects       full names of the values that DCP treats as single objects
    pickled       full names of the objects that a custom planner turned into bytes
    planner_data  DCP's planner data, for a state that is not nested
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
    """The values of a checkpoint, by their names in DCP.

    paths    for each value, the keys that lead to it in the nested state; None if the state was not nested
    objects  the values that are not tensors, in the form in which the checkpoint stores them (format/objects.py)
    pickled  names of the objects that a custom planner turned into bytes
    """

    paths: Mapping[str, KeyPath] | None
    objects: Mapping[str, object]
    pickled: frozenset[str] = frozenset()
    planner_data: object = None


def sections_of(metadata: Metadata, objects: Mapping[str, object], pickled: Sequence[str]) -> dict[str, object]:
    """The sections that describe a state with DCP's metadata. `objects`: the values other than tensors, in their stored
    form.

    raises  CoverageError  an object was not written by any rank
    """
    leaves: dict[str, object] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            if name not in objects:
                raise CoverageError(
                    f"no rank wrote the object {name!r}",
                    next="correct the save planner: some rank must write each object of the plan",
                )
            leaves[name] = objects[name]
        else:
            leaves[name] = TensorRef(name, "tensor")
    nested = _nested(leaves, metadata.planner_data)
    names = [name for name in leaves if name in objects]
    if nested is None:
        record = DcpRecord(False, names, pickled, metadata.planner_data)
        return {**{name: objects[name] for name in names}, RECORD: record.encoded()}
    return {**nested, RECORD: DcpRecord(True, names, pickled, None).encoded()}


class _ListItems(dict[int, object]):
    """A list that is still being filled: position -> item."""


def _nested(leaves: Mapping[str, object], paths: object) -> dict[str, object] | None:
    """Put the leaves (tensors and objects) into nested dicts and lists, by their paths. None if the paths form no tree,
    or there are no paths.
    """
    if not isinstance(paths, Mapping) or not all(_is_path(paths.get(name)) for name in leaves):
        return None
    root: dict[object, object] = {}
    for name, leaf in leaves.items():
        path = paths[name]
        if ".".join(map(str, path)) != name or path[0] == RECORD:
            return None
        inner: dict[object, object] = root
        for key, below in pairwise(path):
            kind = _ListItems if type(below) is int else dict
            child = inner.setdefault(key, kind())
            if type(child) is not kind:
                return None
            inner = cast("dict[object, object]", child)
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
    """Turn dicts that were filled by position into lists. None if a position is missing in one of them."""
    if id(node) in leaves or not isinstance(node, dict):
        return node
    items = {key: _with_lists(item, leaves) for key, item in node.items()}
    if any(item is None and node[key] is not None for key, item in items.items()):
        return None
    if type(node) is not _ListItems:
        return items
    return [items[index] for index in range(len(items))] if set(items) == set(range(len(items))) else None


def leaves_of(checkpoint: Checkpoint) -> Leaves | None:
    """The values of a checkpoint that DCP wrote, under DCP's names. None for other checkpoints.

    raises  UnsupportedFormatError, DamagedError
    """
    sections = dict(checkpoint.contents.replicated)
    if RECORD not in sections:
        return None
    record = _record_of(sections.pop(RECORD), checkpoint.path)
    if not record.is_nested:
        return Leaves(None, sections, frozenset(record.pickled), record.planner_data)
    paths: dict[str, KeyPath] = {}
    nodes: dict[str, object] = {}
    objects, tensors = frozenset(record.objects), checkpoint.index.rows()
    for path, name, node in _walk(sections, objects, tensors):
        paths[name] = path
        if name in objects:
            nodes[name] = node
    return Leaves(paths, nodes, frozenset(record.pickled))


def _record_of(stored: object, path: str) -> DcpRecord:
    try:
        assert isinstance(stored, dict)
        if stored["version"] != VERSION:
            raise UnsupportedFormatError(
                f"{path} was written through DCP by a newer version of Flowstone", expected=f"version {VERSION}",
                found=f"version {stored['version']!r:.40}", next="upgrade flowstone",
            )
        record = DcpRecord(stored["nested"], stored["objects"], stored["pickled"], stored["planner_data"])
        assert type(record.is_nested) is bool
        assert all(type(name) is str for name in [*record.objects, *record.pickled])
    except (AssertionError, KeyError, TypeError) as error:
        raise DamagedError(
            f"the section {RECORD} of {path} is not valid",
            next="run `flowstone verify` on it, and load another checkpoint",
        ) from error
    return record


def _walk(
    sections: Mapping[str, object], objects: frozenset[str], tensors: Mapping[str, int]
) -> Iterator[tuple[KeyPath, str, object]]:
    """Path, name and stored form of each leaf (tensor or object), in order."""
    left: list[tuple[KeyPath, object]] = [((key,), node) for key, node in reversed(list(sections.items()))]
    while left:
        path, node = left.pop()
        name = ".".join(map(str, path))
        if name in objects or (isinstance(node, TensorRef) and name in tensors):
            yield path, name, node
        elif isinstance(node, dict):
            left += [((*path, key), item) for key, item in reversed(list(node.items()))]
        elif isinstance(node, list):
            left += [((*path, index), item) for index, item in reversed(list(enumerate(node)))]


def metadata_of(index: Index, names: Mapping[str, str], leaves: Leaves) -> Metadata:
    """DCP's metadata of a checkpoint, for a planner.

    names  DCP's name of a tensor -> its name in the index
    """
    rows, tensors = index.rows(), index.tensors
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, stored in names.items():
        row = rows[stored]
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(tensors.dtypes[row])), torch.Size(tensors.shapes[row]),
            _chunks(index, row),
        )
    entries |= {name: BytesStorageMetadata() for name in leaves.objects}
    planner_data = dict(leaves.paths) if leaves.paths is not None else leaves.planner_data
    return Metadata(_in_order(entries, leaves.paths), planner_data=planner_data, storage_data={})


def _in_order(
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata], paths: Iterable[str] | None
) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """Sort the entries by their order in the nested state, since planners that rebuild the state fill lists in that
    order.
    """
    if paths is None:
        return entries
    return {name: entries[name] for name in paths if name in entries} | entries


def _chunks(index: Index, row: int) -> list[ChunkStorageMetadata]:
    boxes = (index.pieces.box(piece) for piece in index.pieces_of(row))
    return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]


def references(nodes: Iterable[object]) -> Iterator[TensorRef]:
    """The references to tensors in stored values."""
    left = list(nodes)
    while left:
        node = left.pop()
        if isinstance(node, TensorRef):
            yield node
        elif isinstance(node, ProviderRecord):
            left += [*node.parts.values(), *node.objects.values()]
        elif isinstance(node, dict):
            left += node.values()
        elif isinstance(node, (list, tuple, deque)):
            left += node
