"""Writes the pickles that torch's formats need, from a description: nothing that they name has to be importable here.

Protocol 2, as torch.save has it. Numbers, text, bytes, None, truth values, tuples, lists and dicts stand for
themselves.
"""

from __future__ import annotations

import struct

import msgspec


class Name(msgspec.Struct, frozen=True):
    """A class, a function or a constant of a module."""

    module: str
    name: str


class Call(msgspec.Struct, frozen=True):
    """What a function returns for these arguments."""

    function: Name
    arguments: tuple[object, ...] = ()


class Instance(msgspec.Struct, frozen=True, eq=False):
    """A new object of a class, with this state. As a key each is itself alone."""

    kind: Name
    state: object = None


class Persistent(msgspec.Struct, frozen=True):
    """A reference to what lies outside of the pickle."""

    identity: tuple[object, ...]


def write_pickle(value: object) -> bytes:
    """The pickle of a description. Raises TypeError for what it cannot describe: our mistake."""
    parts = [b"\x80\x02"]
    _write(value, parts)
    parts.append(b".")
    return b"".join(parts)


def _write(value: object, parts: list[bytes]) -> None:
    if value is None or isinstance(value, bool):
        parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif isinstance(value, int):
        parts.append(_integer(value))
    elif isinstance(value, float):
        parts.append(b"G" + struct.pack(">d", value))
    elif isinstance(value, str):
        encoded = value.encode("utf-8", "surrogatepass")
        parts.append(b"X" + struct.pack("<I", len(encoded)) + encoded)
    elif isinstance(value, bytes):  # as protocol 2 has them
        _write(Call(Name("_codecs", "encode"), (value.decode("latin1"), "latin1")), parts)
    elif isinstance(value, tuple | list | dict):
        _write_container(value, parts)
    elif isinstance(value, Name):
        parts.append(f"c{value.module}\n{value.name}\n".encode())
    elif isinstance(value, Call):
        _write(value.function, parts)
        _write(value.arguments, parts)
        parts.append(b"R")
    elif isinstance(value, Instance):
        _write(value.kind, parts)
        parts.append(b")\x81")
        if value.state is not None:
            _write(value.state, parts)
            parts.append(b"b")
    elif isinstance(value, Persistent):
        _write(value.identity, parts)
        parts.append(b"Q")
    else:
        raise TypeError(f"nothing is written of a {type(value).__name__}")


def _write_container(value: tuple[object, ...] | list[object] | dict[object, object], parts: list[bytes]) -> None:
    opening, closing = {tuple: (b"(", b"t"), list: (b"](", b"e"), dict: (b"}(", b"u")}[type(value)]
    if isinstance(value, tuple) and not value:
        parts.append(b")")
        return
    parts.append(opening)
    for inner in value.items() if isinstance(value, dict) else ((one,) for one in value):
        for one in inner:
            _write(one, parts)
    parts.append(closing)


def _integer(number: int) -> bytes:
    if -1 << 31 <= number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    encoded = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    if len(encoded) < 256:
        return b"\x8a" + struct.pack("<B", len(encoded)) + encoded
    return b"\x8b" + struct.pack("<I", len(encoded)) + encoded
