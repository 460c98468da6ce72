"""Patterns of tensor names with placeholders: `decoder.layers.{n}.mlp.linear_fc2` matches this tensor in every layer.

A placeholder matches one component of a dotted name, or, next to other characters (`weight{e}`), a number. The matched
text is inserted into another pattern with the same placeholders, so that two patterns form a mapping in both
directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PART, _NUMBER = r"[^.]+", r"0|[1-9][0-9]*"
_COMPILED_MAX = 4096


def placeholders(pattern: str) -> tuple[str, ...]:
    """The names of the placeholders, in order."""
    return tuple(_PLACEHOLDER.findall(pattern))


def bind(pattern: str, name: str) -> Mapping[str, str] | None:
    """The text that each placeholder matches in a name; None if the pattern does not match it."""
    match = _compiled(pattern).fullmatch(name)
    return None if match is None else match.groupdict()


def bind_path(pattern: str, name: str) -> tuple[Mapping[str, str], str] | None:
    """Like `bind`, but the pattern may match only the first components of the name. Also returns the rest of the name.
    """
    match = _compiled(pattern).match(name)
    if match is None or (match.end() < len(name) and name[match.end()] != "."):
        return None
    return match.groupdict(), name[match.end() :]


def fill(pattern: str, bindings: Mapping[str, str]) -> str:
    """The pattern with each placeholder replaced by its text in `bindings`."""
    return _PLACEHOLDER.sub(lambda match: bindings[match[1]], pattern)


@lru_cache(_COMPILED_MAX)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts, end = [], 0
    for match in _PLACEHOLDER.finditer(pattern):
        begin, stop = match.span()
        is_whole = (begin == 0 or pattern[begin - 1] == ".") and (stop == len(pattern) or pattern[stop] == ".")
        parts += [re.escape(pattern[end:begin]), f"(?P<{match[1]}>{_PART if is_whole else _NUMBER})"]
        end = stop
    return re.compile("".join(parts) + re.escape(pattern[end:]))
