"""Moves of one rank alone: calls, failures, different states, additional or missing Checkpointers."""

from __future__ import annotations

import gc
import shutil
import signal
import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import flowstone as fs
from hostile.moves.around import alarmed
from hostile.ranks.moves.move import Table, some_rank

if TYPE_CHECKING:
    from hostile.ranks.loop import Loop

TABLE = Table()


# Calls


@TABLE.move()
def save_alone(loop: Loop, chance: Random) -> None:
    """Only one rank saves; all continue to train, and may save the next step."""
    alone, next_too = some_rank(loop, chance), chance.random() < 0.5
    loop.disturb("save-alone")
    if loop.rank == alone:
        loop.save()
    else:
        loop.passed_over()
    loop.train()
    if next_too:
        loop.save()


@TABLE.move()
def skip_a_save(loop: Loop, chance: Random) -> None:
    """An exception keeps one rank from a save; it continues with the next step, like the others."""
    absent, later = some_rank(loop, chance), chance.randint(0, 2)
    loop.disturb("skip-a-save")
    if loop.rank != absent:
        loop.save()
    else:
        loop.passed_over()
    for _ in range(later):
        loop.train()
        loop.save()


@TABLE.move()
def ask_alone(loop: Loop, chance: Random) -> None:
    """One rank finds the newest checkpoint, or loads or goes back, by itself, while the others save."""
    alone, verb, saves = some_rank(loop, chance), chance.choice(["latest", "load", "rewind"]), chance.random() < 0.5
    loop.disturb("ask-alone")
    if loop.rank == alone:
        ask: dict[str, Callable[[], object]] = {
            "latest": loop.checkpointer.latest, "load": lambda: loop.checkpointer.load(loop.job.state),
            "rewind": lambda: loop.checkpointer.rewind(0),
        }
        loop.call(verb, ask[verb])
    if saves:
        loop.save()


@TABLE.move()
def wait_alone(loop: Loop, chance: Random) -> None:
    """One rank waits and fences when the others do not, which affects only itself."""
    alone = some_rank(loop, chance)
    loop.save()
    if loop.rank == alone:
        loop.call("fence", loop.checkpointer.fence)
        loop.call("wait", loop.settle)


@TABLE.move()
def save_other_steps(loop: Loop, chance: Random) -> None:
    """One rank is a step ahead, or behind."""
    other, shift = some_rank(loop, chance), chance.choice([1, 2, -1])
    loop.disturb("save-other-steps")
    loop.newest += 1
    position = loop.newest + 1
    loop.save(step=position + shift if loop.rank == other else position)
    loop.newest = position + max(shift, 0)


@TABLE.move()
def save_twice(loop: Loop, chance: Random) -> None:
    """One rank saves once more than the others, and one step further."""
    twice = some_rank(loop, chance)
    loop.save()
    loop.disturb("save-twice")
    if loop.rank == twice:
        loop.save()
    else:
        loop.passed_over()


# States


def _odd_states(loop: Loop, chance: Random) -> dict[str, dict[str, Any]]:
    state = loop.job.state
    return {
        "more": {**state, "more": torch.ones(40_000)},
        "fewer": {name: value for name, value in state.items() if name != loop.setup.kinds[0]},
        "other words": {**state, "note": {**state["note"], "steps": -loop.rank - 5}},
        "other type": {**state, "note": [1, 2]},
        "odd": {**state, "odd": object()},
        "raises": {**state, "raises": Raising()},
    }


class Raising:
    """An object that cannot be described."""

    def state_dict(self) -> dict[str, object]:
        raise OSError("made up")

    def load_state_dict(self, stored: object) -> None: ...


@TABLE.move(weight=2)
def save_other_states(loop: Loop, chance: Random) -> None:
    """One rank's state has an additional or missing part, or cannot be saved."""
    other = some_rank(loop, chance)
    how = chance.choice(["more", "fewer", "other words", "other type", "odd", "raises"])
    odd = _odd_states(loop, chance)[how]
    if loop.rank == other or how in ("odd", "raises"):
        loop.counts[f"odd {how}"] += 1
    loop.save(state=odd if loop.rank == other else None, excuse=f"state with {how}")


