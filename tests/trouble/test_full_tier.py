"""A second tier on a full disk: training continues, and the backlog is flushed once there is space."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from large import ENGINE, state

import flowstone as fs

Mount = Callable[..., Path]


def _left(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if path.name.startswith(("step", ".saving", ".deleting")))


def test_a_full_second_tier_stops_nothing(mount: Mount, tmp_path: Path) -> None:
    disk = mount("-t", "tmpfs", "-o", "size=40m", "tmpfs")
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(25 << 20))  # room for one checkpoint of 9 MiB, and not for two
    events: list[Any] = []
    with fs.Checkpointer([tmp_path / "near", disk / "far"], engine=ENGINE, on_event=events.append) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        assert checkpointer.drain() == {}
        checkpointer.save(2, state(2)).committed.result()
        assert checkpointer.drain() == {str(disk / "far"): (2,)}
        failed = [event for event in events if isinstance(event, fs.TierFailed)]
        assert failed
        assert "no space" in failed[0].reason
        assert _left(disk / "far") == ["step-00000001"]
        began = monotonic()
        checkpointer.save(3, state(3)).committed.result()
        assert monotonic() - began < 30, "a full tier holds nothing up"
        os.unlink(ballast)
        assert checkpointer.drain() == {}
    assert _left(disk / "far") == ["step-00000001", "step-00000002", "step-00000003"]
    for step in (1, 2, 3):
        assert fs.open(disk / "far", step).verify().sound
