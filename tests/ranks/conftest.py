"""Fixtures of the tests of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from flowstone.ranks import kv_store, wire


@pytest.fixture
def impatient() -> Iterator[None]:
    """Levels of the tree give up a fifth of a second apart, and look for those that are missing all the time."""
    with (
        mock.patch.multiple(wire, DEADLINE_MARGIN_S=0.2, _RECHECK_S=0.01),
        mock.patch.object(kv_store, "_POLL_LAST_S", 0.02),
    ):
        yield
