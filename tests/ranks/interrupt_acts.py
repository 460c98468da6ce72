"""Functions for tests in which a signal handler ends a call on one rank, which then continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch.distributed as dist
from acts import fill, opened, state_of

import flowstone as fs
from flowstone.load import conductor as loading
from flowstone.ranks import Mailbox, RankGroup
from flowstone.save import capturing, planning

# Where it comes: before which call, of how many.
POINTS: dict[str, tuple[object, str, int]] = {
    "meeting": (Mailbox, "await_posted", 1),
    "within": (loading, "plan_load", 1),
    "reading": (loading, "read", 1),
    "confirming": (RankGroup, "confirm_all", 1),
    "waiting": (Mailbox, "await_posted", 1),
    "describing": (planning, "describe", 1),
    "starting": (capturing, "start_capture", 1),
    "newest": (RankGroup, "decide_on_rank_zero", 1),
}


def interrupted(point: str) -> mock._patch[object]:
    """There this process gets SIGINT, once, as by Ctrl-C."""
    owner, name, left = POINTS[point]
    original, counted = getattr(owner, name), [left]

    def stand_in(*arguments: object, **more: object) -> object:
        counted[0] -= 1
        if counted[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):  # the handler runs here
                time.sleep(0.01)
        return original(*arguments, **more)

    return mock.patch.object(owner, name, stand_in)


def one_is_interrupted(rank: int, path: str, victim: int, point: str) -> list[object]:
    """What each rank is told of such a call, and whether that took it long; then all call it again."""
    state = state_of("rows")
    fill(state, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with opened(path, on_error="continue", deadline_s=60.0) as saver:
        if point != "meeting":
            saver.save(1, state).committed.result(60)
        acts: dict[str, Callable[[], object]] = {
            "describing": lambda: saver.save(2, state).committed.result(60),
            "starting": lambda: saver.save(2, state).committed.result(60),
            "newest": saver.latest,
            "meeting": saver.latest,
        }
        act = acts.get(point, lambda: saver.load(state))
        dist.barrier()
        since = time.monotonic()
        try:
            with interrupted(point) if rank == victim else nullcontext():
                act()
            message = "nothing"
        except (fs.FlowstoneError, KeyboardInterrupt) as error:
            message = f"{type(error).__name__}: {error}"
        took_s = time.monotonic() - since
        dist.barrier()  # as training has them
        try:
            act()
            again = "well"
        except fs.FlowstoneError as error:
            again = str(error)
        fill(state, 3)
        assert saver.save(3, state).committed.result(60).step == 3
    return [message, took_s < 20, again]
