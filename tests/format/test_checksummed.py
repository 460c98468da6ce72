"""Sealed JSON: the checksum at the end covers all text before it."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone import _native
from flowstone.errors import DamagedError
from flowstone.format.checksummed import CHECKSUM_BYTES, add_checksum, verify_checksum
from flowstone.format.manifest import Marker, decode_marker, encode_marker

TEXT = encode_marker(Marker(flowstone=1, store="ab" * 16, created="2026-01-01T00:00:00+00:00"))


class Note(msgspec.Struct):
    text: str
    number: int


def test_the_last_31_bytes_are_the_seal_that_format_md_describes() -> None:
    body, tail = TEXT[:-31], TEXT[-31:]
    assert CHECKSUM_BYTES == 31
    assert tail == f'"digest": "{_native.xxh3_64(body):016x}"\n}}\n'.encode()
    assert json.loads(TEXT)["flowstone"] == 1


@given(st.text(st.characters(codec="utf-8")), st.integers(0, 2**53))
def test_any_document_is_sealed_and_unsealed(text: str, number: int) -> None:
    data = add_checksum(Note(text, number))
    assert msgspec.json.decode(verify_checksum(data, path="f"), type=Note) == Note(text, number)
    assert set(json.loads(data)) == {"text", "number", "digest"}


@given(st.integers(0, len(TEXT) - 1), st.integers(0, 7))
def test_any_flipped_bit_breaks_the_seal(byte: int, bit: int) -> None:
    data = bytearray(TEXT)
    data[byte] ^= 1 << bit
    with pytest.raises(DamagedError, match=r"f was altered|f is truncated or was altered"):
        decode_marker(bytes(data), path="f")


@given(st.integers(0, len(TEXT) - 1))
def test_any_truncation_breaks_the_seal(kept: int) -> None:
    with pytest.raises(DamagedError, match="f is truncated or was altered: it does not end with its digest"):
        decode_marker(TEXT[:kept], path="f")


@given(st.binary(max_size=100))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_marker(data, path="f")
