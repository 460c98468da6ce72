"""What a hostile document may not cost: memory, time, or an error of another kind while one is being told."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from typing import TypeAlias

from flowstone.config import OBJECTS_CONTAINERS_MAX

Path: TypeAlias = "str | tuple[Path, object]"
"""Where a node is: a key below another path. As text only in errors: a long key would be copied for each item below."""

KEYS = object()  # below a path: its own keys

_STRING_OR_OTHER = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[^"]+', re.DOTALL)
_SAME_HASH_MAX = 1000  # keys of one container: a dict compares each with those before it


def containers(text: bytes | bytearray) -> int:
    """How many lists and dicts a JSON text holds; more, as long as they are no more than there may be."""
    count = text.count(b"{") + text.count(b"[")
    if count <= OBJECTS_CONTAINERS_MAX:
        return count
    count = 0  # once more, without the brackets in strings
    for part in _STRING_OR_OTHER.finditer(text):
        begin, end = part.span()
        if text[begin] != ord('"'):
            count += text.count(b"{", begin, end) + text.count(b"[", begin, end)
            if count > OBJECTS_CONTAINERS_MAX:
                break
    return count


def hashed(keys: list[object]) -> list[object]:
    """The same keys, once it is known that to look one up does not mean to go through thousands."""
    if len(keys) > _SAME_HASH_MAX and max(Counter(map(hash, keys)).values()) > _SAME_HASH_MAX:
        raise ValueError("thousands of keys with one hash")
    return keys


def dotted(path: Path) -> str:
    """A path in words; of a long key, the beginning."""
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
    """What Python shows of a value, or the beginning of it."""
    return _BRIEF.repr(value)
