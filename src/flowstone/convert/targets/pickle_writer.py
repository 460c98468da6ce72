"""Writes the pickles of torch's formats from a description, so that the classes they name do not have to be installed.

Uses protocol 2, like torch.save. In a description, numbers, strings, bytes, None, booleans, tuples, lists and dicts
stand for themselves.
"""

from __future__ import annotations

import struct

import msgspec


class Name(msgspec.Struct, frozen=True):
    """A class, a function or a constant of a module."""

    module: str
    name: str


class PickledCall(msgspec.Struct, frozen=True):
    """A call of a function with these arguments."""

    function: Name
    arguments: tuple[object, ...] = ()


class Instance(msgspec.Struct, frozen=True, eq=False):
    """A new object of the class `kind` with this state. Each Instance describes an object of its own, even if two
    Instances have equal fields.
    """

    kind: Name
    state: object = None


class Persistent(msgspec.Struct, frozen=True):
    """A reference to data outside of the pickle, by its persistent id."""

    identity: tuple[object, ...]


def write_pickle(value: object) -> bytes:
    """The pickle that a description stands for. Raises TypeError for an unknown type, which is a bug."""
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
    elif isinstance(value, bytes):  # protocol 2 has no bytes, so they are written as latin-1 text
        _write(PickledCall(Name("_codecs", "encode"), (value.decode("latin1"), "latin1")), parts)
    elif isinstance(value, tuple | list | dict):
        _write_container(value, parts)
    elif isinstance(value, Name):
        parts.append(f"c{value.module}\n{value.name}\n".encode())
    elif isinstance(value, PickledCall):
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
        raise TypeError(f"cannot write a value of type {type(value).__name__} into a torch.save file")


def _write_container(value: tuple[object, ...] | list[object] | dict[object, object], parts: list[bytes]) -> None:
    opening, closing = {tuple: (b"(", b"t"), list: (b"](", b"e"), dict: (b"}(", b"u")}[type(value)]
    if isinstance(value, tuple) and not value:
        parts.append(b")")
        return
    parts.append(opening)
    for inner in value.items() if isinstance(value, dict) else ((entry,) for entry in value):
        for item in inner:
            _write(item, parts)
    parts.append(closing)


def _integer(number: int) -> bytes:
    if -1 << 31 <= number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    encoded = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    if len(encoded) < 256:
        return b"\x8a" + struct.pack("<B", len(encoded)) + encoded
    return b"\x8b" + struct.pack("<I", len(encoded)) + encoded
