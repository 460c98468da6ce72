"""docs/ARCHITECTURE.md matches the source: its figures' arrows are functions, and its table has every folder."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "flowstone"
TEXT = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
ARROW = re.compile(r"^(\w+) +--([\w.]+)--> +(\w+)", re.MULTILINE)


def figure(title: str) -> list[tuple[str, str, str]]:
    """What goes into each arrow, the arrow, and what comes out of it."""
    section = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    result = ARROW.findall(section)
    assert len(result) > 4, f"no figure below {title!r}"
    return result


def resolved(dotted: str) -> object:
    """A function of the package, by its path below it."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            result: object = import_module(".".join(["flowstone", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            result = getattr(result, name)
        return result
    raise AssertionError(f"there is no {dotted}")


@pytest.mark.parametrize(("title", "module"), [("A save", "save"), ("A load", "load")])
def test_the_arrows_of_a_figure_are_functions_that_give_what_it_says(title: str, module: str) -> None:
    order = (PACKAGE / module / "conductor.py").read_text()
    for _, arrow, result in figure(title):
        function = resolved(arrow)
        assert inspect.isfunction(function), arrow
        assert result in str(inspect.signature(function).return_annotation), f"{arrow} does not give a {result}"
        assert re.search(rf"\b{function.__name__}\(", order), f"{module}/conductor.py does not call {arrow}"


@pytest.mark.parametrize("title", ["A save", "A load"])
def test_each_arrow_begins_where_another_one_ends(title: str) -> None:
    begun = {figure(title)[0][0]}
    for source, arrow, result in figure(title):
        assert source in begun, f"{arrow} begins at {source}, which nothing gave"
        begun.add(result)


def test_the_table_of_folders_has_every_folder() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(re.findall(r"^\| `(\w+)/`", TEXT, flags=re.MULTILINE))


@pytest.mark.parametrize("kind", ["a kind", "an option", "a store", "a codec", "a verb"])
def test_how_to_add_something_is_five_lines_that_name_files_which_exist(kind: str) -> None:
    section = TEXT.split(f"## How to add {kind}\n")[1].split("\n## ")[0]
    assert re.findall(r"^(\d)\. ", section, flags=re.MULTILINE) == list("12345")
    paths = re.findall(r"`((?:\w+/)+\w+\.(?:py|h|cpp|md))`", section)
    assert paths, "it names no file"
    for path in paths:
        assert any((root / path).exists() for root in (ROOT, PACKAGE)), path


def test_each_line_about_codecs_names_files_and_what_is_in_them() -> None:
    lines = re.findall(r"^\d\. .*", TEXT.split("## How to add a codec\n")[1].split("\n## ")[0], flags=re.MULTILINE)
    for line in lines:
        names = re.findall(r"`([^`]+)`", line)
        files = [name for name in names if "/" in name]
        source = "".join((ROOT / name).read_text() for name in files)
        assert files, line
        assert all(name in source for name in names if name not in files), line


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|h|cpp|md))`", TEXT):
        assert any((root / path).exists() for root in (ROOT, PACKAGE)), path
