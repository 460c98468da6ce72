"""`make test-integrations` runs every test here: a package that is missing is an error there, and no reason to skip."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from jobs import is_installed

sys.path.append(str(Path(__file__).resolve().parent.parent / "state"))  # which has the matrix of resumes
PROJECT = Path(__file__).resolve().parent.parent.parent / "pyproject.toml"


def pytest_configure() -> None:
    asked = os.environ.get("FLOWSTONE_INTEGRATIONS", "")
    if asked not in ("", "all"):
        raise pytest.UsageError(f"FLOWSTONE_INTEGRATIONS={asked} is not known: set it to `all`, or leave it out")
    if not asked:
        return
    groups = tomllib.loads(PROJECT.read_text())["dependency-groups"]
    entries = [*groups["integrations"], *groups["integrations-alone"]]
    missing = [name for name in (re.split(r"[=<>\[]", entry)[0] for entry in entries) if not is_installed(name)]
    if missing:
        raise pytest.UsageError(f"not installed: {', '.join(missing)}; `make test-integrations` installs them")
