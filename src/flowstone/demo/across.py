"""Act four: a training that is saved by several ranks, killed, loaded by fewer, killed, and loaded by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from flowstone.demo.crew import Blow, Leg, run_leg
from flowstone.demo.forms import RankForm
from flowstone.demo.messages import RankOrder
from flowstone.demo.storm import newest_step


def blows(form: RankForm) -> tuple[Blow, Blow, None]:
    """What ends the training on each number of ranks."""
    return (
        Blow(form.killed_saving, (form.victim,), saving=True),
        Blow(form.killed_at, tuple(range(form.ranks[1])), saving=False),
        None,
    )


def legs(order: RankOrder, work: Path, show: Callable[[str], None]) -> Iterator[Leg]:
    """The training on ever fewer ranks, from the newest committed step each time. Raises DiedError.

    Before it, the same ranks go through the whole of it undisturbed, so that there is something to compare with.
    """
    for ranks, blow in zip(order.form.ranks, blows(order.form), strict=True):
        leg = Leg(ranks, newest_step(Path(order.store)))
        yield run_leg(order, work / f"across-{ranks}.log", leg, blow, show)


def told(leg: Leg, form: RankForm) -> str:
    """One line for a leg of the killed training."""
    found = leg.found.get(0)
    start = f"{leg.ranks} rank{'s' * (leg.ranks > 1)}, {'fresh' if found is None else f'from step {found}'}"
    if not leg.killed:
        return f"{start}: to the end, step {max(leg.losses[0])}"
    if len(leg.killed) == leg.ranks:
        return f"{start}: all killed after step {form.killed_at}"
    words = "; ".join(sorted(set(leg.lost.values())))
    return f"{start}: rank {leg.killed[0]} killed as it began to save step {form.killed_saving}; the others: {words}"
