"""Checkpoints changed on disk and sealed again, and states compared bit for bit."""

from __future__ import annotations

import ctypes
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.numpy import save as safetensors_bytes

import flowstone as fs
from flowstone.format.digest import chunk_digests, digest
from flowstone.state.records import PerRank, Shard, StateDescription
from flowstone.table.box import Box
from flowstone.table.pieces import Layout, Memory, Piece, Pieces, Places


def with_checksum(document: Mapping[str, object]) -> bytes:
    """A document with a valid seal (docs/FORMAT.md)."""
    fields = {key: value for key, value in document.items() if key != "digest"}
    body = json.dumps(fields, indent=2)[:-2].encode() + b",\n  "
    return body + f'"digest": "{digest(body)}"\n}}\n'.encode()


def sealed_text(text: bytes) -> bytes:
    """Seal the text of a JSON object; the result is well-formed if the text is."""
    body = text.rstrip().removesuffix(b"}") + b",\n  "
    return body + f'"digest": "{digest(body)}"\n}}\n'.encode()


def edit_manifest(checkpoint: Path, change: Callable[[dict], object]) -> None:
    """Call `change` on the manifest's fields, and seal them again."""
    path = checkpoint / "manifest.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(with_checksum(document))


def vouch_for(checkpoint: Path, entry: str, data: bytes) -> None:
    """Replace the file that the manifest calls `entry` by `data`, with valid digests."""

    def change(manifest: dict) -> None:
        manifest[entry] |= {"bytes": len(data), "chunks": chunk_digests(data)}
        (checkpoint / manifest[entry]["name"]).write_bytes(data)

    edit_manifest(checkpoint, change)


def edit_index(checkpoint: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Call `change` on the index's columns (and on `dtypes`), and make all digests valid again."""
    with safe_open(checkpoint / "index.safetensors", "np") as file:
        columns = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    columns["dtypes"] = metadata["dtypes"]
    change(columns)
    metadata["dtypes"] = columns.pop("dtypes")
    vouch_for(checkpoint, "index", safetensors_bytes(columns, metadata))


def edit_header(checkpoint: Path, change: Callable[[bytes], bytes]) -> None:
    """Call `change` on the first segment's header, and make its digest valid again."""
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    row = manifest["segments"][0]
    path = checkpoint / row["name"]
    data = path.read_bytes()
    header = change(data[: row["header_bytes"]])
    assert len(header) == row["header_bytes"], "a forged header keeps its size"
    path.write_bytes(header + data[row["header_bytes"] :])
    edit_manifest(checkpoint, lambda m: m["segments"][0].update(header_digest=digest(header)))


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flip one bit of a file; a second call reverts it."""
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ (1 << bit)]))


def place_of(checkpoint: Path, tensor: str) -> tuple[Path, int]:
    """The segment that contains a tensor, and the offset of the tensor's first byte in that file."""
    for path in sorted(checkpoint.glob("rank-*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if tensor in header:
            return path, 8 + length + header[tensor]["data_offsets"][0]
    raise KeyError(tensor)


def tensor_bytes(*tensors: torch.Tensor) -> bytes:
    """The elements of all columns one after another; a column may be a single number or have any shape."""
    return b"".join(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


def stored_bytes(path: Path, step: int = 1) -> int:
    """The size of a checkpoint's segments on disk."""
    return sum(row.bytes for row in fs.open(path, step).manifest.segments)


def content(value: object, path: str = "state") -> dict[str, tuple[object, ...]]:
    """Every leaf of a state by path, bit for bit: must be equal after a load, and unchanged after a failed one."""
    if isinstance(value, PerRank):
        return content(value.value, path)
    if isinstance(value, Shard):
        return {f"{path}@": (value.shape, value.offset)} | content(value.tensor, path)
    if isinstance(value, torch.Tensor):
        dense = value.detach().resolve_conj().resolve_neg().contiguous()
        raw = ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.numel() else b""
        return {path: ("tensor", str(value.dtype), tuple(value.shape), raw)}
    if isinstance(value, np.ndarray):
        return {path: ("ndarray", value.dtype.str, value.shape, value.tobytes())}
    if isinstance(value, np.generic):
        return {path: (type(value).__name__, value.tobytes())}
    if not isinstance(value, type) and hasattr(value, "state_dict"):
        return content(value.state_dict(), path)
    return _plain(value, path)


def _plain(value: object, path: str) -> dict[str, tuple[object, ...]]:
    kind = type(value).__name__
    if isinstance(value, dict):
        leaves = {path: (kind, tuple(map(repr, value)) if isinstance(value, OrderedDict) else len(value))}
        for key, item in value.items():
            leaves |= content(item, f"{path}[{key!r}]")
        return leaves
    if isinstance(value, list | tuple | deque):
        leaves = {path: (kind, len(value), getattr(value, "maxlen", None))}
        for index, item in enumerate(value):
            leaves |= content(item, f"{path}[{index}]")
        return leaves
    if isinstance(value, set | frozenset | Counter):
        return {path: (kind, tuple(sorted(map(repr, value))))}
    return {path: (kind, repr(value))}


def memory_at(pieces: Pieces, places: Places) -> list[Memory]:
    """The place of each piece, as records."""
    return [places.memory(index, piece) for index, piece in enumerate(pieces)]


def split_rows(described: StateDescription, name: str, row: int) -> StateDescription:
    """`described` as two ranks would hold it: the tensor `name` in two boxes, cut before `row`."""
    pieces, lazy, memory = list(described.pieces), list(described.lazy), memory_at(described.pieces, described.places)
    start = next(i for i, piece in enumerate(pieces) if piece.name == name)
    whole, held = pieces[start], memory[start]
    parts, halves = [], []
    for begin, end in ((0, row), (row, whole.shape[0])):
        shape = (end - begin, *whole.shape[1:])
        parts.append(Piece(name, whole.dtype, whole.shape, Box((begin, *(0,) * (len(shape) - 1)), shape)))
        address = held.address + begin * held.strides_bytes[0]
        halves.append(Memory(held.owner, address, shape, held.strides_bytes, held.item_bytes))
    pieces[start : start + 1], memory[start : start + 1], lazy[start : start + 1] = parts, halves, [lazy[start]] * 2
    layout = Layout(Pieces.of(pieces), described.aliases, tuple(lazy))
    return replace(described, layout=layout, places=Places.of(memory))
