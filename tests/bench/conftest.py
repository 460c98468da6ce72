"""Fixtures of the benchmarks' tests."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def conductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process may be a conductor: its workers find what it imports, and SIGTERM means again what it did."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path or "." for path in sys.path))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """A training of the demo asks torch for one thread and for determinism, in the whole process."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_deterministic)
