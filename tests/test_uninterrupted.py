"""What no signal's handler cuts in two, whatever it raises, and at whichever line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from interrupts import Struck, struck

import flowstone as fs
from flowstone.uninterrupted import Latch, uninterrupted

MIB = 1 << 20


def nothing() -> None: ...


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_act_happens_on_a_thread_of_its_own_and_its_result_and_its_error_come_back() -> None:
    names = uninterrupted(lambda: [threading.current_thread().name], first=nothing)
    assert names == ["flowstone-act"]
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 // 0, first=nothing)


def test_on_any_other_thread_an_act_is_a_plain_call() -> None:
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(uninterrupted(lambda: threading.current_thread().name, first=nothing)), name="own"
    )
    thread.start()
    thread.join(10)
    assert found == ["own"]


def test_whoever_is_interrupted_goes_on_when_the_act_is_over_or_before_it_has_begun() -> None:
    """At any line: it happens once, whole, or not at all, and never behind its caller's back."""
    went = {"not at all": 0, "whole": 0}
    for line in range(1, 60):
        steps: list[str] = []
        go_on = threading.Event()
        threading.Timer(0.005, go_on.set).start()

        def act(steps: list[str] = steps, go_on: threading.Event = go_on) -> None:
            steps.append("begun")
            go_on.wait(10)
            steps.append("over")

        try:
            struck(lambda act=act: uninterrupted(act, first=nothing), line)  # type: ignore[misc]
        except Struck:
            seen = tuple(steps)
            assert seen in ((), ("begun", "over"))
            go_on.wait(10)
            assert seen == tuple(steps)
            went["whole" if seen else "not at all"] += 1
    assert min(went.values()) > 2, went


def test_a_latch_is_open_for_all_whoever_is_interrupted_at_it() -> None:
    latch = Latch()
    assert not latch.wait(0.001)
    threading.Timer(0.02, latch.open).start()
    for line in range(1, 12):
        try:
            struck(latch.wait, line)
        except Struck:
            continue
    others = [threading.Thread(target=latch.wait) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(10)
        assert not other.is_alive()
    assert latch.wait()


def test_a_close_that_is_interrupted_at_any_line_can_be_done_again_and_gives_the_store_back(tmp_path: Path) -> None:
    state, struck_at = {"x": torch.ones(1000)}, 0
    with fs.Checkpointer(tmp_path, budget_bytes=32 * MIB) as checkpointer:
        checkpointer.save(0, state)
    opened = descriptors()
    for step, line in enumerate([*range(1, 40, 2), *range(40, 120, 10)], 1):
        checkpointer = fs.Checkpointer(tmp_path, budget_bytes=32 * MIB)
        checkpointer.save(step, state)
        try:
            struck(checkpointer.close, line)
        except Struck:
            struck_at += 1
            checkpointer.close()
    assert struck_at > 20
    assert descriptors() <= opened
    assert fs.open(tmp_path).step == step


def test_a_first_save_that_is_interrupted_while_it_locks_the_store_keeps_nobody_out(tmp_path: Path) -> None:
    """Nor a second try of the same Checkpointer, nor the next one."""
    state, struck_at = {"x": torch.ones(1000)}, 0
    for step, line in enumerate(range(1, 40, 2), 1):
        with fs.Checkpointer(tmp_path, budget_bytes=32 * MIB, on_error="continue") as checkpointer:
            try:
                struck(checkpointer._check_writer, line)
            except Struck:
                struck_at += 1
            checkpointer.save(step, state).committed.result(60)
    assert struck_at > 5
    assert fs.open(tmp_path).step == step


def test_a_verb_on_the_thread_of_an_act_is_refused_at_once(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as checkpointer, pytest.raises(fs.BusyError):
        checkpointer._turn.uninterrupted(checkpointer.latest)
