"""XXH3-64 digests of data, and of each of its chunks."""

from __future__ import annotations

from collections.abc import Sequence

from flowstone._native import xxh3_64
from flowstone.config import CHUNK_BYTES
from flowstone.errors import DamagedError

Buffer = bytes | memoryview


def digest(data: Buffer) -> str:
    """XXH3-64, seed 0, of `data`: 16 hexadecimal digits, most significant first."""
    return f"{xxh3_64(data):016x}"


def chunk_digests(data: Buffer) -> tuple[str, ...]:
    """The digest of each chunk (CHUNK_BYTES) of `data`; the last chunk may be shorter. Empty data has no chunks."""
    view = memoryview(data)
    return tuple(digest(view[start : start + CHUNK_BYTES]) for start in range(0, len(view), CHUNK_BYTES))


def check_chunks(data: Buffer, expected: Sequence[str], *, path: str, offset: int = 0) -> None:
    """Raise DamagedError for the first chunk of `data` whose digest is not the expected one. `data` is a part of the
    file `path`, and begins at byte `offset`.
    """
    for number, (actual, recorded) in enumerate(zip(chunk_digests(data), expected, strict=True)):
        if actual != recorded:
            begin = offset + number * CHUNK_BYTES
            raise DamagedError(
                f"{path} is damaged: chunk {begin // CHUNK_BYTES} does not match its digest",
                range=f"bytes {begin}..{min(begin + CHUNK_BYTES, offset + len(data))}",
                expected=recorded, found=actual, next="restore the file from a copy, or load an older step",
            )


_zero_digests_block = bytes(64 * 1024)


def zero_digest(length_bytes: int) -> int:
    """The digest of `length_bytes` zero bytes: the expected digest of padding."""
    import numpy as np  # imported here, since a listing of steps does not need it

    block = _zero_digests_block if length_bytes <= len(_zero_digests_block) else bytes(length_bytes)
    return xxh3_64(np.frombuffer(block, np.uint8)[:length_bytes])
