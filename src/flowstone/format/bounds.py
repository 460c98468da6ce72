"""Limits against hostile documents: on memory, time, and the size of error messages."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from typing import TypeAlias

from flowstone.config import OBJECTS_CONTAINERS_MAX

Path: TypeAlias = "str | tuple[Path, object]"
"""The place of a node: a key below another path. Text only in errors: a long key would be copied for each item below.
"""

KEYS = object()  # as the last part of a path: the container's own keys

_STRING_OR_OTHER = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[^"]+', re.DOTALL)
SAME_HASH_MAX = 1000  # keys of one container with equal hashes: a dict compares each with all before it


def containers(text: bytes | bytearray) -> int:
    """How many lists and dicts a JSON text holds; an upper bound, unless that exceeds the limit."""
    count = text.count(b"{") + text.count(b"[")
    if count <= OBJECTS_CONTAINERS_MAX:
        return count
    count = 0  # count again, ignoring brackets in strings
    for part in _STRING_OR_OTHER.finditer(text):
        begin, end = part.span()
        if text[begin] != ord('"'):
            count += text.count(b"{", begin, end) + text.count(b"[", begin, end)
            if count > OBJECTS_CONTAINERS_MAX:
                break
    return count


def hashed(keys: list[object]) -> list[object]:
    """The same keys, after a check that a dict lookup will not compare thousands of them."""
    if len(keys) > SAME_HASH_MAX and max(Counter(map(hash, keys)).values()) > SAME_HASH_MAX:
        raise ValueError("thousands of keys with one hash")
    return keys


def dotted(path: Path) -> str:
    """A path as text; of a long key only the beginning."""
    below: list[str] = []
    while isinstance(path, tuple):
        path, key = path
        below.append(" key" if key is KEYS else f".{key if isinstance(key, str) else brief(key):.80}")
    return path + "".join(reversed(below))


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 10

    def repr_int(self, x: int, _level: int) -> str:
        return repr(x) if x.bit_length() < 256 else f"<an int of {x.bit_length()} bits>"  # Python refuses 4,300 digits


_BRIEF = _Brief()


def brief(value: object) -> str:
    """The repr of a value, shortened."""
    return _BRIEF.repr(value)
