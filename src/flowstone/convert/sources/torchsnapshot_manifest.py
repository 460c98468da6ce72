"""The manifest of a TorchSnapshot: what each rank has saved, by path, and where it lies."""

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
from flowstone.convert.source import METADATA_BYTES_MAX, read_whole
from flowstone.errors import DamagedError, UnsupportedFormatError

METADATA_NAME = ".snapshot_metadata"
_VERSION = "0.1."

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
_Sides: TypeAlias = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=NDIM_MAX)]


class _Tagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """An entry. What a later version says besides would change what it means, so that is an error."""


class TensorEntry(_Tagged, frozen=True, tag="Tensor"):
    """A tensor, or a part of one, in one run of bytes. `byte_range`: begin and end in the file; None: all of it."""

    location: str
    serializer: str
    dtype: str
    shape: _Sides
    replicated: bool
    byte_range: tuple[_Count, _Count] | None = None


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a tensor, and where it lies in the whole."""

    offsets: _Sides
    sizes: _Sides
    tensor: TensorEntry


class ShardedEntry(_Tagged, frozen=True, tag="ShardedTensor"):
    """What one rank has of a tensor that all have together."""

    shards: tuple[Shard, ...]


class DTensorEntry(_Tagged, frozen=True, tag="DTensor"):
    """The same of a DTensor, of which several ranks may have the same part."""

    shards: tuple[Shard, ...]
    mesh: list[object] | int
    dim_map: list[list[int]]


class ChunkedEntry(_Tagged, frozen=True, tag="ChunkedTensor"):
    """A tensor that was too large for one file."""

    dtype: str
    shape: _Sides
    chunks: tuple[Shard, ...]
    replicated: bool


class ObjectEntry(_Tagged, frozen=True, tag="object"):
    """Whatever else torch.save takes."""

    location: str
    serializer: str
    obj_type: str
    replicated: bool


class ListEntry(_Tagged, frozen=True, tag="list"):
    """A list; its items are the entries below it."""


class DictEntry(_Tagged, frozen=True, tag="dict"):
    """A dict; its values are the entries below it."""

    keys: tuple[int | str | bool, ...]


class OrderedDictEntry(_Tagged, frozen=True, tag="OrderedDict"):
    """An OrderedDict."""

    keys: tuple[int | str | bool, ...]


class _Plain(_Tagged, frozen=True):
    serialized_value: str
    replicated: bool
    readable: str | None = None


class IntEntry(_Plain, frozen=True, tag="int"):
    """A number."""


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
    TensorEntry | ShardedEntry | DTensorEntry | ChunkedEntry | ObjectEntry | ListEntry | DictEntry | OrderedDictEntry
    | PlainEntry
)


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    manifest: dict[str, Entry]


class _Version(msgspec.Struct, frozen=True):
    version: str


Manifest: TypeAlias = Mapping[str, Mapping[int, Entry]]
"""What each rank has at a path, in the order of ranks."""


def read_manifest(directory: Path) -> Manifest:
    """What .snapshot_metadata says.

    raises  DamagedError            it is missing, torn, or contradicts itself
            UnsupportedFormatError  another version, or YAML, as versions before 0.1.0 wrote it
    """
    where = directory / METADATA_NAME
    if not where.is_file():
        raise DamagedError(
            f"{directory} has no {METADATA_NAME}: the snapshot was not finished",
            next="copy it whole, or take it again"
        )
    metadata = _decoded(read_whole(directory, METADATA_NAME, METADATA_BYTES_MAX), where)
    found: dict[str, dict[int, Entry]] = {}
    for path, entry in metadata.manifest.items():
        text, _, logical = path.partition("/")
        is_rank = re.fullmatch(r"0|[1-9][0-9]{0,9}", text) and int(text) < metadata.world_size
        if not logical or not is_rank:
            raise DamagedError(
                f"{where}: {path!r:.200} is of no rank", expected=f"0 to {metadata.world_size - 1}, and a path",
                next="copy the whole directory again",
            )
        found.setdefault(logical, {})[int(text)] = entry
    return {logical: dict(sorted(ranks.items())) for logical, ranks in found.items()}


def _decoded(content: bytes, where: Path) -> _Metadata:
    again = "restore it with the version that has taken it, and take it again with torchsnapshot 0.1.0"
    if content.lstrip()[:1] not in (b"{", b"", b"\0"):  # a crash may leave a file of zeros
        raise UnsupportedFormatError(
            f"{where} is no JSON; versions of torchsnapshot before 0.1.0 wrote YAML", found=f"{content[:40]!r}",
            next=again,
        )
    try:
        version = msgspec.json.decode(content, type=_Version).version
        if not version.startswith(_VERSION):
            raise UnsupportedFormatError(
                f"{where} is of an unknown version of torchsnapshot", found=f"{version:.40}", expected="0.1.0",
                next=again,
            )
        return msgspec.json.decode(content, type=_Metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(
            f"{where} is torn, or not as torchsnapshot writes it: {error!s:.200}", next="copy the file again"
        ) from error


def plain_value(entry: PlainEntry) -> int | str | bool | bytes | float:
    """The value of an entry that has it inline. Raises ValueError."""
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
            found: float = struct.unpack("<d", base64.b64decode(text, validate=True))[0]
            return found


def empty(entry: ListEntry | DictEntry | OrderedDictEntry) -> dict[object, object]:
    """A container of an entry's kind; a list is filled by number, and made of it after that."""
    return OrderedDict() if isinstance(entry, OrderedDictEntry) else {}
