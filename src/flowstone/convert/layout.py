"""The layout of a target: at which offset of which file each tensor is. It is planned before the first byte is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Literal, TypeAlias

import msgspec

from flowstone.convert.source import SourceCheckpoint
from flowstone.table.dtype import DType
from flowstone.table.stored import SourceTensor

Check: TypeAlias = Literal["none", "chunks", "crc32"]
"""The checksums computed while tensors are copied: none, XXH3-64 of each chunk, or a CRC-32 of each extent."""

LAYOUT_VERSION = 1
"""The version of the layout code. An unfinished conversion by another version starts over."""


class Output(msgspec.Struct, frozen=True):
    """A tensor of the target. Its name and dtype may differ from those in the source."""

    name: str
    tensor: SourceTensor
    dtype: DType

    @property
    def bytes(self) -> int:
        return self.tensor.bytes // self.tensor.dtype.item_bytes * self.dtype.item_bytes


class Extent(msgspec.Struct, frozen=True):
    """A range of a target's file. Its content is exactly one of:

    output   a tensor: its position among the target's outputs
    literal  these bytes
    from_checks  bytes computed from the checksums of all earlier extents
    """

    offset: int
    length: int
    output: int | None = None
    literal: bytes | None = None
    from_checks: Callable[[Sequence[int]], bytes] | None = None


class TargetFile(msgspec.Struct, frozen=True):
    """A file to write. `name` is its name in the target, `bytes` its size; `extents` are sorted by offset. Gaps between
    extents are zeros.
    """

    name: str
    bytes: int
    extents: tuple[Extent, ...]


class TargetLayout(msgspec.Struct, frozen=True):
    """All files of a target that contain tensors. `check`: which checksums of the extents the files contain."""

    outputs: tuple[Output, ...]
    files: tuple[TargetFile, ...]
    check: Check = "none"

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def directories(self) -> list[str]:
        """The directories that the files need, relative to the target. Parents come before their children."""
        parents = {str(parent) for file in self.files for parent in PurePosixPath(file.name).parents}
        return sorted(parents - {"."})


def plan_digest(source: SourceCheckpoint, layout: TargetLayout, options: Sequence[object]) -> str:
    """A text that identifies a conversion in its journal. It is equal for the same source files, layout and options."""
    digest = hashlib.blake2b(digest_size=16)

    def add(*facts: object) -> None:
        digest.update(repr(facts).encode(errors="surrogatepass"))

    add(LAYOUT_VERSION, source.kind, layout.check, *options)
    for source_file in source.files:
        add(source_file.path, source_file.bytes, source_file.changed_ns)
    for output in layout.outputs:
        add(output.name, output.dtype.name, output.tensor.name, output.tensor.dtype.name, output.tensor.shape)
        for stored in output.tensor.boxes:
            add(stored.box, stored.file, stored.offset_bytes, stored.strides)
    for file in layout.files:
        add(file.name, file.bytes)
        for extent in file.extents:
            add(extent.offset, extent.length, extent.output)
            digest.update(extent.literal or b"")
    return digest.hexdigest()
