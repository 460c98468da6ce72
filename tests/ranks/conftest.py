"""Fixtures of the tests of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from unittest import mock

import pytest
from threads import Clock, HeartbeatThreading, Job

from flowstone.ranks import agreement, exchange, failure_detector, heartbeat, kv_store


@pytest.fixture
def impatient() -> Iterator[Clock]:
    """Levels of the tree give up a fifth of a second apart, and look for those that are missing all the time.

    By a clock of their own: however slow the machine is, a rank that is there comes in time.
    """
    clock = Clock()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(exchange, DEADLINE_MARGIN_S=0.2, _RECHECK_S=0.01))
        stack.enter_context(mock.patch.object(kv_store, "_POLL_LAST_S", 0.02))
        stack.enter_context(mock.patch.object(heartbeat, "threading", HeartbeatThreading(clock)))
        stack.enter_context(mock.patch.object(Job, "clock", clock))
        for module in (agreement, failure_detector, kv_store, exchange):
            stack.enter_context(mock.patch.object(module, "time", clock))
        yield clock
