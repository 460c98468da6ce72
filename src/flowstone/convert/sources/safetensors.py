"""Safetensors as a source: one file, or a Hugging Face directory with several files (shards) and their index."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flowstone.config import HEADER_BYTES_MAX, MIB
from flowstone.convert.documents import read_documents
from flowstone.convert.source import (
    SourceCheckpoint,
    SourceFile,
    check_source,
    is_path_inside,
    open_plain,
    read_small_file,
    source_file,
)
from flowstone.errors import DamagedError, NotAStoreError, UnsupportedFormatError
from flowstone.format.documents import SHARD_INDEX_SUFFIX
from flowstone.format.segment import LENGTH_BYTES, HeaderEntry, parse_header
from flowstone.store.os_errors import translated
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES, DType
from flowstone.table.stored import SourceTensor, StoredBox

_INDEX_BYTES_MAX = 256 * MIB
_STORED: Mapping[str, DType] = {dtype.stored: dtype for dtype in DTYPES.values() if not dtype.as_bytes}
_FOREIGN: Mapping[str, DType] = {"F8_E8M0": DTYPES["float8_e8m0fnu"]}  # types of later versions of the format


class _Index(msgspec.Struct):
    """The index of shards. Its field `metadata` is ignored."""

    weight_map: dict[str, str]


def is_safetensors(path: Path) -> bool:
    """Whether this is a safetensors file, or a directory of such files."""
    if path.is_dir():
        return any(name.endswith((".safetensors", SHARD_INDEX_SUFFIX)) for name in os.listdir(path))
    return path.name.endswith(".safetensors")


def read_safetensors(path: Path) -> SourceCheckpoint:
    """Read the file, or the directory.

    raises  DamagedError, NotAStoreError, UnsupportedFormatError, StorageError
    """
    directory = path if path.is_dir() else path.parent
    names, weight_map = _shards(path) if path.is_dir() else ((path.name,), None)
    files, tensors = [], dict[str, SourceTensor]()
    for number, name in enumerate(names):
        file, file_tensors = _read_file(directory / name, number)
        files.append(file)
        for tensor in file_tensors:
            if weight_map is not None and weight_map.get(tensor.name, name) != name:
                continue  # the index says that another shard has this tensor
            if tensor.name in tensors:
                raise DamagedError(
                    f"two files of {directory} hold {tensor.name!r}", found=f"{name} and an earlier one",
                    next="remove the file that does not belong to this checkpoint",
                )
            tensors[tensor.name] = tensor
    _check_map(directory, weight_map, tensors, files)
    documents = read_documents(directory) if path.is_dir() else {}
    return check_source(SourceCheckpoint(
        "safetensors", str(path), tuple(files), tuple(tensors.values()), documents=documents, is_flat=True
    ))


def _shards(directory: Path) -> tuple[tuple[str, ...], Mapping[str, str] | None]:
    """The names of the files to read; and, if there is an index: name of a tensor -> its file."""
    names = sorted(os.listdir(directory))
    indexes = [name for name in names if name.endswith(SHARD_INDEX_SUFFIX)]
    files = tuple(name for name in names if name.endswith(".safetensors"))
    if len(indexes) > 1:
        raise UnsupportedFormatError(
            f"{directory} has several checkpoints", found=", ".join(indexes[:5]),
            next="put the files of each checkpoint into a directory of its own, and give one of these directories",
        )
    if not indexes:
        if len(files) > 1:
            raise NotAStoreError(
                f"{directory} has {len(files)} safetensors files and no index",
                expected=f"one file, or model{SHARD_INDEX_SUFFIX}", found=", ".join(files[:5]),
                next="give one of the files, or download the index as well",
            )
        return files, None
    path = directory / indexes[0]
    text = read_small_file(directory, indexes[0], _INDEX_BYTES_MAX)
    try:
        weight_map = msgspec.json.decode(text, type=_Index).weight_map
    except (ValueError, RecursionError) as error:
        raise DamagedError(
            f"{path} is not an index of shards: {error!s:.200}", next="copy or download the file again"
        ) from error
    shards = tuple(dict.fromkeys(weight_map.values()))
    strange = [name for name in shards if "/" in name or not is_path_inside(name)]
    if strange:
        raise DamagedError(
            f"{path} refers to a file outside its directory", found=f"{strange[0]!r:.200}",
            next="do not use this checkpoint",
        )
    missing = [name for name in shards if not (directory / name).exists()]
    if missing:
        raise DamagedError(
            f"{directory} lacks {len(missing)} of {len(shards)} shards",
            missing=", ".join(missing[:5]), next="copy or download the missing files",
        )
    return shards, weight_map


def _read_file(path: Path, number: int) -> tuple[SourceFile, list[SourceTensor]]:
    file = source_file(path)
    with translated(path.parent, "read", path.name), open_plain(Path(file.path)) as opened:
        start = opened.read(LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or length > min(HEADER_BYTES_MAX * 2, file.bytes):
            raise DamagedError(
                f"{path} is not a safetensors file, or its beginning is damaged", found=f"{file.bytes} bytes",
                next="copy or download the file again",
            )
        header = start + opened.read(length)
    entries, _, begin = parse_header(header, path=str(path))
    end = begin + max((entry.end for entry in entries.values()), default=0)
    if end != file.bytes:
        raise DamagedError(
            f"{path} is {'shorter' if end > file.bytes else 'longer'} than its header says",
            expected=f"{end} bytes", found=f"{file.bytes} bytes", next="copy or download the file again",
        )
    ordered = sorted(entries.values(), key=lambda entry: entry.begin)
    return file, [_tensor(entry, path, number, begin) for entry in ordered if not entry.name.startswith("__pad__.")]


def _tensor(entry: HeaderEntry, path: Path, number: int, begin: int) -> SourceTensor:
    dtype = _STORED.get(entry.dtype) or _FOREIGN.get(entry.dtype)
    if dtype is None:
        raise UnsupportedFormatError(
            f"{entry.name!r} in {path} has the unknown dtype {entry.dtype!r:.40}",
            expected=", ".join(sorted(_STORED)), next="use a later version of flowstone",
        )
    tensor = SourceTensor(entry.name, dtype, entry.shape, (
        StoredBox(Box.whole(entry.shape), number, begin + entry.begin),
    ))
    if tensor.bytes != entry.end - entry.begin:
        raise DamagedError(
            f"the length of {entry.name!r} in {path} does not match its dtype and shape",
            expected=f"{tensor.bytes} bytes for shape {entry.shape}", found=f"{entry.end - entry.begin} bytes",
            next="copy or download the file again",
        )
    return tensor


def _check_map(
    directory: Path, weight_map: Mapping[str, str] | None, tensors: Mapping[str, SourceTensor], files: list[SourceFile]
) -> None:
    if weight_map is None:
        return
    missing = [name for name in weight_map if name not in tensors]
    extra = [name for name in tensors if name not in weight_map]
    if missing or extra:
        raise DamagedError(
            f"the index of {directory} and its {len(files)} shards disagree",
            missing=", ".join(missing[:5]) or "nothing", not_in_the_index=", ".join(extra[:5]) or "nothing",
            next="copy or download the index and the shards again, all of the same revision",
        )


def encode_index(weight_map: Mapping[str, str], total_bytes: int) -> bytes:
    """The content of an index of shards, as Hugging Face writes it."""
    return (
        json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
        + "\n"
    ).encode()
