"""Pages run as a reader follows them: python and shell blocks in their order, in one directory."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from warm_start import warm_start

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
BIN = Path(sys.executable).parent
COMMAND = re.compile(r"^(\w+=\S+ )*(flowstone|python|pip|make|tools/\S+) \S", flags=re.MULTILINE)
NEEDS = {  # what the fence of a block says that is not run here; other words there name samples of tests/integrations
    "needs-checkout": "a clone of Flowstone's repository",
    "needs-files": "files of the reader's: the lines are variants of one command",
    "needs-minutes": "minutes, in which it measures a disk",
    "needs-network": "a package index, or a bucket",
    **{f"needs-{name}": "the framework, or a checkpoint that it has saved" for name in (
        "deepspeed", "lightning", "orbax", "ray", "torchsnapshot", "transformers",
    )},
}


def _blocks(document: Path) -> list[tuple[str, str]]:
    """What the fences of the page's blocks say, and the blocks."""
    return BLOCK.findall(document.read_text())


def _session(document: Path) -> list[tuple[str, str]]:
    """The blocks that a reader runs from top to bottom."""
    return [(fence, text) for fence, text in _blocks(document) if fence in ("python", "sh")]


def _run_block(language: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if language == "sh":
        environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        command = ["sh", "-e", "-c", text]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    # What a sample imports it has to show; an optimizer imports half of torch by itself, where it is made.
    shows = not re.search("optim", text) or bool(re.search(r"torch\.(distributed|onnx)", text))
    with warm_start("-c", torch_alone=shows):
        return subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if _session(d)], ids=lambda d: d.name)
def test_a_page_runs_from_top_to_bottom_in_one_directory(document: Path, tmp_path: Path) -> None:
    for number, (language, text) in enumerate(_session(document)):
        done = _run_block(language, text, tmp_path)
        assert done.returncode == 0, f"block {number} of {document.name}:\n{text}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_a_block_that_does_not_run_says_what_it_needs(document: Path) -> None:
    integrations = "".join(path.read_text() for path in (ROOT / "tests" / "integrations").glob("test_*.py"))
    for fence, text in _blocks(document):
        language, _, name = fence.partition(" ")
        assert language in ("", "python", "sh", "toml"), f"{document.name}: ```{fence}"
        assert language or not COMMAND.search(text), f"{document.name}: these commands are not marked as sh:\n{text}"
        assert not name or name in NEEDS or re.search(rf"\b{name}\b", integrations), f"{document.name}: ```{fence}"


@pytest.mark.parametrize("document", sorted((ROOT / "docs").rglob("*.md")), ids=lambda d: d.name)
def test_lines_end_by_column_120(document: Path) -> None:
    spec = importlib.util.spec_from_file_location("wrap_documents", ROOT / "tools" / "wrap_documents.py")
    assert spec is not None
    assert spec.loader is not None
    wrap_documents = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrap_documents)
    long = [number for number, line in wrap_documents.prose(document.read_text()) if wrap_documents.is_too_long(line)]
    assert long == [], f"lines of {document.name} are too long: run python tools/wrap_documents.py"


@functools.cache
def _prose(document: Path) -> str:
    return BLOCK.sub("", document.read_text())


@functools.cache
def _anchors(document: Path) -> set[str]:
    """The places of a page that links can name, as the site makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(document), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", _prose(document)):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or anchor in _anchors(target), f"{document.name} links to {link}, a place that is not there"


def test_the_page_of_ideas_names_modules_that_exist() -> None:
    for name in re.findall(r"`([\w/]+/|[\w/]+\.(?:py|cpp|h))`", (ROOT / "docs/IDEAS.md").read_text()):
        assert (ROOT / "src/flowstone" / name).exists() or (ROOT / name).exists(), f"IDEAS.md names {name}"


def test_readme_example_is_short() -> None:
    example = next(text for fence, text in _blocks(ROOT / "README.md") if fence == "python")
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 18, "the example has grown"
    commands = re.findall(r"^make ([\w-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert commands == ["demo", "test"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700, "put it into docs/, and a link here"
