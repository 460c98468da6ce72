"""Waiting for messages: they are noticed soon, with few requests."""

from __future__ import annotations

from unittest import mock

import pytest

from flowstone.ranks import kv_store
from flowstone.ranks.kv_store import Mailbox


class Clock:
    """Time that passes while somebody sleeps, and a board on which one key is posted at some moment."""

    def __init__(self, posted_at: float) -> None:
        self.now, self.looks, self._posted_at = 100.0, 0, 100.0 + posted_at

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return self.now >= self._posted_at


@pytest.mark.parametrize("posted_at", [0.0, 0.0005, 0.01, 0.1, 0.7, 1.5, 30.0])
def test_what_was_waited_for_is_noticed_at_most_an_eighth_of_the_wait_late(posted_at: float) -> None:
    clock = Clock(posted_at)
    with mock.patch.object(kv_store, "time", clock):
        Mailbox(clock).await_posted(
            ["key"], tick=lambda missing, waited_s: None, since=clock.now  # type: ignore[arg-type]
        )
    late = clock.now - 100.0 - posted_at
    assert late <= min(max(0.001, posted_at / 8), 0.25) + 1e-9
    assert clock.looks <= 60 + 4 * posted_at, "thousands of ranks may wait at once"
