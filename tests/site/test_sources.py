"""The sources of the documentation site: checks that need no environment of `make docs`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import flowstone as fs

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
GENERATED = {"index.md", "CHANGELOG.md", "reference/command-line.md"}
DOCUMENTS = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "tools" / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_every_document_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    entries = re.findall(r"([\w./-]+\.md)$", text, flags=re.MULTILINE)
    assert sorted(entries) == sorted({*DOCUMENTS, *GENERATED})


def test_every_public_name_is_in_the_reference_once() -> None:
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    listed = re.findall(r"^::: flowstone\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(set(fs.__all__) - {"__version__"})


@pytest.mark.parametrize("name", DOCUMENTS)
def test_lists_and_tables_begin_after_an_empty_line(name: str) -> None:
    """Markdown of the site's kind takes them for a part of the paragraph otherwise."""
    fenced, before = False, ""
    for number, line in enumerate((DOCS / name).read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced and before and line.startswith(("- ", "| ", "1. ")):
            assert before.startswith(("- ", "  ", "|")), f"{name}:{number}"
        before = line


def test_columns_of_a_docstring_become_a_table() -> None:
    docstring = loaded("docstrings").tables(
        "Copy it.\n\npath   a directory;\n       or a store\nkeep   an int | None\n\nMore.\n\n"
        "raises  ArgumentError  a wrong value\n        FullError      no space\n"
    )
    assert docstring == (
        "Copy it.\n\n\n| | |\n|---|---|\n| `path` | a directory; or a store |\n| `keep` | an int \\| None |\n\n\n"
        "More.\n\n\n"
        "| | |\n|---|---|\n| raises `ArgumentError` | a wrong value |\n| raises `FullError` | no space |"
    )


def test_prose_and_samples_in_a_docstring_stay_as_they_are() -> None:
    prose = "One sentence.  Two blanks in prose\ngo on here.\n\n    code  with  columns\n\nThe end."
    assert loaded("docstrings").tables(prose) == prose
