"""Limits against hostile documents: on memory, time, and the size of error messages."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from typing import TypeAlias

from flowstone.config import OBJECTS_CONTAINERS_MAX

Path: TypeAlias = "str | tuple[Path, object]"
"""The location of a node: a key below another path. It becomes text only in errors: else a long key would be copied
for each item below it.
"""

KEYS = object()  # the last component of a path that means the container's own keys

_STRING_OR_OTHER = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[^"]+', re.DOTALL)
# how many keys of one container may have equal hashes: a dict compares each of these keys with all before it
SAME_HASH_MAX = 1000


def count_containers(text: bytes | bytearray) -> int:
    """How many lists and dicts a JSON text contains. If the text has few brackets, the result is only an upper bound.
    """
    count = text.count(b"{") + text.count(b"[")
    if count <= OBJECTS_CONTAINERS_MAX:
        return count
    count = 0  # too many: count again without the brackets in strings
    for part in _STRING_OR_OTHER.finditer(text):
        begin, end = part.span()
        if text[begin] != ord('"'):
            count += text.count(b"{", begin, end) + text.count(b"[", begin, end)
            if count > OBJECTS_CONTAINERS_MAX:
                break
    return count


def checked_keys(keys: list[object]) -> list[object]:
    """Return `keys`, after a check that a dict lookup never compares thousands of them."""
    if len(keys) > SAME_HASH_MAX and max(Counter(map(hash, keys)).values()) > SAME_HASH_MAX:
        raise ValueError("thousands of keys of a dict or set have the same hash")
    return keys


def dotted_path(path: Path) -> str:
    """A path as text; long keys are shortened."""
    below: list[str] = []
    while isinstance(path, tuple):
        path, key = path
        below.append(" key" if key is KEYS else f".{key if isinstance(key, str) else short_repr(key):.80}")
    return path + "".join(reversed(below))


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 10

    def repr_int(self, x: int, _level: int) -> str:
        # Python refuses to print ints of more than 4,300 digits
        return repr(x) if x.bit_length() < 256 else f"<an int of {x.bit_length()} bits>"


_BRIEF = _Brief()


def short_repr(value: object) -> str:
    """The repr of a value, shortened."""
    return _BRIEF.repr(value)
