"""Copies for other nodes are spread over the time between two saves, until a thread waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowstone as fs
from flowstone.errors import ArgumentError, CancelledError
from flowstone.session.futures import Save
from flowstone.store.peers.copies import Limits, SendPace
from flowstone.store.peers.spreading import CopySchedule
from flowstone.store.peers.store import PeerMemory
from flowstone.tiered.writer import TieredWriter
from peer_nodes import Nodes, several_nodes

MB = 8  # of a save; parts have 4 MiB
PATIENCE_S = 60.0

# By a clock of its own


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_save_is_not_spread_and_later_ones_take_a_share_of_the_shortest_interval_known() -> None:
    clock = Clock()
    spreading = CopySchedule(0.5, 60.0, clock)

    def left_s(draft: str, *, after_s: float, capture_s: float = 1.0) -> float:
        clock.now += after_s
        spreading.note_save(draft)
        spreading.note_save(draft)  # its second file
        clock.now += capture_s
        left = spreading.left_s(spreading.due(draft))
        clock.now -= capture_s
        return left

    assert left_s("a", after_s=5.0) == 0.0, "no interval is known"
    assert left_s("b", after_s=20.0) == 9.0
    assert left_s("c", after_s=100.0) == 9.0, "a pause tells nothing"
    assert left_s("d", after_s=10.0) == 4.0
    assert left_s("e", after_s=10.0, capture_s=7.0) == 0.0, "overdue"
    for draft in "fgh":
        assert left_s(draft, after_s=1000.0) == 4.0
    assert left_s("i", after_s=1000.0) == 59.0, "the last four count, and there is a limit"
    assert spreading.left_s(spreading.due("never began")) == 0.0


def test_what_is_waited_for_is_spread_no_more_and_what_begins_later_is() -> None:
    clock = Clock()
    spreading = CopySchedule(0.5, 60.0, clock)
    for draft in "ab":
        clock.now += 10.0
        spreading.note_save(draft)
    due = spreading.due("b")
    assert spreading.left_s(due) == 5.0
    spreading.expedite()
    assert due.is_expedited
    assert spreading.left_s(due) == 0.0
    clock.now += 10.0
    spreading.note_save("c")
    assert spreading.left_s(spreading.due("c")) == 5.0
    assert spreading.bounded(2.0).left_s(spreading.due("c")) == 5.0, "the same clock"
    bounded = spreading.bounded(2.0)
    for draft in "cd":
        bounded.note_save(draft)
        clock.now += 10.0
    bounded.note_save("e")
    assert bounded.left_s(bounded.due("e")) == 2.0


def test_a_pace_spreads_parts_evenly_catches_up_and_ends_its_waits_when_told() -> None:
    record = {"expedited": False, "cancelled": False}
    limits = Limits(None, 0.4, lambda: record["expedited"], lambda: record["cancelled"])
    began = time.monotonic()
    pace = SendPace(limits, 1.0, 4)
    seen = []
    for _ in range(4):
        pace.wait(1)
        seen.append(time.monotonic() - began)
    assert all(position >= 0.1 * number for number, position in enumerate(seen))
    slow = SendPace(Limits(None, 1000.0, lambda: record["expedited"], lambda: record["cancelled"]), 1.0, 2)
    slow.wait(1)
    record["expedited"] = True
    slow.wait(1)
    record |= {"expedited": False, "cancelled": True}
    with pytest.raises(CancelledError):
        slow.wait(1)
    assert time.monotonic() - began < 60.0


# With agents


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with several_nodes(2) as both:
        yield both


@contextmanager
def closed_at_the_end(stores: Sequence[PeerMemory]) -> Iterator[None]:
    try:
        yield
    finally:
        for store in stores:
            store.close()


def _state(step: int) -> dict[str, Any]:
    return {"w": np.full(MB << 17, step), "step": step}


def _timed(save: Save) -> list[float]:
    """Will have the time at which it was committed."""
    ended: list[float] = []
    save.committed.add_done_callback(lambda _: ended.append(time.monotonic()))
    return ended


def _pause_until(when: float, *, ended: Sequence[float]) -> None:
    """And until a save was committed, which a busy machine delays. Waiting for it would expedite it."""
    while time.monotonic() < when or not ended:
        assert time.monotonic() < when + PATIENCE_S, "no save makes room for the next one"
        time.sleep(0.01)


def _clocked(store: PeerMemory) -> Clock:
    """The time between its saves is what the test says, however busy the machine is; what is spread takes real time."""
    store._spreading._now = clock = Clock()
    return clock


def _is_whole(stores: list[PeerMemory], step: int) -> bool:
    """Each of its files on both nodes, each segment bit for bit."""
    places = stores[0].copies(step)
    read = fs.open(stores[1], step=step)
    return all(len(set(place)) == 2 for place in places.values()) and bool(
        (read.read("w", framework="numpy") == step).all() and read.verify().sound
    )


def test_copies_are_spread_over_the_interval_and_whole_without_anybody_waiting_for_them(nodes: Nodes) -> None:
    stores, interval = nodes.stores("spread"), 2.4
    with closed_at_the_end(stores[1:]), fs.Checkpointer(stores[0]) as checkpointer:
        began, ended = [time.monotonic()], []
        ended.append(_timed(checkpointer.save(1, _state(1))))
        for step in (2, 3):
            _pause_until(began[-1] + interval, ended=ended[-1])
            assert _is_whole(stores, step - 1)
            began.append(time.monotonic())
            ended.append(_timed(checkpointer.save(step, _state(step))))
        _pause_until(began[-1] + interval, ended=ended[-1])
        took = [end[0] - begin for begin, end in zip(began, ended, strict=True)]
        # The last part goes after two thirds of half the interval, or later.
        assert all(0.3 * interval < item for item in took[1:]), took


def test_copies_go_at_full_rate_in_the_first_save_and_once_the_next_one_waits_for_them(nodes: Nodes) -> None:
    stores = nodes.stores("early")
    clock = _clocked(stores[0])
    with closed_at_the_end(stores[1:]), fs.Checkpointer(stores[0]) as checkpointer:
        began, saves = time.monotonic(), []
        for step in (1, 2, 3):  # there is memory for one draft
            clock.now += 100.0
            saves.append(checkpointer.save(step, _state(step)))
        assert saves[1].committed.done()
        saves[2].committed.result()
        assert time.monotonic() - began < 25.0, "each would be spread over 50 s"
        assert _is_whole(stores, 3)


def test_nothing_is_spread_where_that_is_not_wanted_and_given_rates_hold(nodes: Nodes) -> None:
    for options, least in ({"spread": 0.0}, 0.0), ({"bytes_per_s": 16e6}, 0.2):
        stores = nodes.stores(f"not-spread-{least}", **options)
        clock = _clocked(stores[0])
        with closed_at_the_end(stores[1:]), fs.Checkpointer(stores[0]) as checkpointer:
            checkpointer.save(1, _state(1)).committed.result()
            clock.now += 100.0
            began, done = time.monotonic(), threading.Event()
            save = checkpointer.save(2, _state(2))
            if least:
                save.committed.result()  # who waits gets no more than the rate that was given
            save.committed.add_done_callback(lambda _, done=done: done.set())
            assert done.wait(25.0), "it would be spread over 50 s"
            assert time.monotonic() - began > least


def test_a_flush_does_not_give_way_to_copies_that_are_spread_and_who_waits_for_it_expedites_them(
    nodes: Nodes, tmp_path: Path
) -> None:
    stores = nodes.stores("spread-and-flushed")
    clock = _clocked(stores[0])
    with closed_at_the_end(stores[1:]), fs.Checkpointer([stores[0], tmp_path]) as checkpointer:
        checkpointer.save(1, _state(1)).durable.result()
        clock.now += 100.0
        began = time.monotonic()
        save = checkpointer.save(2, _state(2))
        save.captured.result()
        assert isinstance(checkpointer._store_writer, TieredWriter)
        assert not checkpointer._store_writer.hooks.is_saving()
        assert not save.committed.done()
        save.durable.result()
        assert time.monotonic() - began < 25.0, "50 s would be the half of the interval"


@pytest.mark.parametrize("spread", [-0.1, 0.95, float("nan")])
def test_a_share_that_leaves_no_time_is_refused(spread: float) -> None:
    with pytest.raises(ArgumentError, match=r"0 to 0\.9"):
        PeerMemory("refused", secret="x" * 32, spread=spread)
