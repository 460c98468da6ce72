"""Codecs are the ways in which the bytes of chunks are stored. See docs/FORMAT.md, Codecs; docs/ARCHITECTURE.md says
how to add one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # manifests name codecs; a listing reads manifests, and should not have to import numpy
    import numpy as np
    from numpy.typing import NDArray

_RAW = 0  # table.chunks.CODEC_RAW


class Codec(msgspec.Struct, frozen=True):
    """A way to store a chunk.

    id    the codec's number in the index column `chunk.codec`. 0 is raw, 1 to 127 are Flowstone's, and higher numbers
          never occur in a checkpoint
    name  the codec's name in messages and in its critical feature (a feature that a reader must know)
    """

    id: int
    name: str

    @property
    def feature(self) -> str | None:
        """The critical feature that a manifest lists if a chunk uses this codec. None if every reader knows the codec.
        """
        return None if self.id == _RAW else f"codec.{self.name}"


RAW = Codec(_RAW, "raw")
PLANES = Codec(1, "planes")
XOR = Codec(2, "xor")
QUANTIZED = Codec(3, "quantized")
CAST = Codec(4, "cast")
CAST_ELEMENTS: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float16": 3})
"""The dtypes that float32 chunks are rounded to, by name, with their numbers in the engine."""
CAST_SOURCES: tuple[int, ...] = (RAW.id, PLANES.id, XOR.id)
"""The codecs of chunks that others are rounded from."""
QUANTIZED_ELEMENTS: Mapping[str, int] = MappingProxyType({"float32": 0, "bfloat16": 1, "float16": 2})
"""The dtypes that can be quantized, by name, with their numbers in the stored form."""
RELATIVE_BOUND, BLOCK_BOUND = 1 / 15, 1 / 220_000
"""Maximum error of a quantized element, relative to the element, and to the largest element of its block."""
CODECS: Mapping[int, Codec] = MappingProxyType({codec.id: codec for codec in (RAW, PLANES, XOR, QUANTIZED, CAST)})
"""All codecs that this version reads and writes, by id."""
FEATURES: frozenset[str] = frozenset(codec.feature for codec in CODECS.values() if codec.feature is not None)
"""The critical features of these codecs."""


def allowed_codecs(critical: Collection[str]) -> frozenset[int]:
    """The ids of the codecs that chunks may have, if the checkpoint's manifest lists these critical features."""
    return frozenset(codec.id for codec in CODECS.values() if codec.feature is None or codec.feature in critical)


def features_of(codecs: NDArray[np.uint8]) -> tuple[str, ...]:
    """The critical features that a manifest must list if chunks have these codecs."""
    used = (codec for number, codec in CODECS.items() if (codecs == number).any())
    return tuple(codec.feature for codec in used if codec.feature is not None)
