"""Act four: a training that is saved by several ranks, killed, loaded by fewer, killed, and loaded by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from flowstone_demo.kill_loop import newest_step
from flowstone_demo.messages import RankOrder
from flowstone_demo.rank_processes import RankKill, RankRun, run_ranks
from flowstone_demo.sizes import RankDemoSize


def kills(form: RankDemoSize) -> tuple[RankKill, RankKill, None]:
    """The kill that ends the training on each number of ranks."""
    return (
        RankKill(form.killed_saving, (form.victim,), saving=True),
        RankKill(form.killed_at, tuple(range(form.ranks[1])), saving=False),
        None,
    )


def runs_here() -> bool:
    """Whether FSDP2 runs on CPUs: that of torch 2.6 records events on streams, which its CPUs have only by name."""
    import torch

    return hasattr(torch.cpu.Stream, "record_event")


def rank_runs(order: RankOrder, work: Path, show: Callable[[str], None]) -> Iterator[RankRun]:
    """The training on fewer and fewer ranks, each time from the newest committed step. Raises DiedError.

    Before it, the same ranks run the whole training undisturbed, for comparison.
    """
    for ranks, kill in zip(order.form.ranks, kills(order.form), strict=True):
        run = RankRun(ranks, newest_step(Path(order.store)))
        yield run_ranks(order, work / f"across-{ranks}.log", run, kill, show)


def told(run: RankRun, form: RankDemoSize) -> str:
    """One line for a run of the killed training."""
    found = run.found.get(0)
    start = f"{run.ranks} rank{'s' * (run.ranks > 1)}, {'fresh' if found is None else f'from step {found}'}"
    if not run.killed:
        return f"{start}: to the end, step {max(run.losses[0])}"
    if len(run.killed) == run.ranks:
        return f"{start}: all killed after step {form.killed_at}"
    words = "; ".join(sorted(set(run.lost.values())))
    return f"{start}: rank {run.killed[0]} killed as it began to save step {form.killed_saving}; the others: {words}"
