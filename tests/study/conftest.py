"""Fixtures of the study's tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def without_direct(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system that refuses O_DIRECT; skips where this process may not mount one."""
    path = tmp_path / "ramfs"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a file system without O_DIRECT needs a mount, which needs root")
    done = subprocess.run(["mount", "-t", "ramfs", "ramfs", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system without O_DIRECT needs a mount, which was refused: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)
