"""The encoder of a capture: leaves out or compresses chunks between their capture and the file.

The engine copies a window (a part of the segment) into a block of memory, lets the encoder encode its chunks there,
digests the stored bytes, and writes them (`native/io/write_job.h`). Without an encoder, chunks are stored where the
plan has put them. With an encoder, windows contain complete chunks, and the offset of a window in the segment file is
chosen once the encoded lengths are known. The result says how each chunk is stored (`store.base.EncodedChunks`): its
offset, length and codec; or that it is not stored, as an earlier checkpoint has an equal chunk. A plan puts all chunks
that may be encoded into its last segment, whose header lists no tensors (docs/FORMAT.md, Delta).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import BaseCache, Encoder, delta_encoder, identity_encoder, planes_encoder, quantizing_encoder
from flowstone.format.codec import QUANTIZED_ELEMENTS
from flowstone.plan.write import WritePlan


class BaseChunks(msgspec.Struct, frozen=True, eq=False):
    """The chunks of the earlier checkpoint to which a save may refer (its base), with one entry for each chunk of the
    plan.

    digest  digest of the base's chunk at the same position
    known   whether the base has a chunk there
    codec   codec of the base's chunk, if the digest is that of its stored bytes; 0: the digest is that of its data;
            None: all are 0
    """

    digest: NDArray[np.uint64]
    known: NDArray[np.bool_]
    codec: NDArray[np.uint8] | None = None
    near: NearChunks | None = None


class NearChunks(msgspec.Struct, frozen=True, eq=False):
    """Earlier contents of the plan's chunks, to encode differences to them.

    kept     these contents, in memory
    is_base  for each chunk, whether a file to which the save may refer contains an earlier content of it
    digest   for each chunk, the digest of the data in that file
    """

    kept: BaseCache
    digest: NDArray[np.uint64]
    is_base: NDArray[np.bool_]


def encoder_of(base: BaseChunks | None, plan: WritePlan) -> Encoder:
    """The encoder of a save. It leaves out chunks that equal those of the base, and compresses other chunks, if the
    plan allows that.
    """
    if plan.is_encoded.any():
        chunks = base or BaseChunks(np.zeros(0, np.uint64), np.zeros(0, np.bool_))
        width = plan.per_chunk(plan.width)
        near = None if chunks.near is None else (chunks.near.kept, chunks.near.digest, chunks.near.is_base)
        if not plan.block.any():
            return planes_encoder(width, chunks.digest, chunks.known, chunks.codec, near)
        element = np.array([QUANTIZED_ELEMENTS.get(dtype.name, 0) for dtype in plan.pieces.tensors.dtypes], np.uint8)
        return quantizing_encoder(
            plan.per_chunk(element[plan.pieces.tensor]), plan.per_chunk(plan.block), width,
            chunks.digest, chunks.known, chunks.codec, near,
        )
    if base is not None or plan.derivation.any():
        base = base or BaseChunks(np.zeros(0, np.uint64), np.zeros(0, np.bool_))
        return delta_encoder(base.digest, base.known, base.codec)
    return identity_encoder()
