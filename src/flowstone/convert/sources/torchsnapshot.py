"""A directory of TorchSnapshot as a source: what all ranks have saved, and nothing executed to read it."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

from flowstone.convert.source import Source, Unmapped, check_source, in_file_order, is_inner
from flowstone.convert.sources.pickled_files import PickledFiles
from flowstone.convert.sources.restricted_unpickler import Opaque
from flowstone.convert.sources.torch_archive import Place
from flowstone.convert.sources.torchsnapshot_manifest import (
    METADATA_NAME,
    PLAIN,
    ChunkedEntry,
    DictEntry,
    DTensorEntry,
    Entry,
    ListEntry,
    ObjectEntry,
    OrderedDictEntry,
    Shard,
    ShardedEntry,
    TensorEntry,
    empty,
    plain_value,
    read_manifest,
)
from flowstone.convert.sources.tree import Tree, check_sections
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.objects import TensorRef, key_text
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES, DType
from flowstone.table.stored import SourceTensor, StoredBox

_DIRECTORIES = frozenset({"0", "batched", "sharded", "replicated"})
_DEPTH_MAX = 100
_BUFFER, _PICKLED = "buffer_protocol", "torch_save"


def is_torchsnapshot(path: Path) -> bool:
    """Whether a directory is a snapshot, or what is left of one that was never finished."""
    if not path.is_dir():
        return False
    names = set(os.listdir(path))
    is_cut = bool(names & _DIRECTORIES) and all(name in _DIRECTORIES or name.isdigit() for name in names)
    return METADATA_NAME in names or (is_cut and all((path / name).is_dir() for name in names))


def read_torchsnapshot(path: Path) -> Source:
    """What the snapshot holds: a section for each key of the state that was handed to Snapshot.take.

    raises  DamagedError            a file is missing or torn, or the manifest contradicts itself
            UnsupportedFormatError  another version
    """
    with closing(PickledFiles(str(path))) as files:
        return _Snapshot(path, files).source()


class _Snapshot:
    """The sections of a snapshot, out of the entries of all ranks."""

    def __init__(self, path: Path, files: PickledFiles) -> None:
        self._path, self._files = path, files
        self._manifest = read_manifest(path)
        self._tree = Tree(files.place, str(path))
        self._tensors: list[SourceTensor] = []
        self._differing: list[Unmapped] = []
        self._seen = 0
        self._objects: dict[Path, object] = {}  # of each file once, though many entries may name it
        self._below: dict[str, list[str]] = {}
        for logical in self._manifest:
            parent, _, _ = logical.rpartition("/")
            self._below.setdefault(parent, []).append(logical)

    def source(self) -> Source:
        values: dict[str, object] = {}
        for root in self._below.get("", ()):
            name = unquote(root)
            if name in values:
                raise self._contradiction(f"{root!r:.200} is a second path of {name!r:.200}")
            values[name] = self._value(root, name, 0)
        if self._seen != len(self._manifest):
            raise self._contradiction("some of its paths are below no dict and no list")
        check_sections(values, str(self._path))
        objects = {name: self._tree.section(name, value) for name, value in values.items()}
        gone = {one.name for one in self._tree.unmapped}
        return check_source(Source(
            "torchsnapshot", str(self._path), tuple(self._files.opened),
            in_file_order((*self._tensors, *self._tree.tensors)), tuple(self._tree.aliases),
            {name: value for name, value in objects.items() if name not in gone},
            unmapped=(*self._tree.unmapped, *self._differing),
        ))

    def _value(self, logical: str, name: str, depth: int) -> object:
        """What lies at a path; a TensorRef or a TensorView stands for a tensor."""
        if depth > _DEPTH_MAX:
            raise UnsupportedFormatError(f"{self._path} nests too deep, at {name!r:.200}", next="save it flatter")
        self._seen += 1
        ranks = self._manifest[logical]
        entries = list(ranks.values())
        first = entries[0]
        if isinstance(first, ListEntry | DictEntry | OrderedDictEntry):
            if any(type(entry) is not type(first) for entry in entries):
                raise self._contradiction(f"{name!r:.200} is another kind of container on each rank")
            keys = self._keys(logical, ranks)
            found = empty(first)
            owner = next(iter(ranks))
            for below, key in keys.items():
                if isinstance(first, ListEntry) and not self._has(owner, below):
                    self._leave_out(below, f"{name}.{key_text(key)}", owner)
                else:
                    found[key] = self._value(below, f"{name}.{key_text(key)}", depth + 1)
            return list(found.values()) if isinstance(first, ListEntry) else found
        if isinstance(first, ShardedEntry | DTensorEntry):
            return self._sharded(name, entries)
        return self._of_one_rank(name, ranks)

    def _keys(self, logical: str, ranks: Mapping[int, Entry]) -> dict[str, object]:
        """The paths below a container, and the key of each, in order."""
        below = set(self._below.get(logical, ()))
        keys: dict[str, object] = {}
        for rank, entry in ranks.items():
            is_dict = isinstance(entry, DictEntry | OrderedDictEntry)
            listed = entry.keys if isinstance(entry, DictEntry | OrderedDictEntry) else tuple(range(len(below)))
            mine = {f"{logical}/{_encoded(str(key))}": key for key in listed}
            if len(mine) != len(listed):
                raise self._contradiction(f"two keys of {logical!r:.200} have one path, as 1 and '1' have")
            for path, key in mine.items():
                if type(keys.setdefault(path, key)) is not type(key):
                    raise self._contradiction(f"the key of {path!r:.200} is of another type on each rank")
                if is_dict and not self._has(rank, path):
                    raise self._contradiction(f"rank {rank} lacks its part of {path!r:.200}")
        if len(set(keys.values())) != len(keys):
            raise self._contradiction(f"two keys of {logical!r:.200} are equal, as 1 and True are")
        if keys.keys() != below:
            odd = sorted(keys.keys() ^ below)[0]
            raise self._contradiction(f"{logical!r:.200} and what is below it differ in {odd!r:.200}")
        return keys

    def _leave_out(self, logical: str, name: str, owner: int) -> None:
        """What other ranks have beyond the end of the first one's list: it is no part of that list."""
        other = next(iter(self._manifest[logical]))
        self._differing.append(Unmapped(f"rank{other}.{name}", f"beyond the end of rank {owner}'s list"))
        waiting = [logical]
        while waiting:
            waiting += self._below.get(waiting.pop(), ())
            self._seen += 1

    def _has(self, rank: int, logical: str) -> bool:
        """Whether a rank has something at a path: of its own, or what one rank has written for all."""
        ranks = self._manifest.get(logical, {})
        return rank in ranks or any(isinstance(one, DTensorEntry) or _is_replicated(one) for one in ranks.values())

    def _of_one_rank(self, name: str, ranks: Mapping[int, Entry]) -> object:
        """A value that was not sharded: that of the first rank that has it. What others have differs, or is equal."""
        (rank, first), *others = ranks.items()
        value = self._leaf(name, first)
        for other, entry in others:
            if entry == first and _is_replicated(entry):
                continue
            if _is_replicated(entry):
                raise self._contradiction(f"{name!r:.200} is replicated, and not the same on ranks {rank} and {other}")
            if isinstance(entry, PLAIN) or (isinstance(entry, ObjectEntry) and isinstance(first, ObjectEntry)):
                theirs = self._leaf(name, entry)
                if _equal(theirs, value):
                    continue
            self._differing.append(Unmapped(f"rank{other}.{name}", f"rank {other}'s own, beside rank {rank}'s"))
        return value

    def _leaf(self, name: str, entry: Entry) -> object:
        if isinstance(entry, PLAIN):
            try:
                return plain_value(entry)
            except (ValueError, KeyError, struct.error) as error:
                raise self._contradiction(f"the value of {name!r:.200} cannot be read: {error!s:.100}") from error
        if isinstance(entry, ObjectEntry):
            if entry.serializer != _PICKLED:
                return Opaque(f"serialized by {entry.serializer:.40}")
            path = self._file(entry.location)
            if path not in self._objects:
                self._objects[path] = self._files.read(path)
            return self._objects[path]
        if isinstance(entry, TensorEntry):
            return self._tensor(name, entry.dtype, entry.shape, [Shard((0,) * len(entry.shape), entry.shape, entry)])
        if isinstance(entry, ChunkedEntry):
            return self._tensor(name, entry.dtype, entry.shape, entry.chunks)
        raise self._contradiction(f"{name!r:.200} is of another kind on each rank")

    def _sharded(self, name: str, entries: Iterable[Entry]) -> object:
        """A tensor of which each rank has parts; only of DTensors may several have the same."""
        shards: list[Shard] = []
        have = set[tuple[tuple[int, ...], tuple[int, ...]]]()
        for entry in entries:
            if not isinstance(entry, ShardedEntry | DTensorEntry):
                raise self._contradiction(f"{name!r:.200} is sharded on some ranks alone")
            shards += [one for one in entry.shards if (one.offsets, one.sizes) not in have]
            if isinstance(entry, DTensorEntry):
                have.update((one.offsets, one.sizes) for one in entry.shards)
        if not shards or len({len(sides) for one in shards for sides in (one.offsets, one.sizes)}) != 1:
            raise self._contradiction(f"{name!r:.200} has no parts, or parts of several dimensions")
        ends = ([begin + side for begin, side in zip(one.offsets, one.sizes, strict=True)] for one in shards)
        shape = tuple(max(sides) for sides in zip(*ends, strict=True))
        return self._tensor(name, shards[0].tensor.dtype, shape, shards)

    def _tensor(self, name: str, dtype_name: str, shape: tuple[int, ...], shards: Sequence[Shard]) -> object:
        dtype = DTYPES.get(dtype_name.removeprefix("torch."))
        if dtype is None or any(one.tensor.serializer not in (_BUFFER, _PICKLED) for one in shards):
            return Opaque(dtype_name if dtype is None else f"serialized by {shards[0].tensor.serializer:.40}")
        if not shards:
            raise self._contradiction(f"{name!r:.200} has no parts")
        boxes = []
        for one in shards:
            is_point = not shape and one.sizes == (1,) and one.offsets == (0,)  # chunks of a scalar have a dimension
            entry, sizes = one.tensor, one.sizes
            if entry.dtype != dtype_name or entry.shape != sizes or len(one.offsets) != len(sizes):
                raise self._contradiction(
                    f"a part of {name!r:.200} is {entry.dtype} {entry.shape}, where {dtype_name} {sizes} is expected"
                )
            if not is_point and len(sizes) != len(shape):
                raise self._contradiction(f"a part of {name!r:.200} has {len(sizes)} dimensions, not {len(shape)}")
            box = Box((), ()) if is_point else Box(one.offsets, sizes)
            boxes.append(self._stored(name, entry, dtype, box))
        self._tensors.append(SourceTensor(name, dtype, shape, tuple(boxes)))
        return TensorRef(name, "tensor")

    def _stored(self, name: str, entry: TensorEntry, dtype: DType, box: Box) -> StoredBox:
        """Where a part lies."""
        path = self._file(entry.location)
        number = self._files.number(path)
        begin, end = entry.byte_range or (0, self._files.opened[number].bytes)
        if entry.serializer == _BUFFER:
            expected = math.prod(entry.shape) * dtype.item_bytes
            if end - begin != expected:
                raise DamagedError(
                    f"{path} has {end - begin} bytes for {name!r:.200}", expected=f"{expected}, of shape {entry.shape}",
                    next="copy the file again",
                )
            return StoredBox(box, number, begin)
        if end < begin:
            raise self._contradiction(f"{name!r:.200} ends before it begins")
        file, offset_bytes, view = self._files.tensor(path, Place(begin, end - begin))
        if (view.shape, view.dtype) != (entry.shape, dtype):
            raise self._contradiction(f"{entry.location!r:.200} is not the tensor {name!r:.200}")
        return StoredBox(box, file, offset_bytes, view.strides if box.shape else ())

    def _file(self, location: str) -> Path:
        if not is_inner(location):
            raise self._contradiction(f"{location!r:.200} is no place in it")
        return self._path / location

    def _contradiction(self, what: str) -> DamagedError:
        return DamagedError(
            f"{self._path / METADATA_NAME} contradicts itself, or its files: {what}",
            next="copy the whole directory again",
        )


def _equal(one: object, other: object) -> bool:
    """`==` for what a hostile pickle may hold: cycles, and parts that are shared so often that `==` never ends."""
    waiting, seen = [(one, other)], set[tuple[int, int]]()
    while waiting:
        mine, theirs = waiting.pop()
        if type(mine) is not type(theirs):
            return False
        if (id(mine), id(theirs)) in seen:
            continue
        seen.add((id(mine), id(theirs)))
        if isinstance(mine, dict | list | tuple) and isinstance(theirs, dict | list | tuple):
            if len(mine) != len(theirs):
                return False
            waiting += zip(mine, theirs, strict=True)
            if isinstance(mine, dict) and isinstance(theirs, dict):
                waiting += zip(mine.values(), theirs.values(), strict=True)
        elif mine != theirs:
            return False
    return True


def _is_replicated(entry: Entry) -> bool:
    return bool(getattr(entry, "replicated", False))


def _encoded(key: str) -> str:
    """A key as a part of a path."""
    return key.replace("%", "%25").replace("/", "%2F")
