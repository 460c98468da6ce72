"""The folder in which the simulation runs."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstone import _native

sys.path.append(str(Path(__file__).parent.parent / "store"))  # the contract of stores


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is room: nothing here depends on the device, and it is ten times as fast."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Path(memory)


@pytest.fixture(autouse=True)
def _requests_as_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, segments would be captured where they stay: without the requests that the simulated disk refuses."""
    monkeypatch.setattr(_native, "is_byte_addressable", lambda fd: False)
