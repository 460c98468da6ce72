"""Read rules from TOML or JSON files. Each rule is a table, with the same field names as in Python."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from flowstone.config import MIB
from flowstone.errors import ArgumentError
from flowstone.layouts.layout_rules import ConversionRule, RuleSet
from flowstone.rules.load_rules import Rename
from flowstone.store.os_errors import translated
from flowstone.stores.arguments import store_path

_FILE_BYTES_MAX = 16 * MIB
_KINDS: Mapping[str, Any] = {kind.__name__.lower(): kind for kind in get_args(ConversionRule)}


def read_rules(path: str | Path) -> RuleSet:
    """The rules in a file. They match names below a section.

    raises  ArgumentError  a rule is invalid; the error names it
            StorageError
    """
    place = store_path(path)
    with translated(place.parent, "read", place.name):
        if place.stat().st_size > _FILE_BYTES_MAX:
            raise ArgumentError(
                f"{place} is too large for a file of rules", expected=f"at most {_FILE_BYTES_MAX} bytes",
                next="give the path of a file of rules",
            )
        content = place.read_bytes()
    try:
        text = content.decode()
        document = json.loads(text) if place.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{place} is not a file of rules: {error!s:.200}", next="write TOML, or JSON in a file named *.json"
        ) from error
    has_rules = isinstance(document, dict) and isinstance(document.get("rules"), list)
    if not has_rules or set(document) - {"rules", "complete"}:
        raise ArgumentError(
            f"{place} has no list of rules", expected="[[rules]] tables, and optionally complete = true",
            next='begin with [[rules]] and kind = "rename"',
        )
    complete = _flag(document, "complete", str(place), default=False)
    rules, optional = [], []
    for number, table in enumerate(document["rules"], 1):
        rule, required = _rule(table, f"{place}: rule {number}")
        rules.append(rule)
        if isinstance(rule, Rename) and not required:
            optional.append(rule.source)
    return RuleSet(tuple(rules), str(place), tuple(optional), complete=complete)


def _rule(table: Any, where: str) -> tuple[ConversionRule, bool]:
    """A rule from a table of the file, and whether the rule must match a name."""
    given = {name: _frozen(value) for name, value in table.items()} if isinstance(table, dict) else {}
    kind = _KINDS.get(str(given.pop("kind", None)))
    if kind is None:
        raise ArgumentError(
            f"{where} has no `kind`, or an unknown one", expected=", ".join(_KINDS), next='write kind = "rename"'
        )
    field_names = [field.name for field in fields(kind)]
    required = True
    if kind is Rename:  # Rename itself has no such field; a RuleSet lists its optional Renames
        required = _flag(given, "required", where, default=True)
        given.pop("required", None)
    unknown = [name for name in given if name not in field_names]
    if unknown:
        raise ArgumentError(
            f"{where} has the unknown field {unknown[0]!r:.40}", expected=", ".join(field_names),
            next="remove the field, or correct its name",
        )
    try:
        rule: ConversionRule = kind(**given)
        return rule, required
    except TypeError as error:
        raise ArgumentError(
            f"{where} lacks a field, or a field has the wrong type: {error!s:.100}",
            expected=", ".join(field_names), next="correct the fields of this rule",
        ) from error
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error.message}", **error.facts) from error


def _frozen(value: Any) -> Any:
    """Replace lists by tuples, as rules contain tuples."""
    return tuple(value) if isinstance(value, list) else value


def _flag(table: Mapping[str, Any], name: str, where: str, *, default: bool) -> bool:
    value = table.get(name, default)
    if not isinstance(value, bool):
        raise ArgumentError(f"{where}: {name} must be true or false, not {value!r:.40}", next="write true or false")
    return value


__all__ = ["read_rules"]
