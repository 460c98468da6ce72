"""The package's metadata for an index, an installer and a type checker; nothing is built for it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]


def test_every_place_names_the_same_oldest_python() -> None:
    oldest = re.fullmatch(r">=(3\.\d+)", PROJECT["requires-python"])
    assert oldest
    listed = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.MULTILINE)
    assert listed[0] == oldest[1]
    assert SETTINGS["tool"]["ruff"]["target-version"] == "py" + oldest[1].replace(".", "")
    assert SETTINGS["tool"]["mypy"]["python_version"] == oldest[1]
    (wheels,) = re.findall(r"^WHEEL_PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert wheels.split()[0] == f"python{oldest[1]}"


def test_containers_make_the_wheels_that_make_wheel_makes() -> None:
    """Each in its own words: a wheel of 3.12 is that of all later versions."""
    (wheels,) = re.findall(r"^WHEEL_PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = [name.replace("python", "cp").replace(".", "") for name in wheels.split()]
    assert SETTINGS["tool"]["cibuildwheel"]["build"] == [f"{name}-manylinux_*" for name in named]
    assert SETTINGS["tool"]["scikit-build"]["wheel"]["py-api"] == named[-1]


def test_what_is_compiled_in_has_its_licence_in_the_wheel() -> None:
    files = {path for pattern in PROJECT["license-files"] for path in ROOT.glob(pattern)}
    for folder in (ROOT / "third_party").iterdir():
        assert folder.is_file() or folder / "LICENSE" in files, folder.name
    for words in ("Apache", "BSD-2-Clause", "BSD-3-Clause", "MIT"):
        assert words in PROJECT["license"]


def test_the_readme_of_an_index_leads_nowhere_that_is_not_there() -> None:
    command = [sys.executable, "-m", "hatch_fancy_pypi_readme", "pyproject.toml"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "[measurements](docs/PERFORMANCE.md)" in (ROOT / "README.md").read_text()
    assert "measurements" in shown
    without_code = re.sub(r"```.*?```", "", shown, flags=re.DOTALL)
    assert [link for link in re.findall(r"\]\(([^)]*)\)", without_code) if not link.startswith(("http", "#"))] == []
    assert "pip install flowstone" in shown


def test_types_are_for_users_too() -> None:
    assert (ROOT / "src/flowstone/py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]
