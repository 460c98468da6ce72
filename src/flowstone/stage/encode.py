"""The encoder of a capture: what is done to a chunk between its capture and the file.

The engine captures a window into a block, lets the encoder encode its chunks there, digests the stored bytes, and
submits them (`native/write_job.h`). The encoder is called once per window. Identity is never called: chunks stay where
the plan has put them. With any other encoder, windows hold whole chunks, and the place of a window in the segment is
assigned once the encoded lengths are known. The receipt then says how each chunk is stored (`store.base.Encoded`): its
place, length and codec; or not at all, if the base's chunk has equal bytes. An encoder is for the last segment of a
plan alone, which holds chunks and no tensors (docs/FORMAT.md, Delta).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.format.codec import RAW, Codec


class BaseChunks(msgspec.Struct, frozen=True, eq=False):
    """The chunks of the base, by the number of a plan's chunk: the digest, and whether there is one."""

    digest: NDArray[np.uint64]
    known: NDArray[np.bool_]


def delta_encoder(base: BaseChunks) -> _native.Encoder:
    """The encoder that stores unencoded what the base does not have."""
    return _native.delta_encoder(base.digest, base.known)


_ENCODERS: Mapping[Codec, Callable[[], _native.Encoder]] = MappingProxyType({RAW: _native.identity_encoder})


def encoder_of(codec: Codec = RAW) -> _native.Encoder:
    """The encoder that stores chunks with `codec`."""
    return _ENCODERS[codec]()
