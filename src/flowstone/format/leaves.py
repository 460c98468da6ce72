"""Leaves are the values of objects that contain no other values: numbers, text and bytes. Each type has a function that
makes its node and one that reads it. See objects.py.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from typing import TypeAlias, TypeVar, cast

import numpy as np

Node: TypeAlias = "bool | int | float | str | list[Node] | dict[str, Node] | None"
T = TypeVar("T")

INT_MAX = 2**53  # beyond it, JSON readers that store numbers as doubles would round

_SCALAR_NAMES = re.compile(
    r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)"
    r"|(datetime64|timedelta64)(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)


def valid_text(text: str) -> bool:
    """Whether `text` has no lone surrogates, so that it is UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def int_node(value: int) -> Node:
    return value if -INT_MAX <= value <= INT_MAX else {"$int": format(value, "x")}


def float_node(value: float) -> Node:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def text_node(value: str) -> Node:
    return value if valid_text(value) else {"$text": to_base64(value.encode("utf-8", "surrogatepass"))}


def to_base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def scalar_node(value: np.generic) -> Node | None:
    """The node of a numpy scalar; None for a type that is not in the table."""
    if type(value) is np.str_:
        return {"$numpy": "str", "text": text_node(str(value))}
    if type(value) is np.bytes_:
        return {"$numpy": "bytes", "data": to_base64(bytes(value))}
    name = value.dtype.name
    if type(value) is not value.dtype.type or not _SCALAR_NAMES.fullmatch(name):
        return None
    data = value.tobytes()
    return {"$numpy": name, "hex": (data if sys.byteorder == "little" else data[::-1]).hex()}


def expect_type(node: object, kind: type[T]) -> T:
    if type(node) is not kind:
        raise TypeError(f"a value of type {kind.__name__} is needed, not of type {type(node).__name__}")
    return node


def expect_pair(node: object) -> tuple[object, object]:
    key, value = expect_type(node, list)
    return key, value


def expect_three(parts: list[object]) -> list[object]:
    if len(parts) != 3:
        raise ValueError(f"a list of three items is needed, not of {len(parts)}")
    return parts


def from_base64(node: object) -> bytes:
    return base64.b64decode(expect_type(node, str), validate=True)


def from_hex(node: object, length_bytes: int) -> bytes:
    text = expect_type(node, str)
    if not re.fullmatch("[0-9a-f]*", text) or len(text) != 2 * length_bytes:
        raise ValueError(f"{2 * length_bytes} hexadecimal digits are needed")
    return bytes.fromhex(text)


def read_int(node: object) -> int:
    text = expect_type(node, str)
    if not re.fullmatch("-?[1-9a-f][0-9a-f]*", text):
        raise ValueError("an integer is stored as hexadecimal digits without leading zeros")
    return int(text, 16)


def read_float(node: object) -> float:
    return cast("float", struct.unpack(">d", from_hex(node, 8))[0])


def read_scalar(name: str, data: object) -> np.generic:
    if not _SCALAR_NAMES.fullmatch(name):
        raise ValueError(f"the dtype {name!r:.40} is unknown")
    dtype = np.dtype(name)
    raw = from_hex(data, dtype.itemsize)
    if name == "bool" and raw not in (b"\0", b"\1"):
        raise ValueError("a bool is stored as 00 or 01")
    return cast("np.generic", np.frombuffer(raw if sys.byteorder == "little" else raw[::-1], dtype)[0])
