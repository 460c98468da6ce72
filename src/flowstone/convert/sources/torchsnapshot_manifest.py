"""The manifest of a TorchSnapshot: which values each rank has saved, by path, and where they are."""

from __future__ import annotations

import base64
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from flowstone.config import NDIM_MAX
from flowstone.convert.source import METADATA_BYTES_MAX, read_small_file
from flowstone.errors import DamagedError, UnsupportedFormatError

METADATA_NAME = ".snapshot_metadata"
_VERSION = "0.1."

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
_Sides: TypeAlias = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=NDIM_MAX)]


class _Tagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """An entry of the manifest. Unknown fields are an error, since they could change the meaning of the entry in a
    later version.
    """


class ManifestTensor(_Tagged, frozen=True, tag="Tensor"):
    """A tensor, or a part of one, that is contiguous in a file. `byte_range`: begin and end in the file; None: the full
    file.
    """

    location: str
    serializer: str
    dtype: str
    shape: _Sides
    replicated: bool
    byte_range: tuple[_Count, _Count] | None = None


class ManifestShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a tensor, and where the part is in the full tensor."""

    offsets: _Sides
    sizes: _Sides
    tensor: ManifestTensor


class ShardedEntry(_Tagged, frozen=True, tag="ShardedTensor"):
    """One rank's parts of a tensor that is sharded over all ranks."""

    shards: tuple[ManifestShard, ...]


class DTensorEntry(_Tagged, frozen=True, tag="DTensor"):
    """One rank's parts of a DTensor. Several ranks may have the same part."""

    shards: tuple[ManifestShard, ...]
    mesh: list[object] | int
    dim_map: list[list[int]]


class ChunkedEntry(_Tagged, frozen=True, tag="ChunkedTensor"):
    """A tensor that was too large for one file, and was saved in several chunks."""

    dtype: str
    shape: _Sides
    chunks: tuple[ManifestShard, ...]
    replicated: bool


class ObjectEntry(_Tagged, frozen=True, tag="object"):
    """Any other value, saved with torch.save."""

    location: str
    serializer: str
    obj_type: str
    replicated: bool


class ListEntry(_Tagged, frozen=True, tag="list"):
    """A list. Its items are the entries whose paths are below this one."""


class DictEntry(_Tagged, frozen=True, tag="dict"):
    """A dict. Its values are the entries whose paths are below this one."""

    keys: tuple[int | str | bool, ...]


class OrderedDictEntry(_Tagged, frozen=True, tag="OrderedDict"):
    """An OrderedDict."""

    keys: tuple[int | str | bool, ...]


class _Plain(_Tagged, frozen=True):
    serialized_value: str
    replicated: bool
    readable: str | None = None


class IntEntry(_Plain, frozen=True, tag="int"):
    """An integer."""


class StrEntry(_Plain, frozen=True, tag="str"):
    """Text."""


class BoolEntry(_Plain, frozen=True, tag="bool"):
    """True or False."""


class BytesEntry(_Plain, frozen=True, tag="bytes"):
    """Bytes, in base64."""


class FloatEntry(_Plain, frozen=True, tag="float"):
    """The eight bytes of a float, in base64."""


PlainEntry: TypeAlias = IntEntry | StrEntry | BoolEntry | BytesEntry | FloatEntry
PLAIN = (IntEntry, StrEntry, BoolEntry, BytesEntry, FloatEntry)
Entry: TypeAlias = (
    ManifestTensor | ShardedEntry | DTensorEntry | ChunkedEntry | ObjectEntry | ListEntry | DictEntry | OrderedDictEntry
    | PlainEntry
)


class _SnapshotMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    manifest: dict[str, Entry]


class _SnapshotVersion(msgspec.Struct, frozen=True):
    version: str


Manifest: TypeAlias = Mapping[str, Mapping[int, Entry]]
"""path -> rank -> entry, in the order of ranks."""


def read_manifest(directory: Path) -> Manifest:
    """Read .snapshot_metadata.

    raises  DamagedError            the file is missing or incomplete, or contradicts itself
            UnsupportedFormatError  another version wrote the file, or it is YAML, as in versions before 0.1.0
    """
    where = directory / METADATA_NAME
    if not where.is_file():
        raise DamagedError(
            f"{directory} has no {METADATA_NAME}: the snapshot was not finished",
            next="copy the whole directory again, or take the snapshot again"
        )
    metadata = _decoded(read_small_file(directory, METADATA_NAME, METADATA_BYTES_MAX), where)
    by_path: dict[str, dict[int, Entry]] = {}
    for path, entry in metadata.manifest.items():
        text, _, logical = path.partition("/")
        is_rank = re.fullmatch(r"0|[1-9][0-9]{0,9}", text) and int(text) < metadata.world_size
        if not logical or not is_rank:
            raise DamagedError(
                f"{where}: the name {path!r:.200} does not begin with a rank",
                expected=f"a rank from 0 to {metadata.world_size - 1}, then a path, such as '0/model/weight'",
                next="copy the whole directory again",
            )
        by_path.setdefault(logical, {})[int(text)] = entry
    return {logical: dict(sorted(ranks.items())) for logical, ranks in by_path.items()}


def _decoded(content: bytes, where: Path) -> _SnapshotMetadata:
    again = "restore it with the version that took it, and take it again with torchsnapshot 0.1.0"
    if content.lstrip()[:1] not in (b"{", b"", b"\0"):  # a crash may leave a file that consists of zeros
        raise UnsupportedFormatError(
            f"{where} is not JSON; versions of torchsnapshot before 0.1.0 wrote YAML", found=f"{content[:40]!r}",
            next=again,
        )
    try:
        version = msgspec.json.decode(content, type=_SnapshotVersion).version
        if not version.startswith(_VERSION):
            raise UnsupportedFormatError(
                f"{where} is from an unknown version of torchsnapshot", found=f"{version:.40}", expected="0.1.0",
                next=again,
            )
        return msgspec.json.decode(content, type=_SnapshotMetadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(
            f"{where} is truncated, or was not written by torchsnapshot: {error!s:.200}", next="copy the file again"
        ) from error


def plain_value(entry: PlainEntry) -> int | str | bool | bytes | float:
    """The value of an entry whose value is in the manifest itself. Raises ValueError."""
    text = entry.serialized_value
    match entry:
        case IntEntry():
            return int(text)
        case StrEntry():
            return text
        case BoolEntry():
            return {"True": True, "False": False}[text]
        case BytesEntry():
            return base64.b64decode(text, validate=True)
        case FloatEntry():
            number: float = struct.unpack("<d", base64.b64decode(text, validate=True))[0]
            return number


def empty_container(entry: ListEntry | DictEntry | OrderedDictEntry) -> dict[object, object]:
    """An empty container for an entry. A list is first built as a dict with its positions as keys, and converted
    afterwards.
    """
    return OrderedDict() if isinstance(entry, OrderedDictEntry) else {}
