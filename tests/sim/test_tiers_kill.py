"""A real training with two directories as tiers is killed by SIGKILL; it resumes bit for bit."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from sim_world import engine

import flowstone as fs
from flowstone.commit import catalog
from flowstone.errors import NoCheckpointError
from flowstone.store.local import LocalStore

LONGEST_S = 0.1  # a few saves of this size, and flushes


def training() -> dict[str, Any]:
    torch.manual_seed(5)
    model = torch.nn.Linear(300, 200)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "rng": fs.rng(), "step": 0}


def advance(state: dict[str, Any]) -> None:
    """One step, on data that the generator draws."""
    state["optimizer"].zero_grad()
    state["model"](torch.rand(8, 300)).square().mean().backward()
    state["optimizer"].step()
    state["step"] += 1


def open_tiers(path: Path, number: int) -> fs.Checkpointer:
    return fs.Checkpointer(
        [fs.Tier(path / "near", keep=2), fs.Tier(path / "far", every=2, keep=3, drain_s=20)], engine=engine(number)
    )


def train_until_killed(path: str, number: int, out: Connection) -> None:
    """Resume, train and save without end; tell each step once it is committed."""
    torch.set_num_threads(1)
    state = training()
    checkpointer = open_tiers(Path(path), number)
    tier = ""
    if checkpointer.latest() is not None:
        tier = checkpointer.load(state).tier
    out.send(("began", state["step"], tier))
    while True:
        advance(state)
        checkpointer.save(state["step"], state).committed.result()
        out.send(("committed", state["step"], ""))


def _weights(steps: int) -> list[torch.Tensor]:
    """What an undisturbed training has after each step."""
    torch.set_num_threads(1)
    state, collected = training(), []
    for _ in range(steps + 1):
        collected.append(state["model"].weight.detach().clone())
        advance(state)
    return collected


def test_a_killed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    chance = random.Random(7)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["flowstone", "torch", "sim_world"])
    reported, tiers = 0, set[str]()
    for number in range(6):
        if number == 4:
            shutil.rmtree(tmp_path / "near")  # a new node
            far = catalog.steps(LocalStore(tmp_path / "far"))
            reported = far[-1] if far else 0
        outcome, out = processes.Pipe(duplex=False)
        process = processes.Process(target=train_until_killed, args=(str(tmp_path), number, out))
        process.start()
        out.close()
        _, step, tier = outcome.recv()
        assert step in (reported, reported + 1), f"kill {number}: resumed from {step}, and {reported} was reported"
        tiers.add(Path(tier).name)
        expected = step + chance.randint(1, 5)
        while step < expected or (number == 3 and not catalog.steps(LocalStore(tmp_path / "far"))):
            _, step, _ = outcome.recv()
        time.sleep(chance.random() * LONGEST_S)  # the moment of the kill is what this test draws
        process.kill()
        process.join()
        reported = max([step, *_steps(outcome)])
    assert tiers == {"", "near", "far"}
    _check(tmp_path, reported)


def _check(path: Path, reported: int) -> None:
    expected = _weights(reported + 2)  # before the load: it draws from the generator
    state = training()
    with open_tiers(path, 0) as checkpointer:
        newest = checkpointer.load(state).step
        assert newest in (reported, reported + 1)
        assert torch.equal(state["model"].weight, expected[newest]), "bit for bit"
        advance(state)
        assert torch.equal(state["model"].weight, expected[newest + 1]), "and from there on"
        checkpointer.save(newest + 1, state).committed.result()
        assert checkpointer.drain() == {}
    for name in ("near", "far"):
        for step in catalog.steps(LocalStore(path / name)):
            checkpoint = fs.open(path / name, step)
            assert checkpoint.verify().sound
            assert torch.equal(checkpoint.read("model.weight"), expected[step]), f"{name}, step {step}"
    assert not [path for path in (path / "far").iterdir() if path.name.startswith((".saving", ".deleting"))]
    try:
        assert fs.open(path / "far").step >= newest - 1, "every second step comes there"
    except NoCheckpointError:
        raise AssertionError("the farther tier has nothing") from None


def _steps(connection: Connection) -> list[int]:
    steps = []
    try:
        while connection.poll():
            steps.append(connection.recv()[1])
    except EOFError:
        pass
    return steps
