"""NVIDIA's assembler, if it is installed, to check that it accepts a PTX text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


def assemble_for_every_gpu(text: str, directory: Path) -> None:
    """Assemble a kernel for all GPUs that the assembler knows, and check that it uses no local memory."""
    ptxas = _assembler()
    if ptxas is None:
        pytest.skip("no ptxas: set PTXAS to one (of the wheel nvidia-cuda-nvcc, or of a CUDA toolkit)")
    stdout = subprocess.run([ptxas, "--help"], check=True, capture_output=True, text=True).stdout
    kinds = sorted(set(map(int, re.findall(r"'sm_(\d+)'", stdout))))
    assert kinds
    source, target = directory / "kernel.ptx", directory / "kernel.cubin"
    source.write_text(text)
    for kind in kinds:
        done = subprocess.run(
            [ptxas, "-v", "-arch", f"sm_{kind}", str(source), "-o", str(target)],
            check=False, capture_output=True, text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "0 bytes stack frame" in done.stderr or "stack" not in done.stderr, "local memory would be the GPU's"
        assert "spill" not in done.stderr or "0 bytes spill stores" in done.stderr


def _assembler() -> str | None:
    """The path of ptxas: from PTXAS, on PATH, or triton's copy."""
    named = os.environ.get("PTXAS") or shutil.which("ptxas")
    if named is None:
        try:
            import triton
        except ImportError:
            return None
        bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        return str(bundled) if bundled.exists() else None
    return named
