"""Codecs: how the bytes of chunks are stored. See docs/FORMAT.md, Codecs.

How to add one is in docs/ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from flowstone.table.chunks import CODEC_RAW


class Codec(msgspec.Struct, frozen=True):
    """A way to store a chunk.

    id    in the index, `chunk.codec`: 0 is raw, 1 to 127 are Flowstone's, the others are never in a checkpoint
    name  in messages, and in the critical feature that announces it
    """

    id: int
    name: str

    @property
    def feature(self) -> str | None:
        """What a manifest lists as critical where a chunk is stored so; None: every reader knows it."""
        return None if self.id == CODEC_RAW else f"codec.{self.name}"


RAW = Codec(CODEC_RAW, "raw")
CODECS: Mapping[int, Codec] = MappingProxyType({codec.id: codec for codec in (RAW,)})
"""By id, all that this version reads and writes."""
