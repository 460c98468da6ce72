"""Samples in the documents run, in the order in which they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from warm_start import warm_start

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _samples(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if _samples(d)], ids=lambda d: d.name)
def test_samples_run(document: Path, tmp_path: Path) -> None:
    for number, sample in enumerate(_samples(document)):
        command = [sys.executable, "-c", sample]
        # What a sample imports it has to show; an optimizer imports half of torch by itself, where it is made.
        shows = not re.search("optim", sample) or bool(re.search(r"torch\.(distributed|onnx)", sample))
        with warm_start("-c", torch_alone=shows):
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"sample {number} of {document.name}: {done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_readme_example_is_short() -> None:
    example = _samples(ROOT / "README.md")[0]
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 18, "the example has grown"
    commands = re.findall(r"^make ([\w-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert {"demo", "test", "test-tools"} <= set(commands)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700, "put it into docs/, and a link here"
