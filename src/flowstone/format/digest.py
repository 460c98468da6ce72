"""XXH3-64 digests, whole and per chunk."""

from __future__ import annotations

from collections.abc import Sequence

from flowstone import _native
from flowstone.config import CHUNK_BYTES
from flowstone.errors import DamagedError

Buffer = bytes | memoryview


def digest(data: Buffer) -> str:
    """XXH3-64, seed 0, of `data`: 16 hexadecimal digits, most significant first."""
    return f"{_native.xxh3_64(data):016x}"


def chunk_digests(data: Buffer) -> tuple[str, ...]:
    """One digest for each run of CHUNK_BYTES of `data`, the last run may be shorter; none if empty."""
    view = memoryview(data)
    return tuple(digest(view[start : start + CHUNK_BYTES]) for start in range(0, len(view), CHUNK_BYTES))


def check_chunks(data: Buffer, expected: Sequence[str], *, path: str, offset: int = 0) -> None:
    """Raise DamagedError naming the first chunk that differs. `data` is the content of `path` from `offset` on."""
    for number, (found, wanted) in enumerate(zip(chunk_digests(data), expected, strict=True)):
        if found != wanted:
            begin = offset + number * CHUNK_BYTES
            raise DamagedError(
                f"{path} is damaged: chunk {begin // CHUNK_BYTES} differs from what was written",
                range=f"bytes {begin}..{min(begin + CHUNK_BYTES, offset + len(data))}",
                expected=wanted, found=found, next="restore the file from a copy, or load an older step",
            )


_zero_digests_block = bytes(64 * 1024)


def zero_digest(length_bytes: int) -> int:
    """The digest of `length_bytes` zero bytes: the expected digest of padding."""
    import numpy as np  # imported here: a listing does not need it

    block = _zero_digests_block if length_bytes <= len(_zero_digests_block) else bytes(length_bytes)
    return _native.xxh3_64(np.frombuffer(block, np.uint8)[:length_bytes])
