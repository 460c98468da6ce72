"""A real process that saves in a loop is killed by SIGKILL; its committed checkpoints exist."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from sim_world import engine, same, state

import flowstone as fs
from flowstone.commit.entries import DELETING, SAVING

KEEP = fs.Keep(last=2)
LONGEST_S = 0.15  # several saves of this size, where nothing else runs
PATIENCE_S = 120.0


def save_until_killed(path: str, number: int, out: Connection) -> None:
    """Go on where the store is, save without end, and tell each step once it is committed."""
    checkpointer = fs.Checkpointer(path, keep=KEEP, engine=engine(number))
    latest = checkpointer.latest()
    step = 0 if latest is None else latest.step
    out.send(("began", step))
    while True:
        step += 1
        checkpointer.save(step, state(str(step))).committed.result()
        out.send(("committed", step))


def _run(path: Path, kills: int, seed: int) -> None:
    """Kill `kills` processes in turn, in one store, and look at it after each."""
    chance = random.Random(seed)
    # Torch is imported once, in a server that each process is forked from.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["flowstone", "torch", "sim_world"])
    reported = torn = 0
    for number in range(kills):
        outcome, out = processes.Pipe(duplex=False)
        process = processes.Process(target=save_until_killed, args=(str(path), number, out))
        process.start()
        out.close()
        assert outcome.recv()[0] == "began"
        before = _drafts(path)
        reported = max([reported, *(outcome.recv()[1] for _ in range(chance.randrange(3)))])
        if chance.random() < 0.5:  # the machine may be so busy that no draft comes soon
            _await_draft(path, before)
        time.sleep(chance.random() * LONGEST_S)  # the moment of the kill is what this test draws
        process.kill()
        process.join()
        reported = max([reported, *_steps(outcome)])
        torn += bool(_drafts(path))
        _check(path, reported, f"SEED={seed}, kill {number}")
    assert torn, "no kill fell inside a save: the test proves nothing"


def _drafts(path: Path) -> set[str]:
    """What a save, or a removal, has not ended."""
    return {name for name in os.listdir(path) if name.startswith((SAVING, DELETING))} if path.exists() else set()


def _await_draft(path: Path, before: set[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not _drafts(path) - before:
        assert time.monotonic() < deadline, "it saves without end"
        time.sleep(0.0005)


def _steps(connection: Connection) -> list[int]:
    steps = []
    try:
        while connection.poll():
            steps.append(connection.recv()[1])
    except EOFError:
        pass
    return steps


def _check(path: Path, reported: int, where: str) -> None:
    with fs.Checkpointer(path, engine=engine(0)) as checkpointer:
        latest = checkpointer.latest()
        if latest is None:
            assert reported == 0, f"{where}: step {reported} was reported committed, and there is none"
            return
        assert latest.step in (reported, reported + 1), f"{where}: {latest}, but step {reported} was reported"
        into = state("blank")
        assert checkpointer.load(into).step == latest.step, where
        assert same(into, state(str(latest.step))), f"{where}: step {latest.step} is not what was saved"
        latest.verify()


def test_killed_process_loses_nothing_that_it_reported(tmp_path: Path) -> None:
    _run(tmp_path / "store", kills=10, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_many_killed_processes_lose_nothing_that_they_reported(seed: int, tmp_path: Path) -> None:
    _run(tmp_path / "store", kills=40, seed=seed)
