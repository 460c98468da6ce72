"""The library with one step of its order left out or moved."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterable
from types import FunctionType


def mutated(owner: object, name: str, changes: Iterable[tuple[str, str]]) -> FunctionType:
    """Function `name` of `owner`, with each first text of `changes` replaced by the second; each is in it once."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert source.count(old) == 1, f"{name} has no {old!r} any more: bring the mutant up to date"
        source = source.replace(old, new)
    scope: dict[str, FunctionType] = {}
    code = compile(source, f"<mutant of {name}>", "exec", __future__.annotations.compiler_flag)
    exec(code, function.__globals__, scope)
    return scope[name]
