"""Codecs: how the bytes of chunks are stored. See docs/FORMAT.md, Codecs; docs/ARCHITECTURE.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from flowstone.table.chunks import CODEC_RAW


class Codec(msgspec.Struct, frozen=True):
    """A way to store a chunk.

    id    in the index, `chunk.codec`: 0 is raw, 1 to 127 are Flowstone's, higher ones never occur in a checkpoint
    name  in messages, and in the critical feature that announces it
    """

    id: int
    name: str

    @property
    def feature(self) -> str | None:
        """The critical feature that a manifest lists if a chunk uses this codec; None: every reader knows the codec."""
        return None if self.id == CODEC_RAW else f"codec.{self.name}"


RAW = Codec(CODEC_RAW, "raw")
CODECS: Mapping[int, Codec] = MappingProxyType({codec.id: codec for codec in (RAW,)})
"""All codecs that this version reads and writes, by id."""
