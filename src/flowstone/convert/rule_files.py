"""Rules from files: TOML or JSON, one table for each rule, by the names of the fields that it has in Python."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from flowstone.arguments import store_path
from flowstone.config import MIB
from flowstone.errors import ArgumentError
from flowstone.layout_rules import KINDS, ConversionRule, RuleSet
from flowstone.rules import Rename
from flowstone.store.os_errors import translated

_FILE_BYTES_MAX = 16 * MIB
_KINDS: Mapping[str, Any] = {kind.__name__.lower(): kind for kind in KINDS}


def read_rules(path: str | Path) -> RuleSet:
    """The rules of a file, which speak of the names below a section.

    raises  ArgumentError naming the rule that says nothing sensible; StorageError
    """
    place = store_path(path)
    with translated(place.parent, "read", place.name):
        if place.stat().st_size > _FILE_BYTES_MAX:
            raise ArgumentError(
                f"{place} is too long for rules", expected=f"at most {_FILE_BYTES_MAX} bytes", next="check the path"
            )
        content = place.read_bytes()
    try:
        text = content.decode()
        found = json.loads(text) if place.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{place} cannot be read as rules: {error!s:.200}", next="write TOML, or JSON in a file called *.json"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("rules"), list) or set(found) - {"rules", "complete"}:
        raise ArgumentError(
            f"{place} has no list of rules", expected="[[rules]] tables, and perhaps complete = true",
            next='begin with [[rules]] and kind = "rename"',
        )
    complete = _flag(found, "complete", str(place), default=False)
    rules, optional = [], []
    for number, table in enumerate(found["rules"], 1):
        rule, required = _rule(table, f"{place}: rule {number}")
        rules.append(rule)
        if isinstance(rule, Rename) and not required:
            optional.append(rule.source)
    return RuleSet(tuple(rules), str(place), tuple(optional), complete=complete)


def _rule(table: Any, where: str) -> tuple[ConversionRule, bool]:
    """A rule, and whether it is an error if it names nothing."""
    given = {name: _frozen(value) for name, value in table.items()} if isinstance(table, dict) else {}
    kind = _KINDS.get(str(given.pop("kind", None)))
    if kind is None:
        raise ArgumentError(f"{where} is of no known kind", expected=", ".join(_KINDS), next='write kind = "rename"')
    known = [field.name for field in fields(kind)]
    required = True
    if kind is Rename:  # which has no such field: a set of rules says it
        required = _flag(given, "required", where, default=True)
        given.pop("required", None)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ArgumentError(f"{where} has no field {unknown[0]!r:.40}", expected=", ".join(known), next="correct it")
    try:
        rule: ConversionRule = kind(**given)
        return rule, required
    except TypeError as error:
        raise ArgumentError(
            f"{where} lacks a field, or one is of another type: {error!s:.100}", expected=", ".join(known),
            next="correct it",
        ) from error
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error.message}", **error.facts) from error


def _frozen(value: Any) -> Any:
    """A field's value as rules have it, whose lists are tuples."""
    return tuple(value) if isinstance(value, list) else value


def _flag(table: Mapping[str, Any], name: str, where: str, *, default: bool) -> bool:
    value = table.get(name, default)
    if not isinstance(value, bool):
        raise ArgumentError(f"{where}: {name} {value!r:.40} is not true or false", next="write one of them")
    return value


__all__ = ["read_rules"]
