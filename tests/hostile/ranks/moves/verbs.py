"""Calls that all ranks make, at about the same time."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import flowstone as fs
from hostile.ranks.moves.move import Table, some_rank
from hostile.ranks.oracle import steps_in
from hostile.ranks.states import Tall

if TYPE_CHECKING:
    from hostile.ranks.loop import Loop

TABLE = Table()


@TABLE.move(weight=6, basic=True)
def save(loop: Loop, chance: Random) -> None:
    """Saves, and continues."""
    loop.save()


@TABLE.move(weight=2)
def save_by_hand(loop: Loop, chance: Random) -> None:
    """Saves with fence="manual", and calls fence() before the next step."""
    loop.save("manual")
    loop.call("fence", loop.checkpointer.fence)


@TABLE.move(weight=2, basic=True)
def save_and_wait(loop: Loop, chance: Random) -> None:
    """Saves, and waits until the save is durable."""
    save = loop.save()
    if save.save is not None:
        save.save.committed.exception(30)


@TABLE.move(weight=5, basic=True)
def train(loop: Loop, chance: Random) -> None:
    """A step of training."""
    loop.train()


@TABLE.move(weight=2)
def save_every_step(loop: Loop, chance: Random) -> None:
    """Saves after each of some steps."""
    for _ in range(chance.randint(2, 4)):
        loop.train()
        loop.save()


@TABLE.move()
def straggle(loop: Loop, chance: Random) -> None:
    """One rank is late for a save, and the others have already continued to train."""
    late, delay_s = some_rank(loop, chance), chance.random() * 0.4
    if loop.rank == late:
        gc.collect()
        time.sleep(delay_s)
    loop.save()
    loop.train()


@TABLE.move(weight=2)
def save_in_a_forward(loop: Loop, chance: Random) -> None:
    """Saves on another thread while FSDP2 has gathered a layer for its forward pass, which continues undisturbed."""
    module = loop.job.state.get("fsdp")
    if not isinstance(module, Tall):
        loop.save()
        return
    layer, outcomes = module.tall, list[fs.Save | Exception]()
    x = torch.linspace(-1, 1, layer.in_features)
    with torch.no_grad():
        expected = layer(x)

    def around(begin: Callable[[], fs.Save]) -> fs.Save:
        def ask() -> None:
            try:
                outcomes.append(begin())
            except Exception as error:
                outcomes.append(error)

        def save(*_: object) -> None:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()

        hook = layer.register_forward_pre_hook(save)
        try:
            with torch.no_grad():
                if not torch.equal(layer(x), expected):
                    loop.problem("a forward pass is another one where a thread saves meanwhile")
        finally:
            hook.remove()
        if isinstance(outcomes[0], Exception):
            raise outcomes[0]
        return outcomes[0]

    loop.save(around=around)


@TABLE.move()
def communicate_meanwhile(loop: Loop, chance: Random) -> None:
    """A collective runs around a save; some ranks start it before the save and some after."""
    value, behind = torch.ones(1000), chance.random() < 0.5
    work = dist.all_reduce(value, async_op=True)
    if behind and loop.rank % 2:
        work.wait()
    loop.save()
    work.wait()
    if value[0] != loop.size:
        loop.problem("a collective beside a save has another sum")


@TABLE.move(weight=2)
def wait(loop: Loop, chance: Random) -> None:
    """Waits for every save so far."""
    loop.call("wait", loop.settle)


@TABLE.move()
def latest(loop: Loop, chance: Random) -> None:
    """All ranks find the newest checkpoint."""
    loop.in_step()
    result = loop.call("latest", loop.checkpointer.latest)
    least = max((attempt.step for attempt in loop.tries if loop.is_committed(attempt)), default=-1)
    if (-1 if result is None else result.step) < least:
        loop.problem(f"the newest is {result}, and {least} was committed")


@TABLE.move()
def load(loop: Loop, chance: Random) -> None:
    """All ranks go back to the newest checkpoint."""
    loop.in_step()
    loop.load(verify_first=chance.random() < 0.2)


@TABLE.move()
def rewind(loop: Loop, chance: Random) -> None:
    """Newer steps are set aside, and saved again from there."""
    loop.in_step()
    steps = sorted(steps_in(loop.root))
    dist.barrier()
    if not steps or loop.setup.keep is not None:
        return
    back_to = chance.choice(steps)
    loop.call("rewind", lambda: loop.checkpointer.rewind(back_to))
    loop.tries = [attempt for attempt in loop.tries if attempt.step <= back_to]
    loop.tell("rewound", {"step": back_to})
    loop.newest = back_to
    dist.barrier()


@TABLE.move()
def reopen(loop: Loop, chance: Random) -> None:
    """All ranks close their Checkpointers, some earlier than others, and create new ones."""
    late = chance.randrange(loop.size)
    if loop.rank == late:
        time.sleep(chance.random() * 0.2)
    if loop.unsettled:
        loop.together()
    loop._close()
    loop.open()


@TABLE.move()
def change_in_place_of_a_step(loop: Loop, chance: Random) -> None:
    """All ranks call fence(), and change their tensors in the same way, which is allowed."""
    loop.call("fence", loop.checkpointer.fence)
    with torch.no_grad():
        for tensor in loop.job.lazy():
            tensor.mul_(1.5)


@TABLE.move()
def use_after_close(loop: Loop, chance: Random) -> None:
    """All ranks close, calls are refused by name, and all create new ones."""
    if loop.unsettled:
        loop.together()
    loop._close()
    for verb in (loop.checkpointer.latest, loop.checkpointer.wait):
        try:
            verb()
            loop.problem("a closed Checkpointer works")
        except fs.ClosedError:
            continue
    loop.train()
    loop.open()
