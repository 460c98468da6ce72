"""Columns in docstrings become tables: `name  meaning` lines, whose continuations are indented."""

from __future__ import annotations

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # the tests of what is below need no griffe
    Extension = object

_ROW = re.compile(r"(?P<name>[A-Za-z_*][^\s]*(?: [^\s]+){0,3}?)(?<![.:;]) {2,}(?P<text>\S.*)")
_INNER = re.compile(r"\s+(?P<name>[A-Z]\w+)(?: {2,})(?P<text>\S.*)")


class ColumnsToTables(Extension):  # type: ignore[misc]
    """Rewrites the docstring of each object before it is rendered."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = tables(obj.docstring.value)


def tables(docstring: str) -> str:
    """The docstring as Markdown: each run of columns is a table with a heading row that is empty."""
    out: list[str] = []
    rows: list[list[str]] = []

    def end() -> None:
        if rows:
            out.extend(["", "| | |", "|---|---|", *(f"| {named(name)} | {cell(text)} |" for name, text in rows), ""])
            rows.clear()

    lines = docstring.splitlines()
    for index, line in enumerate(lines):
        row, inner = _ROW.fullmatch(line), _INNER.fullmatch(line)
        begins = index == 0 or not lines[index - 1].strip() or bool(rows)
        if row and begins:
            text = row["text"]
            nested = re.fullmatch(r"([A-Z]\w+) {2,}(\S.*)", text)
            rows.append([f"{row['name']} {nested[1]}", nested[2]] if nested else [row["name"], text])
        elif rows and inner and rows[-1][0].split()[0] == "raises":
            rows.append([f"raises {inner['name']}", inner["text"]])
        elif rows and line.startswith("  "):
            rows[-1][1] += " " + line.strip()
        else:
            end()
            out.append(line)
    end()
    return "\n".join(out).strip("\n")


def named(name: str) -> str:
    """The first column: a name in the code, or `raises` with the error."""
    if name.split()[0] in ("raises", "returns"):
        return " ".join([name.split()[0], *(f"`{word.rstrip(',')}`" for word in name.split()[1:])])
    return f"`{name}`"


def cell(text: str) -> str:
    """Text in which no bar ends the cell."""
    return text.replace("|", "\\|")
