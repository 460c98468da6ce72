"""Common fixtures of the tests of conversion."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from models import STEP, tensors

import flowstone as fs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ranks"))  # real ranks: processes.py


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one checkpoint that has the tensors as its model; not to be changed."""
    store = tmp_path_factory.mktemp("saved") / "run"
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(STEP, {"model": tensors(), "step": STEP})
    return store
