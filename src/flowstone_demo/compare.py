"""Compare two checkpoints bit for bit. Uses Flowstone's reader, and not torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import numpy as np

import flowstone as fs


@dataclass(frozen=True, slots=True)
class Compared:
    """The differences of two checkpoints in one section, and how much was compared. Without differences, the sections
    are equal.
    """

    section: str
    tensors: int
    bytes: int
    values: int
    differences: tuple[str, ...]


def compare(first: fs.Checkpoint, second: fs.Checkpoint) -> dict[str, Compared]:
    """Compare every tensor and every object of two checkpoints. Returns: section -> result."""
    objects_first, objects_second = _objects(first), _objects(second)
    names = sorted({*first.tensors, *second.tensors})
    sections = sorted({_section(name) for name in names} | {*objects_first, *objects_second})
    return {
        section: _compare_section(
            section, first, second, [name for name in names if _section(name) == section],
            (objects_first.get(section), objects_second.get(section)),
        )
        for section in sections
    }


def _compare_section(
    section: str, first: fs.Checkpoint, second: fs.Checkpoint, names: Sequence[str], objects: tuple[object, object]
) -> Compared:
    differences, total_bytes = [], 0
    for name in names:
        difference = tensor_difference(first, second, name)
        if difference is not None:
            differences.append(difference)
        elif first.tensors[name].alias_of is None:
            total_bytes += first.tensors[name].bytes
    values, object_differences = object_difference(*objects, path=section)
    return Compared(section, len(names), total_bytes, values, (*differences, *object_differences))


def tensor_difference(first: fs.Checkpoint, second: fs.Checkpoint, name: str) -> str | None:
    """Describes the first difference of a tensor. Compares presence, dtype, shape and aliasing, then every bit. None if
    there is no difference.
    """
    if name not in first.tensors or name not in second.tensors:
        return f"{name} is in only one of the checkpoints"
    left, right = first.tensors[name], second.tensors[name]
    if (left.dtype, left.shape, left.alias_of) != (right.dtype, right.shape, right.alias_of):
        return f"{name}: {left} against {right}"
    if left.alias_of is not None:
        return None  # the tensor itself is compared under its own name
    bits = [np.atleast_1d(cp.read(name, framework="numpy")).reshape(-1).view(np.uint8) for cp in (first, second)]
    unequal = np.flatnonzero(bits[0] != bits[1])
    if not unequal.size:
        return None
    return f"{name}: {unequal.size} of {bits[0].size} bytes differ, the first at byte {unequal[0]}"


def object_difference(first: object, second: object, path: str) -> tuple[int, tuple[str, ...]]:
    """Returns how many values were compared, and their differences. Values of different types differ; floats are
    compared by their bits.
    """
    if type(first) is not type(second):
        return 1, (f"{path}: {type(first).__name__} against {type(second).__name__}",)
    children = _children(first), _children(second)
    if children[0] is None or children[1] is None:
        same = _bits(first) == _bits(second)
        return 1, () if same else (f"{path}: {first!r} against {second!r}",)
    if list(children[0]) != list(children[1]):
        return 1, (f"{path}: keys or lengths differ",)
    compared = [object_difference(value, children[1][key], f"{path}.{key}") for key, value in children[0].items()]
    return sum(count for count, _ in compared), tuple(text for _, texts in compared for text in texts)


def _children(value: object) -> Mapping[object, object] | None:
    """The items of a container: key or position -> item. None if the value is not a container."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def _bits(value: object) -> object:
    return struct.pack("<d", value) if isinstance(value, float) else value


def _objects(checkpoint: fs.Checkpoint) -> dict[str, object]:
    """section -> object, including objects that each rank has for itself (generators)."""
    return {**checkpoint.contents.replicated, **checkpoint.contents.per_rank}


def _section(name: str) -> str:
    """The section of a name: the part before the first dot, without a rank, as in `rng@0`."""
    return name.partition(".")[0].partition("@")[0]
