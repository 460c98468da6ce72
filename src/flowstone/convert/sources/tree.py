"""What a pickle describes, as a state of ours: names for its tensors, objects for the rest, and what is neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flowstone.config import MIB, NAME_BYTES_MAX
from flowstone.convert.source import Source, SourceFile, Unmapped, check_source, in_file_order
from flowstone.convert.sources.restricted_unpickler import Global, Opaque, Record
from flowstone.convert.sources.torch_archive import Place
from flowstone.convert.sources.torch_values import StorageRef, TensorView, view_bytes
from flowstone.errors import CollisionError, DamagedError, UnsupportedFormatError
from flowstone.format.leaves import valid_text
from flowstone.format.objects import Named, TensorRef, key_text
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Alias
from flowstone.table.stored import SourceTensor, StoredBox, row_major

_DEPTH_MAX = 100  # that of our objects
_NODES_MAX = 1 << 22  # a list may hold one value many times, and so on: it would never end
_NAMES_BYTES_MAX = 512 * MIB  # of all tensors: a long key is repeated in the name of each tensor below it
_DROPPED = object()


class Tree:
    """Takes values apart.

    place  says where a storage lies: file and bytes
    shown  what stands for a Record of a kind

    raises  CollisionError where two keys of a dict make one path, by which tensors and rules name what lies there
    """

    def __init__(
        self, place: Callable[[StorageRef], tuple[int, Place]], path: str,
        shown: Mapping[str, Callable[[Record], object]] | None = None,
    ) -> None:
        self._place, self._path, self._shown = place, path, shown or {}
        self._first: dict[str, str] = {}
        self._nodes = self._names_bytes = 0
        self.tensors: list[SourceTensor] = []
        self.aliases: list[Alias] = []
        self.unmapped: list[Unmapped] = []

    def section(self, name: str, value: object) -> object:
        """The object that stands for a section; None where nothing of it can be said."""
        found = self._walk(name, value, 0)
        return None if found is _DROPPED else found

    def _walk(self, name: str, value: object, depth: int) -> object:
        self._nodes += 1
        if depth > _DEPTH_MAX or self._nodes > _NODES_MAX or len(name) > NAME_BYTES_MAX:
            raise UnsupportedFormatError(
                f"{self._path} nests too deep, or without end, at {name!r:.200}", next="save the tensors by themselves"
            )
        if isinstance(value, Record) and value.kind in self._shown:
            value = self._shown[value.kind](value)
        if isinstance(value, TensorView):
            self.add(name, value)
            return TensorRef(name, "tensor")
        if isinstance(value, dict):
            return self._walk_dict(name, value, depth)
        if isinstance(value, list | tuple):
            items = [self._walk(f"{name}.{at}", inner, depth + 1) for at, inner in enumerate(value)]
            kept_items = [None if item is _DROPPED else item for item in items]
            return kept_items if isinstance(value, list) else tuple(kept_items)
        if isinstance(value, Global) and value.name.removeprefix("torch.") in DTYPES:
            return Named("torch.dtype", value.name.removeprefix("torch."))
        if isinstance(value, Opaque | Global | Record | StorageRef):
            what = value.kind if isinstance(value, Record) else getattr(value, "name", "a storage without a tensor")
            self.unmapped.append(Unmapped(name, str(what)))
            return _DROPPED
        if isinstance(value, set | frozenset) and (strange := _unstorable_name(value)) is not None:
            self.unmapped.append(Unmapped(name, f"a set with {strange}"))
            return _DROPPED
        return value

    def _walk_dict(self, name: str, value: dict[object, object], depth: int) -> object:
        kept: dict[object, object] = {}
        paths = set[str]()
        for key, inner in value.items():
            strange = None if _is_dtype(key) else _unstorable_name(key)
            where = f"{name}.{_text(key) if strange is None else strange}"
            if strange is not None:
                self.unmapped.append(Unmapped(where, f"a key with {strange}"))
                continue
            if where in paths:
                raise CollisionError(
                    f"{self._path}: two keys of {name!r:.200} are called {_text(key)!r:.60}, as 1 and '1' are",
                    next="rename one of them, and save again",
                )
            paths.add(where)
            part = self._walk(where, inner, depth + 1)
            if part is not _DROPPED:
                kept[_plain_key(key)] = part
        return type(value)(kept) if type(value) is not dict else kept

    def add(self, name: str, view: TensorView) -> None:
        """Enter a tensor by a name; an alias, if another one is the same view of the same bytes."""
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
                f"the names of the tensors in {self._path} are too long", expected=f"at most {_NAMES_BYTES_MAX} in all",
                next="shorten the keys that lead to them, and save again",
            )
        # As text: its hashes are keyed, so that a file cannot force collisions.
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
    ) -> Source:
        """All that was entered, checked, in the order in which it lies in the files."""
        return check_source(Source(
            kind, location, files, in_file_order(self.tensors), tuple(self.aliases), objects, is_flat=is_flat,
            unmapped=tuple(self.unmapped),
        ))


def check_sections(names: object, path: str) -> None:
    """Raise UnsupportedFormatError for a key that cannot be the name of a section."""
    for name in names if isinstance(names, dict) else ():
        if not isinstance(name, str) or not name or name.startswith("__") or "@" in name or "\0" in name or (
            len(name) > NAME_BYTES_MAX or not valid_text(name)
        ):
            raise UnsupportedFormatError(
                f"{path}: {name!r:.60} cannot name a section", expected="text without '@', NUL or lone surrogates",
                next="save a dict of state_dicts, by names",
            )


def _is_dense(view: TensorView) -> bool:
    """Whether its elements fill one run of bytes in row-major order, whatever dimensions of one element say."""
    pairs = zip(view.shape, view.strides, row_major(view.shape), strict=True)
    return 0 in view.shape or all(side == 1 or stride == dense for side, stride, dense in pairs)


def _is_dtype(key: object) -> bool:
    return isinstance(key, Global) and key.name.removeprefix("torch.") in DTYPES


def _plain_key(key: object) -> object:
    return Named("torch.dtype", key.name.removeprefix("torch.")) if isinstance(key, Global) else key


def _unstorable_name(value: object) -> str | None:
    """The name of something in a key or a set that our checkpoints cannot hold; None if there is nothing."""
    if isinstance(value, tuple | set | frozenset):
        return next((found for inner in value if (found := _unstorable_name(inner)) is not None), None)
    if isinstance(value, Global | Opaque):
        return value.name
    return type(value).__name__ if isinstance(value, Record | StorageRef | TensorView) else None


def _text(key: object) -> str:
    return key.name if isinstance(key, Global) else key_text(key)
