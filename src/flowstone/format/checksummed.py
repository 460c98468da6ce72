"""Checksummed JSON: a document whose last field is the digest of all bytes before it.

The digest is checked before anything in the document is used, so the parser never sees a truncated or altered
file.
"""

from __future__ import annotations

import msgspec

from flowstone.errors import DamagedError
from flowstone.format.digest import digest

_OPEN = b'"digest": "'
_CLOSE = b'"\n}\n'
CHECKSUM_BYTES = len(_OPEN) + 16 + len(_CLOSE)


def add_checksum(document: msgspec.Struct) -> bytes:
    """Return `document`, which has at least one field, as indented JSON with one more field at the end, the digest."""
    text = msgspec.json.format(msgspec.json.encode(document), indent=2)
    body = text[:-2] + b",\n  "  # the text without its last newline and brace
    return body + _OPEN + digest(body).encode() + _CLOSE


def verify_checksum(data: bytes, *, path: str) -> bytes:
    """Check the digest of a document. Returns its bytes, including the digest, for a JSON parser."""
    body, tail = memoryview(data)[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if not (tail.startswith(_OPEN) and tail.endswith(_CLOSE)):
        raise DamagedError(
            f"{path} is truncated or was altered: it does not end with its digest",
            found=f"{len(data)} bytes", next="restore the file from a copy, or use an older step",
        )
    actual, expected = digest(body), tail[len(_OPEN) : -len(_CLOSE)].decode("ascii", "replace")
    if actual != expected:
        raise DamagedError(
            f"{path} was altered: its bytes do not match the digest at its end",
            expected=expected, found=actual, next="restore the file from a copy, or use an older step",
        )
    return data
