"""Which encoder a capture uses: what becomes of a chunk between its capture and the file.

The engine captures a window into a block, has the encoder encode its chunks there, digests what is stored, and submits
it (`native/write_job.h`). The encoder is asked once for each window. Identity, the only one that is offered, is never
asked: chunks stay where the plan has put them. With any other one a window holds whole chunks, its place in the segment
is assigned once their lengths are known, and the receipt says how each chunk is stored (`store.base.Encoded`): where,
how long, by which codec, or not at all, as the base's chunk has the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from flowstone import _native
from flowstone.format.codec import RAW, Codec

_ENCODERS: Mapping[Codec, Callable[[], _native.Encoder]] = MappingProxyType({RAW: _native.identity_encoder})


def encoder_of(codec: Codec = RAW) -> _native.Encoder:
    """The encoder that stores chunks by `codec`."""
    return _ENCODERS[codec]()