@TABLE.move()
def save_other_shapes(loop: Loop, chance: Random) -> None:
    """A tensor of one rank has another shape or type than on the others."""
    other, how = some_rank(loop, chance), chance.choice(["shape", "type", "place"])
    rows = 300 if how == "shape" and loop.rank == other else 256
    dtype = torch.float16 if how == "type" and loop.rank == other else torch.float32
    begin = 5 if how == "place" and loop.rank == other else 0
    each = fs.Shard(torch.ones(64, 100, dtype=dtype), (rows * loop.size, 100), (64 * loop.rank + begin, 0))
    loop.save(state={**loop.job.state, "odd": each}, excuse=f"another {how}")


# Failures


class Raised(Exception):
    """The exception of the user's code."""


@TABLE.move()
def raise_in_on_event(loop: Loop, chance: Random) -> None:
    """on_event raises on one rank from here on, without an effect."""

    def fail(event: object) -> None:
        raise Raised

    if loop.rank == some_rank(loop, chance):
        loop.on_event = fail


@TABLE.move()
def raise_after_a_save(loop: Loop, chance: Random) -> None:
    """One rank raises after a save, collects garbage, and continues later."""
    loop.save()
    if loop.rank == some_rank(loop, chance):
        try:
            raise Raised
        except Raised:
            gc.collect()
            time.sleep(0.05)
    loop.train()


@TABLE.move()
def interrupt_a_save(loop: Loop, chance: Random) -> None:
    """A signal's handler raises on one rank, at some time during save()."""
    victim, delay_s = some_rank(loop, chance), chance.random() ** 2 * 0.02 + 1e-5
    loop.disturb("interrupt-a-save")
    loop.save(around=(lambda begin: alarmed(begin, delay_s)) if loop.rank == victim else None)


@TABLE.move()
def stand_still(loop: Loop, chance: Random) -> None:
    """All threads of one rank are stopped for a moment, while a save is in flight."""
    victim, delay_s = some_rank(loop, chance), 0.1 + chance.random() * 0.5
    loop.save()
    if loop.rank == victim:
        stopped(delay_s)
    loop.train()


def stopped(delay_s: float) -> None:
    """This process is stopped, and a child wakes it after this time."""
    import os

    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            time.sleep(delay_s)
            os.kill(parent, signal.SIGCONT)
        finally:
            os._exit(0)
    os.kill(parent, signal.SIGSTOP)
    os.waitpid(child, 0)


# Checkpointers


@TABLE.move()
def close_one(loop: Loop, chance: Random) -> None:
    """One rank closes its Checkpointer; the saves of the others fail and say so, and all create new ones."""
    loop.together()
    loop.disturb("close-one")
    if loop.rank == some_rank(loop, chance):
        loop._close()
        loop.passed_over()
    else:
        loop.save()
        loop.call("wait", loop.settle)
    loop._close()
    dist.barrier()
    loop.open()
    loop.unsettled.clear()


@TABLE.move()
def one_more(loop: Loop, chance: Random) -> None:
    """One rank creates a second Checkpointer for the same store, fails to create a third, and reads checkpoints."""
    if loop.rank == some_rank(loop, chance):
        other = loop.opened()
        try:
            loop.opened(alone=3)
            loop.problem("a Checkpointer was made of nonsense")
        except fs.ArgumentError:
            pass
        with loop.opened(alone=True) as alone:
            loop.call("latest by itself", alone.latest)
        other.close()
    loop.save()


@TABLE.move()
def save_by_itself(loop: Loop, chance: Random) -> None:
    """One rank saves with alone=True into a store of its own and loads it, beside the save of all."""
    loop.save()
    if loop.rank == some_rank(loop, chance):
        path = loop.root.parent / f"{loop.root.name}-alone-{loop.rank}"  # another rank may create its own meanwhile
        table = torch.randn(30_000)
        with loop.opened(path, alone=True) as alone:
            alone.save(loop.newest, {"x": {"table": table}}).committed.result(30)
            tensor = torch.zeros_like(table)
            alone.load({"x": {"table": tensor}})
        if not torch.equal(tensor, table):
            loop.problem("what was saved by itself was loaded otherwise")
        shutil.rmtree(path)
    loop.train()


@TABLE.move()
def save_by_itself_in_between(loop: Loop, chance: Random) -> None:
    """One rank tries to save with alone=True into the common store, which has a writer."""
    if not loop.has_writer:  # rank 0 locks it, perhaps only after this rank has tried
        loop.make_known()
    loop.save()
    loop.known = False
    if loop.rank == some_rank(loop, chance):
        try:
            with loop.opened(alone=True) as alone:
                alone.save(loop.newest + 1000, {"x": 1}).committed.result(30)
            loop.problem("two write into one store")
        except (fs.LockedError, fs.StepExistsError):
            pass
