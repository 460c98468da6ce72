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
from flowstone.format.codec import QUANTIZED_ELEMENTS
from flowstone.plan.write import WritePlan


class BaseChunks(msgspec.Struct, frozen=True, eq=False):
    """The chunks of the base, by the number of a plan's chunk: the digest, and whether there is one.

    codec  of the base's chunk, if the digest is of its stored bytes; 0: it is of the captured ones. None: all are
    """

    digest: NDArray[np.uint64]
    known: NDArray[np.bool_]
    codec: NDArray[np.uint8] | None = None
    near: NearChunks | None = None


class NearChunks(msgspec.Struct, frozen=True, eq=False):
    """What chunks were, by the number of a plan's chunk; and which of these bytes lie in a file of the draft.

    kept     these bytes, in memory
    digest   of the data that lies there
    is_base  whether any does
    """

    kept: _native.KeptChunks
    digest: NDArray[np.uint64]
    is_base: NDArray[np.bool_]


def encoder_of(base: BaseChunks | None, plan: WritePlan) -> _native.Encoder:
    """The encoder that leaves out what the base has, and codes the chunks of a plan that may be where that pays."""
    if plan.coded.any():
        found = base or BaseChunks(np.zeros(0, np.uint64), np.zeros(0, np.bool_))
        width = plan.of_chunks(plan.width)
        near = None if found.near is None else (found.near.kept, found.near.digest, found.near.is_base)
        if not plan.block.any():
            return _native.planes_encoder(width, found.digest, found.known, found.codec, near)
        element = np.array([QUANTIZED_ELEMENTS.get(dtype.name, 0) for dtype in plan.pieces.tensors.dtypes], np.uint8)
        return _native.quantizing_encoder(
            plan.of_chunks(element[plan.pieces.tensor]), plan.of_chunks(plan.block), width,
            found.digest, found.known, found.codec, near,
        )
    if base is not None or plan.derivation.any():
        base = base or BaseChunks(np.zeros(0, np.uint64), np.zeros(0, np.bool_))
        return _native.delta_encoder(base.digest, base.known, base.codec)
    return _native.identity_encoder()
