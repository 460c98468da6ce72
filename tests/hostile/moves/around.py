"""Events around a loop: forks, threads, signals, garbage collection, exceptions."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch

import flowstone as fs
from hostile.moves.move import Detection, Table
from hostile.oracle import contents_of, differences
from interrupts import Struck, alarmed, struck

if TYPE_CHECKING:
    from hostile.trainer import Trainer

TABLE = Table()
LINES_MAX = 4000  # about as many lines as a save runs, in all modules


# Collection and forks


@TABLE.quiet()
def collect_garbage(trainer: Trainer, chance: Random) -> None:
    """Garbage is collected."""
    gc.collect(chance.randint(0, 2))


@TABLE.quiet()
def make_garbage(trainer: Trainer, chance: Random) -> None:
    """Cycles with tensors in them are made and dropped, and their memory is used again."""
    for _ in range(5):
        ring: list[Any] = [torch.rand(20_000)]
        ring.append(ring)
    del ring
    gc.collect()
    _ = [torch.zeros(50_000) for _ in range(5)]


@TABLE.quiet()
def fork(trainer: Trainer, chance: Random) -> None:
    """A forked child changes its copy of the state, makes forbidden calls, collects garbage, and ends."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for tensor in trainer.job.lazy():
                if not tensor.is_shared():  # by share_memory(): it belongs to the parent as well
                    tensor.data.fill_(3)
            code = _in_the_child(trainer)
        finally:
            os._exit(code)
    ended = _reap(child)
    if ended:
        trainer.problem(f"a forked child ended with {ended}")


def _in_the_child(trainer: Trainer) -> int:
    for verb in (trainer.checkpointer.fence, trainer.checkpointer.latest):
        try:
            verb()
        except fs.ClosedError:
            continue
        return 2
    trainer.checkpointer.close()
    for optimizer in trainer.job.optimizers:
        optimizer.zero_grad()
    gc.collect()
    return 0


def _reap(child: int) -> int:
    for _ in range(1000):
        result, status = os.waitpid(child, os.WNOHANG)
        if result:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


# Threads


@TABLE.escapes(Detection.SAMPLES)
def change_from_a_thread(trainer: Trainer, chance: Random) -> None:
    """A thread changes everything again and again, while the main thread waits for the captures."""
    tensors, end = trainer.job.lazy(), threading.Event()

    def change() -> None:
        while not end.is_set():
            for tensor in tensors:
                tensor.data.add_(1)

    thread = threading.Thread(target=change)
    for tensor in tensors:
        tensor.data.add_(1)
    thread.start()
    trainer.call("fence", trainer.checkpointer.fence)
    end.set()
    thread.join()


@TABLE.quiet()
def wait_from_a_thread(trainer: Trainer, chance: Random) -> bool | None:
    """Other threads wait for futures while the main thread continues."""
    waited = [attempt.save for attempt in trainer.tries if attempt.save is not None]
    threads = [threading.Thread(target=save.committed.exception, args=(20,)) for save in waited[-2:]]
    for thread in threads:
        thread.start()
    trainer.train()
    for thread in threads:
        thread.join()
    return None if threads else False


