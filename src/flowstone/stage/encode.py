"""The encoder of a capture: what is done to a chunk between its capture and the file.

The engine captures a window into a block, lets the encoder encode its chunks there, digests the stored bytes, and
submits them (`native/write_job.h`). Identity is never called: chunks stay where the plan has put
them. With any other encoder, windows hold whole chunks, and the place of a window in the segment is assigned once the
encoded lengths are known. The receipt then says how each chunk is stored (`store.base.Encoded`): its
place, length and codec; or not at all, if the base's chunk has equal bytes. An encoder is for the last segment of a
plan alone, which holds chunks and no tensors (docs/FORMAT.md, Delta).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native


class BaseChunks(msgspec.Struct, frozen=True, eq=False):
    """The chunks of the base, by the number of a plan's chunk: the digest, and whether there is one.

    codec  of the base's chunk, if the digest is of its stored bytes; 0: it is of the captured ones. None: all are
    """

    digest: NDArray[np.uint64]
    known: NDArray[np.bool_]
    codec: NDArray[np.uint8] | None = None


def encoder_of(base: BaseChunks | None, width: NDArray[np.uint8]) -> _native.Encoder:
    """The encoder that leaves out what the base has, and codes the chunks that have a width where that pays.

    width  for each chunk of the plan: see WritePlan.width
    """
    if width.any():
        found = base or BaseChunks(np.zeros(0, np.uint64), np.zeros(0, np.bool_))
        return _native.planes_encoder(width, found.digest, found.known, found.codec)
    if base is not None:
        return _native.delta_encoder(base.digest, base.known, base.codec)
    return _native.identity_encoder()
