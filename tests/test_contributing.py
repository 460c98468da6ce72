"""The instructions for contributors, and the checks of the project's host: commands that exist, the same checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flowstone

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHANGES = (ROOT / "CHANGELOG.md").read_text()


def planned(*arguments: str) -> str:
    """The commands that make would run, beside those that only set up."""
    command = ["make", "--no-print-directory", "-n", "-o", "setup", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_hooks_check_what_make_check_checks() -> None:
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), flags=re.MULTILINE)
    assert " && ".join(hooks) == planned("check").strip()


@pytest.mark.parametrize("verb", ["test", "test-tools"])
def test_a_part_of_the_tests_runs_alone(verb: str) -> None:
    (part,) = planned(verb, "K=lazy and not device").splitlines()
    assert "-m pytest" in part
    assert "-k 'lazy and not device'" in part
    assert " -k " not in planned(verb)


def test_every_test_file_runs_alone() -> None:
    """What it imports from the tests lies beside it, or on the path that pytest sets."""
    path = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
    tests = ROOT / "tests"
    own = {file.stem for file in tests.rglob("*.py")} - sys.stdlib_module_names
    entries = [entry for folder in path for entry in (ROOT / folder).iterdir()]
    always = {entry.stem for entry in entries if entry.suffix == ".py" or entry.is_dir()}
    for file in tests.rglob("test_*.py"):
        beside = {other.stem for other in file.parent.glob("*.py")}
        missing = [name for name in imported_modules(file) if name in own - always - beside]
        assert missing == [], file


def imported_modules(file: Path) -> set[str]:
    """The first parts of the names of all modules that the file imports."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def test_every_command_and_path_of_the_guide_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    reported = re.findall(r"(?:`|^)make ((?:[a-z-]+(?= |`|$) ?)+)", GUIDE, flags=re.MULTILINE)
    assert {target for verbs in reported for target in verbs.split()} <= targets
    for path in re.findall(r"`([\w.]+(?:/[\w.-]+)+)`", GUIDE):
        if not path.startswith("build/"):  # made by the commands
            assert (ROOT / path).exists() or (ROOT / "src/flowstone" / path).exists(), path


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_version(workflow: Path) -> None:
    used = re.findall(r"uses: (\S+)", workflow.read_text())
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", action)] == []


def test_the_hosted_tests_are_those_of_make_on_the_oldest_python() -> None:
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert "target: [test, test-tools]" in text
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert f'python-version: "{oldest}"' in text


def test_the_changelog_has_the_usual_form() -> None:
    """Versions, newest first, and the kinds of changes of Keep a Changelog below them."""
    titles = re.findall(r"^## (.+)$", CHANGES, flags=re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])
    assert not titles[1:] or titles[1].startswith(f"[{flowstone.__version__}]"), "no release without its section"
    kinds = re.findall(r"^### (.+)$", CHANGES, flags=re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert max(map(len, CHANGES.splitlines())) <= 120
