"""Split the values of a pickle into named tensors, objects, and values that Flowstone cannot store."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flowstone.config import MIB, NAME_BYTES_MAX
from flowstone.convert.source import SourceCheckpoint, SourceFile, UnmappedValue, check_source, in_file_order
from flowstone.convert.sources.restricted_unpickler import Global, Opaque, PickledInstance
from flowstone.convert.sources.torch_archive import ArchiveRange
from flowstone.convert.sources.torch_values import StorageRef, TensorView, view_bytes
from flowstone.errors import CollisionError, DamagedError, UnsupportedFormatError
from flowstone.format.leaves import valid_text
from flowstone.format.objects import NamedConstant, TensorRef, key_text
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Alias
from flowstone.table.stored import SourceTensor, StoredBox, row_major

_DEPTH_MAX = 100  # Flowstone's objects cannot be nested deeper
# limit of visited values: nested lists may repeat one value so often that the walk would never end
_NODES_MAX = 1 << 22
# limit of the names of all tensors together: a long key is repeated in the name of each tensor below it
_NAMES_BYTES_MAX = 512 * MIB
_UNSTORABLE = object()


class PickleTree:
    """Collects the tensors in values, and returns the other values as objects.

    place  returns the number of a storage's file, and the range in it
    shown  class of a PickledInstance -> function that replaces it by other values

    raises  CollisionError  two keys of a dict, such as 1 and "1", give two tensors the same name
    """

    def __init__(
        self, place: Callable[[StorageRef], tuple[int, ArchiveRange]], path: str,
        shown: Mapping[str, Callable[[PickledInstance], object]] | None = None,
    ) -> None:
        self._place, self._path, self._shown = place, path, shown or {}
        self._first: dict[str, str] = {}
        self._nodes = self._names_bytes = 0
        self.tensors: list[SourceTensor] = []
        self.aliases: list[Alias] = []
        self.unmapped: list[UnmappedValue] = []

    def section(self, name: str, value: object) -> object:
        """The object of a section, without its tensors. None if it cannot be stored."""
        walked = self._walk(name, value, 0)
        return None if walked is _UNSTORABLE else walked

    def _walk(self, name: str, value: object, depth: int) -> object:
        self._nodes += 1
        if depth > _DEPTH_MAX or self._nodes > _NODES_MAX or len(name) > NAME_BYTES_MAX:
            raise UnsupportedFormatError(
                f"{self._path} is nested too deeply, contains itself, has too many values, or has a name that is too "
                f"long, at {name!r:.200}",
                expected=f"at most {_DEPTH_MAX} levels, {_NODES_MAX} values, and {NAME_BYTES_MAX} characters in a name",
                next="save only the tensors",
            )
        if isinstance(value, PickledInstance) and value.kind in self._shown:
            value = self._shown[value.kind](value)
        if isinstance(value, TensorView):
            self.add(name, value)
            return TensorRef(name, "tensor")
        if isinstance(value, dict):
            return self._walk_dict(name, value, depth)
        if isinstance(value, list | tuple):
            items = [self._walk(f"{name}.{number}", inner, depth + 1) for number, inner in enumerate(value)]
            kept_items = [None if item is _UNSTORABLE else item for item in items]
            return kept_items if isinstance(value, list) else tuple(kept_items)
        if isinstance(value, Global) and value.name.removeprefix("torch.") in DTYPES:
            return NamedConstant("torch.dtype", value.name.removeprefix("torch."))
        if isinstance(value, Opaque | Global | PickledInstance | StorageRef):
            type_name = value.kind if isinstance(value, PickledInstance) else getattr(value, "name", "a bare storage")
            self.unmapped.append(UnmappedValue(name, str(type_name)))
            return _UNSTORABLE
        if isinstance(value, set | frozenset) and (strange := _unstorable_name(value)) is not None:
            self.unmapped.append(UnmappedValue(name, f"a set with {strange}"))
            return _UNSTORABLE
        return value

    def _walk_dict(self, name: str, value: dict[object, object], depth: int) -> object:
        entries: dict[object, object] = {}
        paths = set[str]()
        for key, inner in value.items():
            strange = None if _is_dtype(key) else _unstorable_name(key)
            where = f"{name}.{_text(key) if strange is None else strange}"
            if strange is not None:
                self.unmapped.append(UnmappedValue(where, f"a key with {strange}"))
                continue
            if where in paths:
                raise CollisionError(
                    f"{self._path}: two keys of {name!r:.200} have the name {_text(key)!r:.60}, such as 1 and '1'",
                    next="rename one of the two keys, and save again",
                )
            paths.add(where)
            part = self._walk(where, inner, depth + 1)
            if part is not _UNSTORABLE:
                entries[_plain_key(key)] = part
        return type(value)(entries) if type(value) is not dict else entries

    def add(self, name: str, view: TensorView) -> None:
        """Add a tensor. If an earlier tensor is the same view of the same bytes, `name` becomes a further name of that
        tensor.
        """
        file, place = self._place(view.storage)
        if place.bytes < view.storage.bytes:
            raise DamagedError(
                f"{self._path}: the storage of {name!r} is too short", expected=f"{view.storage.bytes} bytes",
                found=f"{place.bytes} bytes", next="copy the file again",
            )
        begin, end = view_bytes(view)
        self._names_bytes += len(name)
        if self._names_bytes > _NAMES_BYTES_MAX:
            raise UnsupportedFormatError(
                f"the names of the tensors in {self._path} are too long",
                expected=f"at most {_NAMES_BYTES_MAX} bytes in all",
                next="shorten the keys that lead to them, and save again",
            )
        # The key is a text, because hashes of strings are randomized, so that a file cannot cause many equal hashes.
        key = repr((file, place.offset, view.dtype.name, view.offset, view.shape, view.strides))
        if key in self._first and begin < end:
            self.aliases.append(Alias(name, self._first[key]))
            return
        self._first[key] = name
        box = Box.whole(view.shape)
        strides = None if _is_dense(view) else view.strides
        self.tensors.append(
            SourceTensor(name, view.dtype, view.shape, (StoredBox(box, file, place.offset + begin, strides),))
        )

    def source(
        self, kind: str, location: str, files: tuple[SourceFile, ...], objects: Mapping[str, object], *, is_flat: bool
    ) -> SourceCheckpoint:
        """The source that has all added tensors, sorted by their places in the files, after checks."""
        return check_source(SourceCheckpoint(
            kind, location, files, in_file_order(self.tensors), tuple(self.aliases), objects, is_flat=is_flat,
            unmapped=tuple(self.unmapped),
        ))


def check_sections(names: object, path: str) -> None:
    """Raise UnsupportedFormatError if a key is not a valid name of a section."""
    for name in names if isinstance(names, dict) else ():
        if not isinstance(name, str) or not name or name.startswith("__") or "@" in name or "\0" in name or (
            len(name) > NAME_BYTES_MAX or not valid_text(name)
        ):
            raise UnsupportedFormatError(
                f"{path}: invalid section name {name!r:.60}",
                expected="text without '@', NUL or lone surrogates, that does not begin with '__'",
                next="save a dict whose keys are valid section names, such as {'model': ..., 'optimizer': ...}",
            )


def _is_dense(view: TensorView) -> bool:
    """Whether the view is contiguous in row-major order. Strides of dimensions of length 1 do not matter."""
    pairs = zip(view.shape, view.strides, row_major(view.shape), strict=True)
    return 0 in view.shape or all(side == 1 or stride == dense for side, stride, dense in pairs)


def _is_dtype(key: object) -> bool:
    return isinstance(key, Global) and key.name.removeprefix("torch.") in DTYPES


def _plain_key(key: object) -> object:
    return NamedConstant("torch.dtype", key.name.removeprefix("torch.")) if isinstance(key, Global) else key


def _unstorable_name(value: object) -> str | None:
    """The name of a type inside of a key or set that cannot be stored; None if there is none."""
    if isinstance(value, tuple | set | frozenset):
        return next((name for inner in value if (name := _unstorable_name(inner)) is not None), None)
    if isinstance(value, Global | Opaque):
        return value.name
    return type(value).__name__ if isinstance(value, PickledInstance | StorageRef | TensorView) else None


def _text(key: object) -> str:
    return key.name if isinstance(key, Global) else key_text(key)
