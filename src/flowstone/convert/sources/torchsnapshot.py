"""A directory of TorchSnapshot as a source: the state of all ranks. Its pickles are not executed."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

from flowstone.convert.source import SourceCheckpoint, UnmappedValue, check_source, in_file_order, is_path_inside
from flowstone.convert.sources.pickled_files import PickledFiles
from flowstone.convert.sources.restricted_unpickler import Opaque
from flowstone.convert.sources.torch_archive import ArchiveRange
from flowstone.convert.sources.torchsnapshot_manifest import (
    METADATA_NAME,
    PLAIN,
    ChunkedEntry,
    DictEntry,
    DTensorEntry,
    Entry,
    ListEntry,
    ManifestShard,
    ManifestTensor,
    ObjectEntry,
    OrderedDictEntry,
    ShardedEntry,
    empty_container,
    plain_value,
    read_manifest,
)
from flowstone.convert.sources.tree import PickleTree, check_sections
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.objects import TensorRef, key_text
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES, DType
from flowstone.table.stored import SourceTensor, StoredBox

_DIRECTORIES = frozenset({"0", "batched", "sharded", "replicated"})
_DEPTH_MAX = 100
_BUFFER, _PICKLED = "buffer_protocol", "torch_save"


def is_torchsnapshot(path: Path) -> bool:
    """Whether a directory is a snapshot, finished or not."""
    if not path.is_dir():
        return False
    names = set(os.listdir(path))
    is_cut = bool(names & _DIRECTORIES) and all(name in _DIRECTORIES or name.isdigit() for name in names)
    return METADATA_NAME in names or (is_cut and all((path / name).is_dir() for name in names))


def read_torchsnapshot(path: Path) -> SourceCheckpoint:
    """Read the snapshot. It has one section for each key of the state that was given to Snapshot.take.

    raises  DamagedError            a file is missing or incomplete, or the manifest contradicts itself
            UnsupportedFormatError  another version of TorchSnapshot wrote it
    """
    with closing(PickledFiles(str(path))) as files:
        return _Snapshot(path, files).source()


class _Snapshot:
    """Assembles the sections of a snapshot from the entries of all ranks."""

    def __init__(self, path: Path, files: PickledFiles) -> None:
        self._path, self._files = path, files
        self._manifest = read_manifest(path)
        self._tree = PickleTree(files.storage_range, str(path))
        self._tensors: list[SourceTensor] = []
        self._differing: list[UnmappedValue] = []
        self._seen = 0
        # content of each file, which is read only once, though many entries may name it
        self._objects: dict[Path, object] = {}
        self._below: dict[str, list[str]] = {}
        for logical in self._manifest:
            parent, _, _ = logical.rpartition("/")
            self._below.setdefault(parent, []).append(logical)

    def source(self) -> SourceCheckpoint:
        values: dict[str, object] = {}
        for root in self._below.get("", ()):
            name = unquote(root)
            if name in values:
                raise self._contradiction(f"two paths, one of them {root!r:.200}, stand for the name {name!r:.200}")
            values[name] = self._value(root, name, 0)
        if self._seen != len(self._manifest):
            raise self._contradiction("some paths in it are not below a dict or list")
        check_sections(values, str(self._path))
        objects = {name: self._tree.section(name, value) for name, value in values.items()}
        gone = {value.name for value in self._tree.unmapped}
        return check_source(SourceCheckpoint(
            "torchsnapshot", str(self._path), tuple(self._files.files),
            in_file_order((*self._tensors, *self._tree.tensors)), tuple(self._tree.aliases),
            {name: value for name, value in objects.items() if name not in gone},
            unmapped=(*self._tree.unmapped, *self._differing),
        ))

    def _value(self, logical: str, name: str, depth: int) -> object:
        """The value at the path `logical`, in which a TensorRef or a TensorView stands for each tensor."""
        if depth > _DEPTH_MAX:
            raise UnsupportedFormatError(
                f"{self._path} is nested too deeply, at {name!r:.200}",
                next="save the state in fewer levels of dicts and lists",
            )
        self._seen += 1
        ranks = self._manifest[logical]
        entries = list(ranks.values())
        first = entries[0]
        if isinstance(first, ListEntry | DictEntry | OrderedDictEntry):
            if any(type(entry) is not type(first) for entry in entries):
                raise self._contradiction(f"{name!r:.200} is another type of container on some ranks")
            keys = self._keys(logical, ranks)
            container = empty_container(first)
            owner = next(iter(ranks))
            for below, key in keys.items():
                if isinstance(first, ListEntry) and not self._has(owner, below):
                    self._report_extra_items(below, f"{name}.{key_text(key)}", owner)
                else:
                    container[key] = self._value(below, f"{name}.{key_text(key)}", depth + 1)
            return list(container.values()) if isinstance(first, ListEntry) else container
        if isinstance(first, ShardedEntry | DTensorEntry):
            return self._sharded(name, entries)
        return self._of_one_rank(name, ranks)

    def _keys(self, logical: str, ranks: Mapping[int, Entry]) -> dict[str, object]:
        """The paths directly below a container, and the key of each, in order."""
        below = set(self._below.get(logical, ()))
        keys: dict[str, object] = {}
        for rank, entry in ranks.items():
            is_dict = isinstance(entry, DictEntry | OrderedDictEntry)
            listed = entry.keys if isinstance(entry, DictEntry | OrderedDictEntry) else tuple(range(len(below)))
            mine = {f"{logical}/{_encoded(str(key))}": key for key in listed}
            if len(mine) != len(listed):
                raise self._contradiction(f"two keys of {logical!r:.200} have the same path, such as 1 and '1'")
            for path, key in mine.items():
                if type(keys.setdefault(path, key)) is not type(key):
                    raise self._contradiction(f"the key of {path!r:.200} has different types on different ranks")
                if is_dict and not self._has(rank, path):
                    raise self._contradiction(f"rank {rank} lacks its part of {path!r:.200}")
        if len(set(keys.values())) != len(keys):
            raise self._contradiction(f"two keys of {logical!r:.200} are equal, such as 1 and True")
        if keys.keys() != below:
            odd = sorted(keys.keys() ^ below)[0]
            raise self._contradiction(f"{logical!r:.200} and the list of paths below it disagree about {odd!r:.200}")
        return keys

    def _report_extra_items(self, logical: str, name: str, owner: int) -> None:
        """A list may be longer on other ranks than on the first rank. Report these further values, which an import
        leaves out.
        """
        other = next(iter(self._manifest[logical]))
        self._differing.append(UnmappedValue(f"rank{other}.{name}", f"beyond the end of rank {owner}'s list"))
        waiting = [logical]
        while waiting:
            waiting += self._below.get(waiting.pop(), ())
            self._seen += 1

    def _has(self, rank: int, logical: str) -> bool:
        """Whether a rank has a value at a path, saved by that rank itself or replicated."""
        ranks = self._manifest.get(logical, {})
        return rank in ranks or any(isinstance(e, DTensorEntry) or _is_replicated(e) for e in ranks.values())

    def _of_one_rank(self, name: str, ranks: Mapping[int, Entry]) -> object:
        """The first rank's value, for a value that is not sharded. If other ranks have different values, these are
        reported.
        """
        (rank, first), *others = ranks.items()
        value = self._leaf(name, first)
        for other, entry in others:
            if entry == first and _is_replicated(entry):
                continue
            if _is_replicated(entry):
                raise self._contradiction(f"{name!r:.200} is replicated, but differs on ranks {rank} and {other}")
            if isinstance(entry, PLAIN) or (isinstance(entry, ObjectEntry) and isinstance(first, ObjectEntry)):
                theirs = self._leaf(name, entry)
                if _equal(theirs, value):
                    continue
            self._differing.append(
                UnmappedValue(f"rank{other}.{name}", f"rank {other}'s own; an import takes only rank {rank}'s")
            )
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
        if isinstance(entry, ManifestTensor):
            return self._tensor(
                name, entry.dtype, entry.shape, [ManifestShard((0,) * len(entry.shape), entry.shape, entry)]
            )
        if isinstance(entry, ChunkedEntry):
            return self._tensor(name, entry.dtype, entry.shape, entry.chunks)
        raise self._contradiction(f"{name!r:.200} is a value of different types on different ranks")

    def _sharded(self, name: str, entries: Iterable[Entry]) -> object:
        """A tensor of which each rank has parts. Only with a DTensor may several ranks have the same part."""
        shards: list[ManifestShard] = []
        have = set[tuple[tuple[int, ...], tuple[int, ...]]]()
        for entry in entries:
            if not isinstance(entry, ShardedEntry | DTensorEntry):
                raise self._contradiction(f"{name!r:.200} is sharded only on some ranks")
            shards += [shard for shard in entry.shards if (shard.offsets, shard.sizes) not in have]
            if isinstance(entry, DTensorEntry):
                have.update((shard.offsets, shard.sizes) for shard in entry.shards)
        if not shards or len({len(sides) for shard in shards for sides in (shard.offsets, shard.sizes)}) != 1:
            raise self._contradiction(f"{name!r:.200} has no parts, or parts with different dimensions")
        ends = ([begin + side for begin, side in zip(shard.offsets, shard.sizes, strict=True)] for shard in shards)
        shape = tuple(max(sides) for sides in zip(*ends, strict=True))
        return self._tensor(name, shards[0].tensor.dtype, shape, shards)

    def _tensor(self, name: str, dtype_name: str, shape: tuple[int, ...], shards: Sequence[ManifestShard]) -> object:
        dtype = DTYPES.get(dtype_name.removeprefix("torch."))
        if dtype is None or any(shard.tensor.serializer not in (_BUFFER, _PICKLED) for shard in shards):
            return Opaque(dtype_name if dtype is None else f"serialized by {shards[0].tensor.serializer:.40}")
        if not shards:
            raise self._contradiction(f"{name!r:.200} has no parts")
        boxes = []
        for shard in shards:
            # scalars are stored as one-dimensional chunks
            is_point = not shape and shard.sizes == (1,) and shard.offsets == (0,)
            entry, sizes = shard.tensor, shard.sizes
            if entry.dtype != dtype_name or entry.shape != sizes or len(shard.offsets) != len(sizes):
                raise self._contradiction(
                    f"a part of {name!r:.200} is {entry.dtype} {entry.shape}, where {dtype_name} {sizes} is expected"
                )
            if not is_point and len(sizes) != len(shape):
                raise self._contradiction(f"a part of {name!r:.200} has {len(sizes)} dimensions, not {len(shape)}")
            box = Box((), ()) if is_point else Box(shard.offsets, sizes)
            boxes.append(self._stored(name, entry, dtype, box))
        self._tensors.append(SourceTensor(name, dtype, shape, tuple(boxes)))
        return TensorRef(name, "tensor")

    def _stored(self, name: str, entry: ManifestTensor, dtype: DType, box: Box) -> StoredBox:
        """The location of a part of a tensor, whose region is `box`."""
        path = self._file(entry.location)
        number = self._files.file_number(path)
        begin, end = entry.byte_range or (0, self._files.files[number].bytes)
        if entry.serializer == _BUFFER:
            expected = math.prod(entry.shape) * dtype.item_bytes
            if end - begin != expected:
                raise DamagedError(
                    f"{path} has {end - begin} bytes for {name!r:.200}",
                    expected=f"{expected} bytes for shape {entry.shape}", next="copy the file again",
                )
            return StoredBox(box, number, begin)
        if end < begin:
            raise self._contradiction(f"the byte range of {name!r:.200} ends before its beginning")
        file, offset_bytes, view = self._files.tensor(path, ArchiveRange(begin, end - begin))
        if (view.shape, view.dtype) != (entry.shape, dtype):
            raise self._contradiction(
                f"the tensor in {entry.location!r:.200} does not have the dtype and shape of {name!r:.200}"
            )
        return StoredBox(box, file, offset_bytes, view.strides if box.shape else ())

    def _file(self, location: str) -> Path:
        if not is_path_inside(location):
            raise self._contradiction(f"the location {location!r:.200} is not a path inside of the snapshot")
        return self._path / location

    def _contradiction(self, reason: str) -> DamagedError:
        return DamagedError(
            f"{self._path / METADATA_NAME} contradicts itself, or the files beside it: {reason}",
            next="copy the whole directory again",
        )


def _equal(a: object, b: object) -> bool:
    """Like `==`, but also safe for values of a hostile pickle: with cycles or values that occur many times, `==` could
    run forever.
    """
    waiting, seen = [(a, b)], set[tuple[int, int]]()
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
    """A key, encoded for use in a path."""
    return key.replace("%", "%25").replace("/", "%2F")
