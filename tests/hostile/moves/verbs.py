"""Calls of the library's own verbs, in any order, correct and incorrect."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import flowstone as fs
from hostile.moves.move import Detection, Table
from hostile.oracle import contents_of, differences

if TYPE_CHECKING:
    from hostile.trainer import Trainer

TABLE = Table()


@TABLE.quiet(weight=12, basic=True)
def save(trainer: Trainer, chance: Random) -> None:
    """Saves, and continues."""
    trainer.save()


@TABLE.quiet(weight=3, basic=True)
def save_by_hand(trainer: Trainer, chance: Random) -> None:
    """Saves with fence="manual": call fence() before the state changes."""
    trainer.save("manual")


@TABLE.quiet(weight=3)
def save_and_wait(trainer: Trainer, chance: Random) -> None:
    """Saves, and waits until the save is durable."""
    save = trainer.save()
    if save is not None and save.save is not None:
        save.save.committed.exception(60)


@TABLE.quiet(weight=6, basic=True)
def train(trainer: Trainer, chance: Random) -> None:
    """A step of training."""
    trainer.train()


@TABLE.quiet(weight=2)
def fence_and_change(trainer: Trainer, chance: Random) -> None:
    """Calls fence(), then changes everything, which is allowed."""
    trainer.checkpointer.fence()
    for tensor in trainer.job.lazy():
        tensor.detach().add_(1)


@TABLE.quiet(weight=2)
def wait(trainer: Trainer, chance: Random) -> None:
    """Waits for every save so far."""
    trainer.call("wait", trainer.checkpointer.wait)
    trainer.look()


@TABLE.quiet()
def latest(trainer: Trainer, chance: Random) -> None:
    """Finds the newest checkpoint, and verifies it."""
    newest = trainer.call("latest", trainer.checkpointer.latest)
    if newest is not None:
        newest.verify()


@TABLE.quiet()
def read_back(trainer: Trainer, chance: Random) -> bool | None:
    """Opens the store beside the Checkpointer, and reads one tensor of a checkpoint."""
    steps = sorted(trainer.root.glob("step-*"))
    if not steps or trainer.setup.keep is not None:
        return False
    checkpoint = fs.open(trainer.root, step=int(chance.choice(steps).name.removeprefix("step-")))
    checkpoint.read(chance.choice(list(checkpoint.tensors)))
    return None


@TABLE.quiet(weight=2)
def load(trainer: Trainer, chance: Random) -> bool | None:
    """Goes back to the newest checkpoint; a load that is refused must not change anything."""
    known = [attempt for attempt in trainer.tries if not attempt.gone]
    if any(save.kind != trainer.job.kind for save in known):
        return False  # it would add slots that this optimizer does not have
    before = contents_of(trainer.state)
    try:
        report = trainer.checkpointer.load(trainer.state)
    except fs.NoCheckpointError:
        return False
    except fs.MismatchError:
        wrong = differences(before, contents_of(trainer.state))
        if wrong:
            trainer.problem(f"a load was refused, and has changed {wrong[:4]}")
        return None
    trainer.inconsistent = trainer.torn = False
    (saved,) = (save for save in known if save.step == report.step)
    wrong = differences(saved.wanted, contents_of(trainer.state))
    if wrong:
        trainer.problem(f"step {report.step} was loaded wrong: {wrong[:4]}")
    return None


@TABLE.quiet()
def rewind(trainer: Trainer, chance: Random) -> bool | None:
    """Sets newer steps aside, and saves again from there."""
    trainer.settle()
    trainer.look()
    steps = sorted(int(path.name.removeprefix("step-")) for path in trainer.root.glob("step-*"))
    if not steps:
        return False
    back_to = chance.choice(steps)

    def go_back() -> bool:
        try:
            trainer.checkpointer.rewind(back_to)
        except fs.NoCheckpointError:
            if trainer.setup.keep is None or (trainer.root / f"step-{back_to:08d}").exists():
                raise
            return False  # retention, which runs after a commit, has removed it
        return True

    if trainer.call("rewind", go_back) is False:
        return None
    for attempt in trainer.tries:
        attempt.gone = attempt.gone or attempt.step > back_to
    trainer.newest = back_to
    return None


@TABLE.quiet()
def reopen(trainer: Trainer, chance: Random) -> None:
    """Closes the Checkpointer, and creates another one for the same store."""
    trainer.call("close", trainer.checkpointer.close)
    trainer.checkpointer = trainer.opened()


@TABLE.quiet()
def use_after_close(trainer: Trainer, chance: Random) -> None:
    """Closes the Checkpointer, whose verbs are then refused by name, and creates another one."""
    trainer.call("close", trainer.checkpointer.close)
    for verb in (trainer.checkpointer.latest, trainer.checkpointer.fence, trainer.checkpointer.wait):
        try:
            verb()
        except fs.ClosedError:
            continue
        trainer.problem("a closed Checkpointer works")
    trainer.train()  # its hooks are removed
    trainer.checkpointer = trainer.opened()


@TABLE.quiet()
def second_writer(trainer: Trainer, chance: Random) -> None:
    """A second Checkpointer for a store that has a writer: it may read, and its saves are refused."""
    save = trainer.save()
    other = trainer.opened()
    other.latest()
    try:
        other.save(trainer.newest + 1, {"x": 1})
        trainer.problem("two Checkpointers write into one store")
    except fs.LockedError:
        pass
    finally:
        other.close()
    if save is not None and save.save is None and not save.excused:
        trainer.problem("the first writer could not save")


@TABLE.quiet()
def save_old_step(trainer: Trainer, chance: Random) -> bool | None:
    """Saves a step that exists, which is refused."""
    if not any(attempt.save is not None and attempt.failure is None and not attempt.gone for attempt in trainer.tries):
        return False
    trainer.settle()
    if not list(trainer.root.glob("step-*")):
        return False
    step = int(max(trainer.root.glob("step-*")).name.removeprefix("step-"))
    try:
        trainer.checkpointer.save(step, trainer.state)
        trainer.problem(f"step {step} was saved over")
    except fs.StepExistsError:
        pass
    except fs.DamagedError:
        if not trainer.inconsistent:
            raise
    return None


@TABLE.quiet()
def save_what_cannot_be(trainer: Trainer, chance: Random) -> None:
    """Saves an object that cannot be saved, which is refused by name and does not affect the next save."""
    try:
        trainer.checkpointer.save(trainer.newest + 1, {**trainer.state, "odd": object()})
        trainer.problem("an object was saved")
    except fs.SaveFailedError:
        pass
    except fs.StateError:
        pass
    except fs.DamagedError:
        if not trainer.inconsistent:
            raise


@TABLE.escapes(Detection.SAMPLES)
def broken_promise(trainer: Trainer, chance: Random) -> None:
    """Saves with fence="manual", and changes everything without calling fence()."""
    trainer.save("manual")
    trainer.escapes("broken-promise")
    for tensor in trainer.job.lazy():
        tensor.data.add_(1)
