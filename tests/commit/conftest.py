"""A store with several steps, with the files that the catalogue reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def several(checkpoint: Path) -> Path:
    """A store with steps 1 to 4, which are copies of one another as far as the catalogue looks."""
    for step in range(1, 5):
        shutil.copytree(checkpoint, checkpoint.parent / f"step-{step:08d}")
    shutil.rmtree(checkpoint)
    return checkpoint.parent