@TABLE.quiet()
def verbs_from_threads(trainer: Trainer, chance: Random) -> None:
    """Several threads call verbs of one Checkpointer at once: each succeeds, or is refused by name."""
    wrong: list[str] = []

    def ask(verb: Callable[[], object]) -> None:
        try:
            verb()
        except fs.FlowstoneError:
            pass
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")

    verbs = [trainer.checkpointer.latest, trainer.checkpointer.fence, trainer.checkpointer.wait]
    threads = [threading.Thread(target=ask, args=(chance.choice(verbs),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        trainer.problem(f"verbs in threads raised {wrong}")


@TABLE.quiet()
def step_in_a_thread(trainer: Trainer, chance: Random) -> None:
    """Another thread makes the training step."""
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()


# Signals


def _line(chance: Random) -> int:
    return int(LINES_MAX ** chance.random())


def _delay_s(chance: Random) -> float:
    return chance.random() ** 2 * 0.02 + 1e-5


@TABLE.quiet()
def strike_a_save(trainer: Trainer, chance: Random) -> None:
    """A signal's handler raises at some line of save()."""
    trainer.save(around=lambda begin: struck(begin, _line(chance)))


@TABLE.quiet()
def alarm_a_save(trainer: Trainer, chance: Random) -> None:
    """SIGALRM's handler raises at some time during save()."""
    trainer.save(around=lambda begin: alarmed(begin, _delay_s(chance)))


def _verb(trainer: Trainer, chance: Random) -> Callable[[], object]:
    checkpointer = trainer.checkpointer
    return chance.choice([checkpointer.wait, checkpointer.fence, checkpointer.latest, checkpointer.close])


@TABLE.quiet()
def strike_a_verb(trainer: Trainer, chance: Random) -> None:
    """A signal's handler raises at some line of wait(), fence(), latest() or close()."""
    verb = _verb(trainer, chance)
    ask = partial(trainer.call, "a verb", verb)
    with contextlib.suppress(Struck):
        if chance.random() < 0.5:
            struck(ask, _line(chance))
        else:
            alarmed(ask, _delay_s(chance))
    if verb == trainer.checkpointer.close:
        trainer.call("close", trainer.checkpointer.close)
        trainer.checkpointer = trainer.opened()


@TABLE.quiet()
def strike_a_load(trainer: Trainer, chance: Random) -> None:
    """A signal's handler raises at some line of load(); a half loaded state cannot be saved."""
    before = contents_of(trainer.state)
    try:
        struck(lambda: trainer.checkpointer.load(trainer.state), _line(chance))
    except Struck:
        after = contents_of(trainer.state)
        held = [before, *(attempt.wanted for attempt in trainer.tries)]
        whole = any(not differences(expected, after) for expected in held)
        trainer.inconsistent, trainer.torn = True, not whole
    except (fs.NoCheckpointError, fs.MismatchError):
        pass
    else:
        trainer.inconsistent = trainer.torn = False


# Exceptions


class Raised(Exception):
    """The exception of a user's hook."""


def _raise(*_: object) -> None:
    raise Raised


@TABLE.quiet()
def raise_in_forward(trainer: Trainer, chance: Random) -> None:
    """A hook raises in forward."""
    hook = trainer.job.model.norm.register_forward_hook(_raise)
    with contextlib.suppress(Raised):
        trainer.job.backward()
    hook.remove()


@TABLE.quiet()
def raise_in_backward(trainer: Trainer, chance: Random) -> None:
    """A hook of a gradient raises in backward."""
    parameter = next(p for p in trainer.job.model.parameters() if p.requires_grad)
    hook = parameter.register_hook(_raise)
    with contextlib.suppress(Raised):
        trainer.job.backward()
    hook.remove()


@TABLE.quiet()
def raise_before_the_step(trainer: Trainer, chance: Random) -> None:
    """A user's hook raises before the step."""
    hook = trainer.job.optimizers[0].register_step_pre_hook(_raise)
    with contextlib.suppress(Raised):
        trainer.train()
    hook.remove()
    trainer.job.zero_grad()


@TABLE.quiet()
def raise_in_state_dict(trainer: Trainer, chance: Random) -> None:
    """A hook raises while the state is described: that save is refused by name."""
    hook = trainer.job.model.register_state_dict_pre_hook(_raise)
    try:
        trainer.checkpointer.save(trainer.newest + 1, trainer.state)
        trainer.problem("a state was saved that could not be described")
    except (fs.StateError, fs.SaveFailedError):
        pass
    except fs.DamagedError:
        if not trainer.inconsistent:
            raise
    finally:
        hook.remove()


@TABLE.quiet()
def raise_in_on_event(trainer: Trainer, chance: Random) -> None:
    """on_event raises from here on, without an effect."""
    trainer.on_event = _raise


@TABLE.quiet()
def call_verbs_in_on_event(trainer: Trainer, chance: Random) -> None:
    """on_event calls verbs from here on: they succeed, or are refused by name at once."""

    def ask(event: object) -> None:
        for verb in (trainer.checkpointer.latest, trainer.checkpointer.wait, trainer.checkpointer.fence):
            with contextlib.suppress(fs.FlowstoneError):
                verb()

    trainer.on_event = ask


@TABLE.quiet()
def call_verbs_in_a_callback(trainer: Trainer, chance: Random) -> None:
    """A future's callback calls verbs."""
    save = trainer.save()
    if save is None or save.save is None:
        return
    checkpointer = trainer.checkpointer

    def ask(_: object) -> None:
        for verb in (checkpointer.latest, checkpointer.wait):
            with contextlib.suppress(fs.FlowstoneError):
                verb()

    save.save.committed.add_done_callback(ask)
    save.save.captured.add_done_callback(ask)


@TABLE.quiet()
def replace_the_model_in_a_hook(trainer: Trainer, chance: Random) -> None:
    """A post hook of the step replaces the memory of the weights."""
    def replace(*_: object) -> None:
        for parameter in trainer.job.large():
            parameter.data = parameter.data.clone()

    hook = trainer.job.optimizers[0].register_step_post_hook(replace)
    trainer.train()
    hook.remove()

