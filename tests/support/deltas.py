"""Deltas made by hand: chunks of a checkpoint that an earlier one also has become references to that one's file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from flowstone import open as open_checkpoint
from flowstone.config import BLOCK_BYTES
from flowstone.format.digest import digest
from flowstone.table.chunks import Chunks
from forge import edit_index, edit_manifest

OWN = "rank-00000.safetensors"


def make_delta(checkpoint: Path, base: Path) -> int:
    """Replace chunks that `base` has at the same place by references; both have one segment and the same layout.

    The base's file is linked into the directory, and the chunks that differ become a segment that holds only chunks.
    Returns the number of chunks that differ.
    """
    mine, theirs = (open_checkpoint(item).index.chunks for item in (checkpoint, base))
    home = json.loads((base / "manifest.json").read_bytes())
    name = f"from-{digest(home['id'].encode())}-{OWN}"
    os.link(base / OWN, checkpoint / name)
    differ = mine.digest != theirs.digest
    segment, offset = _places(theirs)
    own = (checkpoint / OWN).read_bytes()
    starts = _places(mine)[1][differ].tolist()
    lengths = mine.stored_lengths()[differ].tolist()
    data = b"".join(own[start : start + length] for start, length in zip(starts, lengths, strict=True))
    data += bytes(-len(data) % BLOCK_BYTES)
    header = _header(len(data))
    (checkpoint / OWN).write_bytes(header + data)
    segment[:], segment[differ] = 1, 0
    offset[differ] = len(header) + np.cumsum([0, *lengths])[:-1]

    def refer(columns: dict[str, np.ndarray]) -> None:
        columns["piece.segment"][:], columns["piece.offset"][:] = 0, 0
        columns["chunk.segment"], columns["chunk.offset"] = segment.astype("<u4"), offset.astype("<u8")

    def list_base(manifest: dict) -> None:
        manifest["critical"] = ["delta"]
        manifest["segments"] = [
            manifest["segments"][0]
            | {"bytes": len(header + data), "header_bytes": len(header), "header_digest": digest(header)},
            home["segments"][0] | {"id": 1, "home": home["id"], "name": name},
        ]

    edit_index(checkpoint, refer)
    edit_manifest(checkpoint, list_base)
    return int(differ.sum())


def _places(chunks: Chunks) -> tuple[np.ndarray, np.ndarray]:
    piece, number = chunks.locate(np.arange(int(chunks.first[-1])))
    segment, offset = chunks.stored_locations(piece, number)
    return segment.copy(), offset.copy()


def _header(data_bytes: int) -> bytes:
    entry = {"dtype": "U8", "shape": [data_bytes], "data_offsets": [0, data_bytes]}
    text = json.dumps({"__metadata__": {"format": "pt", "flowstone": "1"}, "__chunks__": entry}).encode()
    buffer = BLOCK_BYTES - 8
    return buffer.to_bytes(8, "little") + text.ljust(buffer)
