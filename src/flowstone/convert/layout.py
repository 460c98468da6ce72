"""The layout of a target: which bytes lie where in its files, known before the first one moves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Literal, TypeAlias

import msgspec

from flowstone.convert.source import Source
from flowstone.table.dtype import DType
from flowstone.table.stored import SourceTensor

Check: TypeAlias = Literal["none", "chunks", "crc32"]
"""What is computed of the tensors' bytes on their way: nothing, XXH3-64 of each chunk, or a CRC-32 of each extent."""

LAYOUT_VERSION = 1
"""Of the way in which layouts are made: another one begins a conversion anew."""


class Output(msgspec.Struct, frozen=True):
    """A tensor as the target has it: under another name perhaps, and of another dtype."""

    name: str
    tensor: SourceTensor
    dtype: DType

    @property
    def bytes(self) -> int:
        return self.tensor.bytes // self.tensor.dtype.item_bytes * self.dtype.item_bytes


class Extent(msgspec.Struct, frozen=True):
    """A run of bytes of a target's file: bytes that are known, a whole tensor, or what follows from the checks.

    output   position among the outputs
    literal  the bytes
    late     the bytes, made of the checks of all extents before this one
    """

    offset: int
    length: int
    output: int | None = None
    literal: bytes | None = None
    late: Callable[[Sequence[int]], bytes] | None = None


class TargetFile(msgspec.Struct, frozen=True):
    """A file to be written: its name in the draft, its size, its extents by offset. What lies between them is zero."""

    name: str
    bytes: int
    extents: tuple[Extent, ...]


class Layout(msgspec.Struct, frozen=True):
    """All files of a target that hold tensors."""

    outputs: tuple[Output, ...]
    files: tuple[TargetFile, ...]
    check: Check = "none"

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def directories(self) -> list[str]:
        """Those that its files are in, below the target's own; each after the one that it is in."""
        parents = {str(parent) for file in self.files for parent in PurePosixPath(file.name).parents}
        return sorted(parents - {"."})


def plan_digest(source: Source, layout: Layout, options: Sequence[object]) -> str:
    """By which a journal knows whether it belongs to this conversion: same files, same layout, same options."""
    found = hashlib.blake2b(digest_size=16)

    def add(*facts: object) -> None:
        found.update(repr(facts).encode(errors="surrogatepass"))

    add(LAYOUT_VERSION, source.kind, layout.check, *options)
    for one in source.files:
        add(one.path, one.bytes, one.changed_ns)
    for output in layout.outputs:
        add(output.name, output.dtype.name, output.tensor.name, output.tensor.dtype.name, output.tensor.shape)
        for stored in output.tensor.boxes:
            add(stored.box, stored.file, stored.offset_bytes, stored.strides)
    for file in layout.files:
        add(file.name, file.bytes)
        for extent in file.extents:
            add(extent.offset, extent.length, extent.output)
            found.update(extent.literal or b"")
    return found.hexdigest()
