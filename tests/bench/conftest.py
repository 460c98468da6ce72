"""The benchmark is no part of the package: its folder's parent must be found."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture
def conductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process may be a conductor: its workers find what it imports, and SIGTERM means again what it did."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path or "." for path in sys.path))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
