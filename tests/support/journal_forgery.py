"""Frames of journals that are changed after they were written, with matching digests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from flowstone import _native
from flowstone.journal.journal_format import PREFIX_BYTES, decode_prefix

Forge = Callable[[dict[str, Any]], object]


def forge(path: Path, number: int, change: Forge) -> None:
    """Change the document of a frame, and make its digests match."""
    content, at = bytearray(path.read_bytes()), 0
    for _ in range(number):
        frame = decode_prefix(bytes(content[at : at + PREFIX_BYTES]))
        assert frame is not None
        at += frame.frame_bytes
    frame = decode_prefix(bytes(content[at : at + PREFIX_BYTES]))
    assert frame is not None
    row = msgspec.json.decode(content[at + PREFIX_BYTES : at + PREFIX_BYTES + frame.document_bytes])
    change(row)
    text = msgspec.json.encode(row)
    assert PREFIX_BYTES + len(text) <= frame.payload_offset, "it still fits before the payload"
    content[at + PREFIX_BYTES : at + frame.payload_offset] = text.ljust(frame.payload_offset - PREFIX_BYTES, b"\0")
    content[at + 40 : at + 48] = len(text).to_bytes(8, "little")
    content[at + 56 : at + 64] = _native.xxh3_64(text).to_bytes(8, "little")
    content[at + 64 : at + 72] = _native.xxh3_64(bytes(content[at : at + 64])).to_bytes(8, "little")
    path.write_bytes(content)
    assert decode_prefix(bytes(content[at : at + PREFIX_BYTES])) is not None, "the forgery is read"


def forge_tensor(path: Path, number: int, which: int, change: Callable[[bytes], bytes]) -> None:
    """Replace the bytes of a frame's tensor by as many others, and make its digests match."""
    content, position = bytearray(path.read_bytes()), 0
    for _ in range(number):
        frame = decode_prefix(bytes(content[position : position + PREFIX_BYTES]))
        assert frame is not None
        position += frame.frame_bytes
    frame = decode_prefix(bytes(content[position : position + PREFIX_BYTES]))
    assert frame is not None
    row = msgspec.json.decode(content[position + PREFIX_BYTES : position + PREFIX_BYTES + frame.document_bytes])
    tensor = row["tensors"][which]
    begin = position + frame.payload_offset + tensor["offset"]
    made = change(bytes(content[begin : begin + tensor["bytes"]]))
    assert len(made) == tensor["bytes"]
    content[begin : begin + len(made)] = made
    path.write_bytes(content)
    forge(path, number, lambda row: row["tensors"][which].update(digest=f"{_native.xxh3_64(made):016x}"))
