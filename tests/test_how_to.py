"""What ARCHITECTURE.md says of how to add something names files and symbols that exist, in five lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/ARCHITECTURE.md").read_text()


def steps(what: str) -> list[str]:
    """The numbered lines of the recipe for `what`."""
    _, found, rest = TEXT.partition(f"## How to add {what}\n\n")
    assert found, f"ARCHITECTURE.md does not say how to add {what}"
    return rest.partition("\n\n")[0].splitlines()


@pytest.mark.parametrize("what", ["a codec"])
def test_a_recipe_has_five_lines_that_name_what_exists(what: str) -> None:
    lines = steps(what)
    assert [line[:3] for line in lines] == [f"{number}. " for number in range(1, 6)]
    for line in lines:
        names = re.findall(r"`([^`]+)`", line)
        files = [name for name in names if "/" in name]
        assert files, f"no file is named: {line}"
        missing = [name for name in files if not (ROOT / name).exists()]
        assert not missing, f"{missing} do not exist: {line}"
        source = "".join((ROOT / name).read_text() for name in files if (ROOT / name).is_file())
        unknown = [name for name in names if name not in files and name not in source]
        assert not unknown, f"{unknown} are not in {files}: {line}"
