"""Importers with a coverage-guided fuzzer (atheris): a few seconds here, longer in `make soak`.

Its corpus is kept in build/fuzz, and the next run continues from there. Every find has become a test.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from strangers import FORMATS

ROOT = Path(__file__).resolve().parents[2]
KINDS = [name for name in FORMATS if name != "flowstone"]

pytestmark = pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")


def fuzz(kind: str, place: Path, seconds: int) -> None:
    work = ROOT / "build" / "fuzz" / kind
    fuzzer = [sys.executable, Path(__file__).with_name("fuzz_importer.py"), FORMATS[kind](place), work]
    # libFuzzer limits the peak, and a process begins with the one of its parent: a shell's is small, ours is not.
    command = ["sh", "-c", '"$@"; exit $?', "sh", *fuzzer, f"-max_total_time={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 600, check=False)
    assert done.returncode == 0, f"an input is in {work}/finds: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert "stat::number_of_executed_units" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_an_importer_withstands_a_fuzzer(tmp_path: Path, kind: str) -> None:
    fuzz(kind, tmp_path, 5)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_an_importer_withstands_a_fuzzer_for_an_hour(tmp_path: Path, kind: str) -> None:
    fuzz(kind, tmp_path, 3600)
