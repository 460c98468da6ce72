"""Patterns of tensor names with placeholders: `decoder.layers.{n}.mlp.linear_fc2` names it in each layer.

A placeholder stands for one whole part of a dotted name; beside other characters of a part (`weight{e}`), for a number.
What it stood for in one name is put into others, so that a pattern and another with the same placeholders are a mapping
in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PART, _NUMBER = r"[^.]+", r"0|[1-9][0-9]*"
_COMPILED_MAX = 4096


def placeholders(pattern: str) -> tuple[str, ...]:
    """Their names, in order."""
    return tuple(_PLACEHOLDER.findall(pattern))


def bind(pattern: str, name: str) -> Mapping[str, str] | None:
    """What the placeholders stand for in a name; None if the pattern does not name it."""
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else found.groupdict()


def bind_path(pattern: str, name: str) -> tuple[Mapping[str, str], str] | None:
    """The same for a name that the pattern names, or that is below one; and what follows."""
    found = _compiled(pattern).match(name)
    if found is None or (found.end() < len(name) and name[found.end()] != "."):
        return None
    return found.groupdict(), name[found.end() :]


def fill(pattern: str, bindings: Mapping[str, str]) -> str:
    """The name that a pattern gives to these."""
    return _PLACEHOLDER.sub(lambda found: bindings[found[1]], pattern)


@lru_cache(_COMPILED_MAX)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts, end = [], 0
    for found in _PLACEHOLDER.finditer(pattern):
        begin, stop = found.span()
        is_whole = (begin == 0 or pattern[begin - 1] == ".") and (stop == len(pattern) or pattern[stop] == ".")
        parts += [re.escape(pattern[end:begin]), f"(?P<{found[1]}>{_PART if is_whole else _NUMBER})"]
        end = stop
    return re.compile("".join(parts) + re.escape(pattern[end:]))
